from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SMALL

from rollkv.models.config import CheckpointError, DecoderConfig
from rollkv.models.families import FAMILIES, expected_shape, read_config, tensor_names
from rollkv.runtime.mask import causal_mask

BARE = {
    "model_type": "llama",
    "vocab_size": 307,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def saved(folder: Path, family: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """transformers' config object, and the config.json that it writes."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**SMALL, **settings})
    config.save_pretrained(folder)
    return config, json.loads((folder / "config.json").read_text())


def read(**settings: Any) -> DecoderConfig:
    return read_config({**BARE, **settings}, "config.json")


def refused(match: str, **settings: Any) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        read(**settings)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


# What transformers writes


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("more", [{}, {"head_dim": 10}, {"tie_word_embeddings": True}, {"num_key_value_heads": 6}])
def test_a_config_that_transformers_wrote_gives_its_models_own_shapes(
    tmp_path: Path, family: str, more: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    theirs, raw = saved(tmp_path, family, **more)
    config = read_config(raw, "config.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}  # a tied head appears once
    assert {names.hf: expected_shape(names.decoder, config) for names in tensor_names(config)} == shapes
    attention = model.model.layers[0].self_attn
    assert config.head_dim == attention.head_dim
    assert config.num_heads // config.num_kv_heads == attention.num_key_value_groups
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.max_position == theirs.max_position_embeddings
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.tied_head is theirs.tie_word_embeddings


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_setting_that_transformers_can_write_is_read_or_known_to_be_harmless(family: str) -> None:
    from transformers import AutoConfig

    raw = AutoConfig.for_model(family, **SMALL).to_dict()
    assert read_config(raw, "config.json").family == family


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_absent_setting_stands_for_what_transformers_takes_for_it(family: str) -> None:
    from transformers import AutoConfig

    bare = {key: value for key, value in BARE.items() if key != "model_type"}
    theirs = AutoConfig.for_model(family, **bare)
    config = read_config({**bare, "model_type": family}, "config.json")
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.tied_head is theirs.tie_word_embeddings
    assert config.bos_token_id == theirs.bos_token_id
    eos = () if theirs.eos_token_id is None else (theirs.eos_token_id,)
    assert config.eos_token_ids == eos
    windows = getattr(theirs, "sliding_window", None)
    assert set(config.windows) == {windows}


def test_biases_follow_the_settings_and_qwen2_has_them_always(tmp_path: Path) -> None:
    def biases(**settings: Any) -> tuple[bool, bool, bool]:
        config = read(**settings)
        return config.qkv_bias, config.out_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)
    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="qwen3", attention_bias=True) == (True, True, False)


# Windows


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": 5}),
    ("mistral", {"sliding_window": 100}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 5}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5}),  # max_window_layers 28 is above every layer
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
]


@pytest.mark.parametrize(("family", "settings"), WINDOWS)
def test_visible_keys_per_row_equal_the_masks_that_transformers_hands_to_each_layer(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    n = 12
    theirs, raw = saved(tmp_path, family, num_hidden_layers=3, **settings)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    masks = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    with torch.no_grad():
        model(torch.arange(n)[None])
    windows = read_config(raw, "config.json").windows
    assert len(windows) == len(masks) == 3
    for window, mask in zip(windows, masks, strict=True):
        ours = causal_mask(np.ones(n, np.int64), -1.0, window) == 0
        np.testing.assert_array_equal(ours, mask[0, 0].numpy() == 0)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}),
    ],
)
def test_a_window_of_zero_is_none(family: str, settings: dict[str, Any]) -> None:
    assert read(model_type=family, sliding_window=0, **settings).windows == (None, None)


def test_layer_types_are_checked_even_where_the_windows_are_off() -> None:
    refused("layer_types .* must be 2 of", model_type="qwen3", layer_types=["linear_attention", "full_attention"])
    assert read(model_type="qwen3", layer_types=["full_attention"] * 2).windows == (None, None)


@pytest.mark.parametrize("window", [-1, 2.5, "4096", True, [3]])
def test_a_window_that_is_no_number_of_tokens_is_refused(window: Any) -> None:
    refused("sliding_window is .*, must be a positive integer or null", model_type="mistral", sliding_window=window)


@pytest.mark.parametrize(
    "kinds",
    [["full_attention"], ["full_attention", "chunked_attention"], "full_attention", [["full_attention"], []], 3],
)
def test_layer_types_must_be_one_known_word_per_layer(kinds: Any) -> None:
    refused(
        "layer_types .* must be 2 of full_attention, sliding_attention",
        model_type="qwen3",
        use_sliding_window=True,
        layer_types=kinds,
    )


@pytest.mark.parametrize("value", ["1", 1.5, -1, True, None])
def test_max_window_layers_must_be_a_number_of_layers(value: Any) -> None:
    refused("max_window_layers is .*, must be", model_type="qwen2", use_sliding_window=True, max_window_layers=value)


# Rotary settings


def test_rope_settings_read_the_same_from_the_older_and_the_newer_form() -> None:
    linear = read(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5000.0).rope
    assert (linear.type, linear.factor, linear.theta) == ("linear", 2.0, 5000.0)
    assert linear == read(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}).rope
    older = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    llama3 = read(rope_scaling=older, rope_theta=500000.0).rope
    assert llama3 == read(rope_parameters=LLAMA3).rope
    assert (llama3.factor, llama3.low_freq_factor, llama3.high_freq_factor) == (8.0, 1.0, 4.0)
    assert (llama3.original_max_position, llama3.theta, llama3.rotary_dim) == (64, 500000.0, 6)
    assert read(rope_theta=1e6, rope_scaling=None).rope.theta == 1e6
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}) == read(
        rope_theta=1e6
    )


def test_the_older_rope_form_gives_the_frequencies_that_transformers_computes_from_it(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollkv.models.layers import inverse_frequencies

    for scaling in ({"type": "linear", "factor": 2.0}, {k: v for k, v in LLAMA3.items() if k != "rope_theta"}):
        raw = {**BARE, "rope_theta": 5000.0, "rope_scaling": scaling}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        ours = inverse_frequencies(read_config(raw, "config.json").rope)
        np.testing.assert_allclose(np.asarray(ours), model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope", "foo", None, 3, ["linear"]])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_type_names_those_that_are_supported(kind: Any, where: str) -> None:
    refused(
        "rope type .* is not supported; supported: default, linear, llama3",
        **{where: {"rope_type": kind, "factor": 2.0}},
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "'partial_rotary_factor' = 0.5"),
        ({"partial_rotary_factor": 0.5}, "setting 'partial_rotary_factor' = '0.5' is not understood for llama"),
        ({"rope_scaling": {"type": "linear"}}, "rope setting 'factor' is None, must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' is 0, must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "'factor' is '2', must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "'factor' is inf, must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, "rope setting 'mscale' = 1.0"),
        ({"rope_scaling": {"factor": 2.0}}, "rope setting 'factor' = 2.0 is not understood for rope type 'default'"),
        ({"rope_theta": -1.0}, "'rope_theta' is -1.0, must be a positive number"),
        ({"rope_theta": "1e4"}, "'rope_theta' is '1e4', must be a positive number"),
        ({"rope_theta": 0}, "'rope_theta' is 0, must be a positive number"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', must be an object or null"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], must be an object or null"),
    ],
)
def test_a_rope_setting_that_is_wrong_or_not_understood_is_refused(settings: dict[str, Any], match: str) -> None:
    refused(match, **settings)


# Refusals


@pytest.mark.parametrize("kind", ["gpt2", "Llama", "llama4_text", None, 3, ["llama"]])
def test_an_unknown_model_type_is_named_with_those_that_are_supported(kind: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(model_type=kind)
    assert str(caught.value) == (
        f"config.json: model_type {kind!r} is not supported; supported: llama, mistral, qwen2, qwen3"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("logit_softcapping", 30.0),
        ("final_logit_softcapping", 30.0),
        ("query_pre_attn_scalar", 256),
        ("num_experts", 8),
        ("no_such_setting", "x"),
        ("sliding_window", 5),  # a llama has none
        ("use_qk_norm", True),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(key: str, value: Any) -> None:
    refused(f"setting '{key}' = .* is not understood for llama", **{key: value})


def test_a_setting_that_is_null_or_off_is_no_reason_to_refuse() -> None:
    assert read(tie_word_embeddings=None, attention_bias=None) == read()
    assert read(quantization_config=None, use_mrope=False, rope_interleaved=False) == read()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_whose_rows_see_later_tokens_is_refused(family: str) -> None:
    refused("is_causal is False; allowed for .*: True", model_type=family, is_causal=False)
    assert read(model_type=family, is_causal=True) == read(model_type=family)


def test_the_activation_must_be_silu() -> None:
    refused("hidden_act 'gelu' is not supported; allowed: 'silu'", hidden_act="gelu")


def test_a_fixed_setting_with_another_value_is_refused() -> None:
    refused("attention_bias is False; allowed for qwen2: True", model_type="qwen2", attention_bias=False)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_missing_geometry_is_named(key: str) -> None:
    raw = {name: value for name, value in BARE.items() if name != key}
    for given in (raw, {**raw, key: None}):
        with pytest.raises(CheckpointError, match=f"config.json: {key} missing"):
            read_config(given, "config.json")


def test_all_missing_geometry_is_named_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size, intermediate_size, .*, num_key_value_heads, .* missing"):
        read_config({"model_type": "mistral", "vocab_size": 3}, "config.json")


@pytest.mark.parametrize("value", ["36", 36.0, 0, -4, True, [36]])
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_key_value_heads", "head_dim"])
def test_geometry_must_be_positive_integers(key: str, value: Any) -> None:
    refused(f"{key} is .*, must be a positive integer", **{key: value})


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"])
@pytest.mark.parametrize("value", ["false", 0, 1])
def test_a_switch_must_be_true_or_false(key: str, value: Any) -> None:
    family = "qwen3" if key == "use_sliding_window" else "llama"
    refused(f"{key} is .*, must be true or false", model_type=family, **{key: value})


@pytest.mark.parametrize("value", ["1e-6", 0, -1e-6, True, float("inf"), float("nan"), None])
def test_the_epsilon_of_the_norm_must_be_a_positive_number(value: Any) -> None:
    refused("rms_norm_eps is .*, must be a positive number", rms_norm_eps=value)


@pytest.mark.parametrize("value", ["</s>", 1.5, True, [1], -1])
def test_the_bos_id_must_be_one_token_id(value: Any) -> None:
    refused("bos_token_id is .*, must be a token id or null", bos_token_id=value)


@pytest.mark.parametrize("value", ["</s>", 1.5, True, [1, "x"], -1, {"id": 2}])
def test_eos_ids_must_be_an_id_or_a_list_of_them(value: Any) -> None:
    refused("eos_token_id is .*, must be a token id or a list of them", eos_token_id=value)


def test_eos_ids_may_be_one_several_or_none() -> None:
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read(eos_token_id=[7, 9]).eos_token_ids == (7, 9)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_head_counts_and_sizes_must_divide() -> None:
    refused("num_attention_heads 6 is not a multiple of num_key_value_heads 4", num_key_value_heads=4)
    refused("hidden_size 38 / num_attention_heads 6 is no head_dim", hidden_size=38)
    refused("head_dim 7 is odd", head_dim=7)
    assert read(num_key_value_heads=None).num_kv_heads == 6  # as many as query heads
    assert read(hidden_size=38, head_dim=8).head_dim == 8  # heads x head_dim need not be the hidden size


@pytest.mark.parametrize(("key", "most"), [("num_hidden_layers", 10_000), ("max_position_embeddings", 2**24)])
def test_a_number_that_no_model_has_is_refused_before_memory_is_asked_for(key: str, most: int) -> None:
    refused(rf"{key} is {10**15}, allowed: up to {most}", **{key: 10**15})
