"""What is read of a vision-language checkpoint: config, names of tensors, adapters; against transformers and peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_models import GEMMA_TEXT, MODELS, TEXT, change_config, load, some_ids

from rollkv.models.checkpoint import open_checkpoint
from rollkv.models.config import CheckpointError
from rollkv.models.families import FAMILIES
from rollkv.models.family import REQUIRED
from rollkv.models.wrappers import TEXT_DEFAULTS, WRAPPERS, read_model

QWENS = ("qwen2_vl", "qwen2_5_vl")


# Settings


def config_of(name: str, **more: Any) -> dict[str, Any]:
    """A config.json as a user would write it: what MODELS says."""
    return json.loads(json.dumps({"model_type": name, **MODELS[name], **more}))


@pytest.mark.parametrize("name", QWENS)
def test_an_older_qwen_config_has_the_texts_settings_at_the_outer_level(name: str, saved: Any, tmp_path: Path) -> None:
    def flatten(raw: dict[str, Any]) -> None:
        text = raw.pop("text_config")
        rope = text.pop("rope_parameters")
        for key in ("layer_types", "model_type"):
            del text[key]
        raw.update(text, rope_theta=rope["rope_theta"], vision_token_id=11, sliding_window=32768)
        raw["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}

    folder = change_config(saved(name).folder, tmp_path / "flat", flatten)
    ids = some_ids(9)
    with torch.no_grad():  # transformers reads the same model from it
        assert torch.equal(load(folder)(torch.tensor([ids])).logits, saved(name).model(torch.tensor([ids])).logits)
    want = open_checkpoint(str(saved(name).folder)).config
    assert open_checkpoint(str(folder)).config == want


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_what_a_text_config_leaves_out_is_what_transformers_takes_for_it(kind: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind)
    ours = TEXT_DEFAULTS[kind]
    family = FAMILIES[kind] if kind in FAMILIES else FAMILIES["qwen2"]
    assert {key for key, value in family.settings.items() if value is REQUIRED} <= ours.keys()
    for key, value in ours.items():
        assert (theirs.rope_parameters[key] if key == "rope_theta" else getattr(theirs, key)) == value, key


@pytest.mark.parametrize(
    ("name", "text", "more"),
    [
        (  # what the first LLaVA 1.5 in this format says, and no more
            "llava",
            {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064},
            {"ignore_index": -100, "pad_token_id": 32001, "vocab_size": 32064, "projector_hidden_act": "gelu"},
        ),
        (  # Gemma 3 4B
            "gemma3",
            {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            {"eos_token_id": [1, 106], "mm_tokens_per_image": 256, "boi_token_index": 255999},
        ),
        (  # Gemma 4 E2B
            "gemma4",
            {
                "hidden_size": 1536,
                "intermediate_size": 6144,
                "model_type": "gemma4_text",
                "num_hidden_layers": 35,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 20,
                "use_double_wide_mlp": True,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
                "final_logit_softcapping": 30.0,
                "use_bidirectional_attention": None,
            },
            {
                "eos_token_id": [1, 106],
                "audio_config": {},
                "eoa_token_id": 258883,
                "eoa_token_index": 258883,
                "vision_soft_tokens_per_image": 280,
            },
        ),
    ],
)
def test_the_short_text_config_of_a_published_checkpoint_gives_transformers_geometry(
    name: str, text: dict[str, Any], more: dict[str, Any]
) -> None:
    from transformers import AutoConfig

    model = read_model({"model_type": name, "text_config": text, "vision_config": {}, **more}, "config.json")
    theirs = AutoConfig.for_model(name, text_config=dict(text)).text_config
    ours = model.config
    assert (ours.vocab_size, ours.hidden_size, ours.num_heads) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_attention_heads,
    )
    assert ours.layers[0].kv_heads == theirs.num_key_value_heads
    head_dim = theirs.per_layer_config[0].head_dim if name == "gemma4" else theirs.head_dim
    assert ours.layers[0].head_dim == head_dim
    assert ours.layers[0].intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert (ours.norm_eps, ours.max_position) == (theirs.rms_norm_eps, theirs.max_position_embeddings)


@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_tied_when_transformers_ties_it(name: str, outer: bool | None, inner: bool | None) -> None:
    from transformers import AutoConfig

    raw = config_of(name)
    raw.pop("tie_word_embeddings", None)
    if outer is not None:
        raw["tie_word_embeddings"] = outer
    if inner is not None:
        raw["text_config"]["tie_word_embeddings"] = inner
    model = read_model(raw, "config.json")
    theirs = AutoConfig.for_model(**raw).tie_word_embeddings
    if outer is None:  # transformers falls back on a default of the class; here a head in the file is the head
        theirs = theirs or inner is True
    assert model.config.tied_head is theirs
    assert model.tied_unless_stored is (outer is None and not (WRAPPERS[name].tied_by_text and inner is True))


def test_eos_ids_come_from_both_levels_and_bos_from_the_text_first() -> None:
    text = MODELS["llava"]["text_config"]
    assert read_model(config_of("llava", eos_token_id=[5, 2]), "c").config.eos_token_ids == (5, 2, 2)
    assert read_model(config_of("llava", bos_token_id=5), "c").config.bos_token_id == 1
    without = {key: value for key, value in text.items() if key not in ("bos_token_id", "eos_token_id")}
    model = read_model(config_of("llava", text_config=without, bos_token_id=5, eos_token_id=9), "c")
    assert (model.config.bos_token_id, model.config.eos_token_ids) == (5, (9,))


def test_text_settings_that_stand_at_both_levels_are_understood_when_they_agree() -> None:
    plain = read_model(config_of("qwen2_vl"), "c").config
    both = {"hidden_size": 48, "num_attention_heads": 6, "hidden_act": "silu", "vocab_size": 211}
    assert read_model(config_of("qwen2_vl", **both), "c").config == plain


def test_what_transformers_4_wrote_about_generation_and_training_is_passed_over() -> None:
    text = {
        **MODELS["smolvlm"]["text_config"],
        **{"do_sample": False, "max_length": 20, "top_k": 50, "pruned_heads": {}, "_flash_attn_2_enabled": True},
        **{"perceiver_config": {"model_type": "vllama3"}, "pixel_shuffle_factor": 4, "qk_layer_norms": False},
    }
    assert read_model(config_of("smolvlm", text_config=text), "c") == read_model(config_of("smolvlm"), "c")


def test_bidirectional_images_of_a_gemma_4_are_known_inside_of_a_whole_model_and_alone() -> None:
    large = {**GEMMA4_TEXT, "use_bidirectional_attention": "vision"}
    alone = {**large, "model_type": "gemma4_text"}
    for raw in (config_of("gemma4", text_config=large), alone):
        model = read_model(raw, "c")
        assert model.image_attention == "bidirectional"
        assert model.config == read_model(config_of("gemma4"), "c").config  # nothing changes for text
    assert read_model(config_of("gemma4"), "c").image_attention == "causal"
    both = config_of("gemma4", text_config=large, use_bidirectional_attention="vision")
    assert read_model(both, "c").image_attention == "bidirectional"


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA4_TEXT = MODELS["gemma4"]["text_config"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llava", {"no_such": 1}, "config.json: setting 'no_such' = '1' is not understood for llava"),
        (
            "llava",
            {"hidden_size": 37},
            "setting 'hidden_size' = '37' is not understood for llava; text_config says '36'",
        ),
        ("qwen2_vl", {"rms_norm_eps": 0.5}, "setting 'rms_norm_eps' = '0.5' is not understood for qwen2_vl"),
        ("gemma3", {"quantization_config": {"bits": 4}}, "setting 'quantization_config' = .* is not understood"),
        ("gemma3", {"is_causal": False}, "setting 'is_causal' = 'False' is not understood for gemma3"),
        ("gemma3", {"downsample_ratio": 0.5}, "setting 'downsample_ratio' = '0.5' is not understood for gemma3"),
        ("smolvlm", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', must be true or false"),
        ("smolvlm", {"eos_token_id": "</s>"}, "config.json: eos_token_id is '</s>', must be a token id or a list"),
        ("llava", {"text_config": None}, "config.json: text_config is 'None', must be an object"),
        ("llava", {"text_config": {**TEXT, "model_type": "opt"}}, "text_config: model_type 'opt' is not supported"),
        ("llava", {"text_config": {**TEXT, "foo": 1}}, "text_config: setting 'foo' = '1' is not understood for llama"),
        ("llava", {"text_config": {"model_type": "olmo2"}}, "text_config: vocab_size, .* missing"),
        (
            "gemma3",
            {"text_config": {**GEMMA_TEXT, "model_type": "gemma2"}},
            "text_config: model_type 'gemma2' is not supported in a gemma3 model; supported: gemma3_text",
        ),
        (
            "gemma3",
            {"text_config": {**GEMMA_TEXT, "final_logit_softcapping": 30.0}},
            "a gemma3_text decoder caps, scales or biases its logits, which the head of a gemma3 model does not do",
        ),
        ("llava", {"text_config": {**TEXT, "model_type": "granite", "logits_scaling": 2.0}}, "a granite decoder caps"),
        (
            "gemma3",
            {"text_config": {**GEMMA_TEXT, "use_bidirectional_attention": True}},
            "use_bidirectional_attention is True; allowed for gemma3_text: False",
        ),
        (
            "gemma4",
            {"text_config": {**GEMMA4_TEXT, "use_bidirectional_attention": "all"}},
            "text_config: use_bidirectional_attention is 'all'; allowed for gemma4_text: 'vision', null",
        ),
        (
            "gemma4",
            {"use_bidirectional_attention": "vision"},
            "setting 'use_bidirectional_attention' = 'vision' is not",
        ),
        ("gemma4", {"text_config": {**TEXT, "model_type": "gemma3_text"}}, "supported: gemma4_text"),
        (
            "qwen2_vl",
            {"text_config": {**TEXT, "hidden_size": 48, "rope_parameters": ROPE}},
            "text_config: mrope_section is missing; a qwen2_vl model has three rotary positions",
        ),
    ],
)
def test_a_setting_that_may_change_the_texts_numbers_is_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model(config_of(name, **settings), "config.json")
    assert "\n" not in str(caught.value)


def test_an_unknown_outer_type_is_named_with_all_that_are_supported() -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model({"model_type": "llava_next", "text_config": TEXT}, "config.json")
    assert str(caught.value) == (
        "config.json: model_type 'llava_next' is not supported; supported: " + ", ".join(sorted([*FAMILIES, *WRAPPERS]))
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_setting_that_transformers_writes_is_understood(name: str, saved: Any) -> None:
    raw = json.loads((saved(name).folder / "config.json").read_text("utf-8"))
    assert read_model(raw, "config.json").wrapper is WRAPPERS[name]


@pytest.mark.parametrize(
    ("key", "value"), [("llama_4_scaling_beta", 0.1), ("mrope_section", [1, 1, 1])], ids=lambda value: str(value)
)
def test_a_rotation_that_transformers_class_passes_over_is_refused(key: str, value: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "original_max_position_embeddings": 64, key: value}
    plain = {**TEXT, "model_type": "llama", "rope_parameters": rope}
    with pytest.raises(CheckpointError, match=f"c: rope setting '{key}' is not understood for llama"):
        read_model(plain, "c")
    inside = {**MODELS["llava"], "model_type": "llava", "text_config": plain}
    with pytest.raises(CheckpointError, match=f"rope setting '{key}' is not understood for lla"):
        read_model(inside, "c")
