"""A config.json is read as transformers reads it, and whatever is not understood is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bare_configs import BARE, LLAMA3, MOE, bare, read, refused, rope

from rollkv.models.config import CheckpointError
from rollkv.models.families import FAMILIES
from rollkv.models.family import REQUIRED
from rollkv.models.settings import read_config

# What is there, and what is not


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_absent_setting_stands_for_what_transformers_takes_for_it(family: str) -> None:
    from transformers import AutoConfig

    raw = bare(family)
    whole = AutoConfig.for_model(family, **{key: value for key, value in raw.items() if key != "model_type"}).to_dict()
    assert len(whole) > 1.5 * len(raw)
    assert read_config(raw, "config.json") == read_config(whole, "config.json")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_with_every_number_given_it_is_read_as_transformers_holds_it(family: str) -> None:
    from transformers import AutoConfig

    raw = bare(family, rms_norm_eps=3e-4, rope_theta=777.0, tie_word_embeddings=True, bos_token_id=3, eos_token_id=[4])
    theirs = AutoConfig.for_model(family, **{key: value for key, value in raw.items() if key != "model_type"})
    config = read_config(raw, "config.json")
    layer = config.layers[0]
    head_dim = theirs.to_dict().get("head_dim") or theirs.hidden_size // theirs.num_attention_heads
    kv_heads = getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads
    assert (config.num_heads, layer.kv_heads, layer.head_dim) == (theirs.num_attention_heads, kv_heads, head_dim)
    assert (config.norm_eps, config.max_position) == (3e-4, 256)
    assert (config.tied_head, config.bos_token_id, config.eos_token_ids) == (True, 3, (4,))
    if config.ropes and "rope_parameters" not in raw:
        own = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
        assert config.ropes[0].theta == own["rope_theta"]
        assert config.ropes[0].theta == raw.get(FAMILIES[family].keys.get("rope_theta", "rope_theta"), 1e6)


def test_biases_follow_the_settings_and_qwen2_has_them_always() -> None:
    def biases(**settings: Any) -> set[str]:
        return set(read(**settings).biases)

    assert biases() == set()
    assert biases(attention_bias=True) == {"qkv", "out"}
    assert biases(mlp_bias=True) == {"mlp"}
    assert biases(model_type="qwen2") == {"qkv"}
    assert biases(model_type="qwen3", attention_bias=True) == {"qkv", "out"}
    assert biases(**MOE) == {"qkv"}
    assert biases(**MOE, qkv_bias=False) == set()
    assert biases(model_type="starcoder2") == {"qkv", "out", "mlp"}
    assert biases(model_type="starcoder2", use_bias=False) == set()
    assert biases(model_type="seed_oss", head_dim=6, attention_out_bias=True) == {"qkv", "out"}
    assert biases(model_type="phi", partial_rotary_factor=0.34) == {"qkv", "out", "mlp", "head"}


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"model_type": "gemma", "head_dim": 6}, "embedding_scale", 6.0),  # sqrt(hidden_size)
        ({"model_type": "gemma2", "head_dim": 6, "query_pre_attn_scalar": 16}, "attention_scale", 0.25),
        ({"model_type": "granite", "logits_scaling": 8}, "logit_scale", 0.125),
        ({"model_type": "granite", "attention_multiplier": 0.5}, "attention_scale", 0.5),
        ({"model_type": "cohere", "logit_scale": 0.25}, "logit_scale", 0.25),
        ({"model_type": "phi", "partial_rotary_factor": 0.34, "qk_layernorm": True}, "qk_norm", "layer-head"),
        ({"model_type": "stablelm", "partial_rotary_factor": 0.34, "qk_layernorm": True}, "qk_norm", "layer-heads"),
        ({"model_type": "stablelm", "partial_rotary_factor": 0.34}, "order", "pre"),
        (
            {"model_type": "stablelm", "partial_rotary_factor": 0.34, "use_parallel_residual": True},
            "order",
            "parallel",
        ),
    ],
)
def test_a_row_makes_a_field_of_a_setting(settings: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read(**settings), field) == value


@pytest.mark.parametrize("value", [True, "2", 0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("granite", "embedding_multiplier"),
        ("granite", "logits_scaling"),
        ("granite", "residual_multiplier"),
        ("granite", "attention_multiplier"),
        ("cohere", "logit_scale"),
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
    ],
)
def test_a_factor_must_be_a_positive_number(family: str, key: str, value: Any) -> None:
    refused(f"{key} is .*, must be a positive number", model_type=family, **{key: value})


# Activations


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "silu"),
        ({"hidden_act": "swish"}, "silu"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_act": "gelu_new"}, "gelu-tanh"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu-tanh"),
        ({"hidden_act": "relu"}, "relu"),
        ({"model_type": "arcee"}, "relu2"),
        ({"model_type": "gemma", "head_dim": 6, "hidden_act": "gelu"}, "gelu-tanh"),  # as its first release meant it
    ],
)
def test_an_activation_is_known_by_the_names_that_transformers_has_for_it(settings: dict[str, Any], kind: str) -> None:
    assert read(**settings).activation == kind


@pytest.mark.parametrize("value", ["mish", "quick_gelu", None, 3, ["silu"]])
def test_another_activation_is_named_with_those_that_are_allowed(value: Any) -> None:
    refused(
        "hidden_act .* is not supported; allowed: 'silu', 'swish', 'gelu', 'gelu_new', 'gelu_pytorch_tanh', 'relu', ",
        hidden_act=value,
    )


# Rotary settings, as far as they are not `rope_settings.py`'s


def test_rope_settings_read_the_same_from_the_older_and_the_newer_form() -> None:
    linear = rope(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5000.0)
    assert (linear.type, linear.factor, linear.theta) == ("linear", 2.0, 5000.0)
    assert linear == rope(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})
    older = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    llama3 = rope(rope_scaling=older, rope_theta=500000.0)
    assert llama3 == rope(rope_parameters=LLAMA3)
    assert (llama3.factor, llama3.low_freq_factor, llama3.high_freq_factor) == (8.0, 1.0, 4.0)
    assert (llama3.original_max_position, llama3.theta, llama3.rotary_dim) == (64, 500000.0, 6)
    assert rope(rope_theta=1e6, rope_scaling=None).theta == 1e6
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}) == read(
        rope_theta=1e6
    )


def test_the_older_rope_form_gives_the_frequencies_that_transformers_computes_from_it(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollkv.models.rope import inverse_frequencies

    for scaling in ({"type": "linear", "factor": 2.0}, {k: v for k, v in LLAMA3.items() if k != "rope_theta"}):
        raw = {**BARE, "rope_theta": 5000.0, "rope_scaling": scaling}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        ours = inverse_frequencies(read_config(raw, "config.json").ropes[0], 8)
        np.testing.assert_allclose(np.asarray(ours), model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["ntk", "xpos", "foo", None, 3, ["linear"]])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_type_names_those_that_are_supported(kind: Any, where: str) -> None:
    refused(
        "rope type .* is not supported; supported: default, linear, dynamic, llama3, yarn, longrope, proportional",
        **{where: {"rope_type": kind, "factor": 2.0}},
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "'partial_rotary_factor' = 0.5 turns 3 dimensions of a head; this model turns 6 of 6",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed for llama: 1.0"),
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


PARTLY = ("phi", "phi3", "stablelm", "gpt_neox", "glm", "glm4", "nemotron")  # whose code reads the factor


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_part_of_a_head_turns_only_where_transformers_turns_a_part(family: str) -> None:
    if not FAMILIES[family].ropes or FAMILIES[family].turns == "none":
        return
    raw = bare(family, num_attention_heads=3, num_key_value_heads=3, head_dim=16)
    key = FAMILIES[family].keys.get("partial_rotary_factor", "partial_rotary_factor")
    if family in PARTLY:
        assert read_config({**raw, key: 0.75}, "c").ropes[0].rotary_dim == 12
        inside = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
        assert read_config({**raw, "rope_parameters": inside}, "c").ropes[0].rotary_dim == 12
    else:
        assert read_config({**raw, key: 1.0}, "c") == read_config(raw, "c")
        with pytest.raises(CheckpointError, match=f"c: partial_rotary_factor is 0.75; allowed for {family}: 1.0"):
            read_config({**raw, key: 0.75}, "c")


@pytest.mark.parametrize("value", [0, -0.5, 1.5, True, "0.5", float("nan"), [0.5]])
@pytest.mark.parametrize(("family", "key"), [("phi", "partial_rotary_factor"), ("gpt_neox", "rotary_pct")])
def test_the_part_of_a_head_that_turns_must_be_a_share(family: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"c: partial_rotary_factor is .*, allowed: above 0, up to 1"):
        read_config({**bare(family), key: value}, "c")


# Refusals of every family


@pytest.mark.parametrize("kind", ["gpt_oss", "Llama", "llama4_text", None, 3, ["llama"]])
def test_an_unknown_model_type_is_named_with_those_that_are_supported(kind: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(model_type=kind)
    assert str(caught.value) == (
        f"config.json: model_type {kind!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_family_takes_a_setting_that_its_row_does_not_know(family: str) -> None:
    with pytest.raises(CheckpointError, match=f"c: setting 'no_such_setting' = '3' is not understood for {family}"):
        read_config(bare(family) | {"no_such_setting": 3}, "c")


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(CheckpointError) as caught:
        read(no_such_setting="x" * 1000)
    assert len(str(caught.value)) < 200


def test_a_setting_that_is_null_or_off_is_no_reason_to_refuse() -> None:
    assert read(tie_word_embeddings=None, attention_bias=None) == read()
    assert read(quantization_config=None, use_mrope=False, rope_interleaved=False) == read()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_whose_rows_see_later_tokens_is_refused(family: str) -> None:
    raw = bare(family)
    with pytest.raises(CheckpointError, match=f"c: is_causal is False; allowed for {family}: True"):
        read_config({**raw, "is_causal": False}, "c")
    assert read_config({**raw, "is_causal": True}, "c") == read_config(raw, "c")


@pytest.mark.parametrize(("family", "key"), [(row.model_type, key) for row in FAMILIES.values() for key in row.fixed])
def test_a_fixed_setting_with_another_value_is_refused(family: str, key: str) -> None:
    value = FAMILIES[family].fixed[key]
    other = not value if isinstance(value, bool) else "another"
    with pytest.raises(CheckpointError, match=f"c: {key} is {other!r}; allowed for {family}: "):
        read_config({**bare(family), key: other}, "c")
    if value is not None and key != FAMILIES[family].keys.get(key, key):
        assert read_config({**bare(family), key: value}, "c") == read_config(bare(family), "c")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_missing_geometry_is_named(family: str) -> None:
    row, raw = FAMILIES[family], bare(family)
    needed = [key for key, value in row.settings.items() if value is REQUIRED]
    assert len(needed) >= 5
    for key in needed:
        for given in ({name: value for name, value in raw.items() if name != key}, {**raw, key: None}):
            with pytest.raises(CheckpointError, match=f"^config.json: {key} missing$"):
                read_config(given, "config.json")


def test_all_missing_geometry_is_named_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size, intermediate_size, .*, num_key_value_heads, .* missing"):
        read_config({"model_type": "mistral", "vocab_size": 3}, "config.json")


@pytest.mark.parametrize("value", ["36", 36.0, 0, -4, True, [36]])
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_key_value_heads", "head_dim"])
def test_geometry_must_be_positive_integers(key: str, value: Any) -> None:
    refused(f"{key} is .*, must be a positive integer", **{key: value})


def test_a_wrong_number_is_named_as_the_family_calls_it() -> None:
    raw = bare("gpt2")
    for key in ("n_embd", "n_layer", "n_head", "n_positions", "n_inner"):
        with pytest.raises(CheckpointError, match=f"c: {key} is -1, must be a positive integer"):
            read_config({**raw, key: -1}, "c")
    with pytest.raises(CheckpointError, match="c: layer_norm_epsilon is 'x', must be a positive number"):
        read_config({**raw, "layer_norm_epsilon": "x"}, "c")
    with pytest.raises(CheckpointError, match="c: activation_function 'tanh' is not supported"):
        read_config({**raw, "activation_function": "tanh"}, "c")


SWITCHES = [
    (row.model_type, key) for row in FAMILIES.values() for key, value in row.settings.items() if isinstance(value, bool)
]


@pytest.mark.parametrize(("family", "key"), SWITCHES)
def test_a_switch_must_be_true_or_false(family: str, key: str) -> None:
    for value in ("false", 0, 1):
        with pytest.raises(CheckpointError, match=f"c: {key} is {value!r}"):
            read_config({**bare(family), key: value}, "c")


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
    refused("rotary dimension 7 must be even, from 2 to head_dim 7", head_dim=7)
    assert read(num_key_value_heads=None).layers[0].kv_heads == 6  # as many as query heads
    assert read(hidden_size=38, head_dim=8).layers[0].head_dim == 8  # heads x head_dim need not be the hidden size


@pytest.mark.parametrize(("key", "most"), [("num_hidden_layers", 10_000), ("max_position_embeddings", 2**24)])
def test_a_number_that_no_model_has_is_refused_before_memory_is_asked_for(key: str, most: int) -> None:
    refused(rf"{key} is {10**15}, allowed: up to {most}", **{key: 10**15})


def test_scaled_positions_are_the_models_positions() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
    assert read(rope_parameters=yarn).max_position == 1024
    assert read(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}).max_position == 256


def test_gemma4_refuses_a_scale_of_queries_that_its_attention_does_not_apply() -> None:
    full = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": full}
    read(model_type="gemma4_text", rope_parameters=ropes)
    full["llama_4_scaling_beta"] = 0.1
    refused(
        "rope_parameters.full_attention: llama_4_scaling_beta is 0.1; gemma4_text scales no queries",
        model_type="gemma4_text",
        rope_parameters=ropes,
    )
