"""What a config.json says of single layers, read as transformers does: windows, rotation, experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bare_configs import read, refused, saved

from rollkv.models.config import CheckpointError
from rollkv.models.settings import read_config
from rollkv.runtime.mask import causal_mask

MOE = {"model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 22}


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
    ("gemma2", {"sliding_window": 4}),
    ("gemma3_text", {"sliding_window": 4, "sliding_window_pattern": 2}),
    ("olmo3", {"sliding_window": 4}),
    ("olmo3", {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("cohere2", {"sliding_window": 4, "sliding_window_pattern": 3}),
    ("exaone4", {"sliding_window": 4, "sliding_window_pattern": 2}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 4, "no_rope_layer_interval": 2}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 4, "no_rope_layers": [0, 1, 1]}),
    ("smollm3", {"sliding_window": 4, "no_rope_layer_interval": 2}),
    ("phi3", {"sliding_window": 4}),
    ("starcoder2", {"sliding_window": 4}),
    ("mixtral", {"sliding_window": 4}),
    ("ministral3", {"sliding_window": 4}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
]


@pytest.mark.parametrize(("family", "settings"), WINDOWS)
def test_visible_keys_per_row_equal_the_masks_that_transformers_hands_to_each_layer(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    n = 12
    theirs, raw = saved(tmp_path, family, num_hidden_layers=3, pad_token_id=0, **settings)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(theirs, **eager)
    masks = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    with torch.no_grad():
        model(torch.arange(n)[None])
    asked = {**raw, "layer_types": None} if "layer_types" not in settings else raw  # that it fills in when it saves
    asked |= {key: settings[key] for key in settings if key.endswith("pattern")}
    if "no_rope_layers" not in settings:
        asked["no_rope_layers"] = None
    for given in (raw, asked):
        windows = read_config(given, "config.json").windows
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
        ("gemma2", {"head_dim": 6}),
    ],
)
def test_a_window_of_zero_which_no_token_would_see_through_is_refused(family: str, settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="sliding_window is 0, must be a positive integer or null"):
        read(model_type=family, sliding_window=0, **settings)


def test_a_window_of_zero_behind_a_switch_that_is_off_says_nothing() -> None:
    assert read(model_type="qwen2", sliding_window=0, use_sliding_window=False).windows == (None, None)


def test_layer_types_that_contradict_the_switch_are_refused_and_smollm3_takes_them_as_its_class_does() -> None:
    kinds = ["full_attention", "sliding_attention"]
    with pytest.raises(CheckpointError, match="layer_types has sliding_attention, but use_sliding_window is not true"):
        read(model_type="qwen3", sliding_window=7, use_sliding_window=False, layer_types=kinds)
    asked = {"model_type": "smollm3", "sliding_window": 7, "layer_types": kinds}
    assert read(**asked, use_sliding_window=False).windows == (None, 7)


@pytest.mark.parametrize(("window", "turns"), [(7, [None, None]), (None, ["full", "full"])])
def test_global_layers_of_exaone_turn_only_where_the_model_has_no_window(window: int | None, turns: list[Any]) -> None:
    config = read(model_type="exaone4", sliding_window=window, layer_types=["full_attention"] * 2)
    assert [layer.rope for layer in config.layers] == turns


def test_a_switch_that_is_null_is_off() -> None:
    asked = {"model_type": "qwen2", "sliding_window": 5, "max_window_layers": 0}
    assert read(**asked, use_sliding_window=True).windows == (5, 5)
    assert read(**asked, use_sliding_window=None).windows == (None, None)


def test_layer_types_are_checked_even_where_the_windows_are_off() -> None:
    refused("layer_types .* must be 2 of", model_type="qwen3", layer_types=["linear_attention", "full_attention"])
    assert read(model_type="qwen3", layer_types=["full_attention"] * 2).windows == (None, None)


@pytest.mark.parametrize("window", [-1, 2.5, "4096", True, [3]])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "exaone4"])
def test_a_window_that_is_no_number_of_tokens_is_refused(family: str, window: Any) -> None:
    refused("sliding_window is .*, must be a positive integer or null", model_type=family, sliding_window=window)


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
@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe"])
def test_max_window_layers_must_be_a_number_of_layers(family: str, value: Any) -> None:
    settings = {**MOE, "model_type": family} if family == "qwen2_moe" else {"model_type": family}
    refused("max_window_layers is .*, must be", **settings, use_sliding_window=True, max_window_layers=value)


@pytest.mark.parametrize("period", [0, -2, 1.5, True, "", "LX", [2], "lg"])
@pytest.mark.parametrize("family", ["gemma3_text", "cohere2", "exaone4"])
def test_a_pattern_of_windows_must_be_a_period(family: str, period: Any) -> None:
    refused(
        "sliding_window_pattern is .*, must be a positive integer", model_type=family, sliding_window_pattern=period
    )


def test_a_pattern_of_windows_may_be_spelt_and_layer_types_go_before_it() -> None:
    asked = {"model_type": "exaone4", "num_hidden_layers": 5, "sliding_window": 9, "sliding_window_pattern": "LLG"}
    assert read(**asked).windows == (9, 9, None, 9, 9)
    kinds = ["full_attention"] * 4 + ["sliding_attention"]
    assert read(**asked, layer_types=kinds).windows == (None, None, None, None, 9)
    assert read(**{**asked, "sliding_window_pattern": None}).windows == (9, 9, 9, None, 9)  # the family's own: 4


# Which layers turn


def turning(**settings: Any) -> list[str | None]:
    return [layer.rope for layer in read(num_hidden_layers=4, **settings).layers]


def test_layers_that_do_not_turn_are_those_that_transformers_has(tmp_path: Path) -> None:
    assert turning() == ["full"] * 4
    for settings in ({}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [0, 1, 1, 0]}):
        theirs, _ = saved(tmp_path, "smollm3", num_hidden_layers=4, **settings)
        ours = turning(model_type="smollm3", **settings)
        assert [name is not None for name in ours] == [bool(turn) for turn in theirs.no_rope_layers]
    windowed = {"num_hidden_layers": 4, "sliding_window": 5}
    for family in ("cohere2", "exaone4"):
        theirs, _ = saved(tmp_path, family, **windowed)
        sliding = [kind == "sliding_attention" for kind in theirs.layer_types]
        assert [name is not None for name in turning(model_type=family, sliding_window=5)] == sliding
    assert turning(model_type="exaone4", sliding_window=None) == ["full"] * 4
    assert turning(model_type="cohere2", layer_types=["full_attention"] * 4) == [None] * 4


def test_a_model_none_of_whose_layers_turn_has_no_rotary_embedding() -> None:
    assert read(model_type="cohere2", layer_types=["full_attention"] * 2).ropes == ()


@pytest.mark.parametrize("value", [[1], [1, 2], [1, 1, 1], "11", 1, [1, "0"], [[1], 0]])
def test_no_rope_layers_must_be_one_switch_per_layer(value: Any) -> None:
    refused("no_rope_layers .* must be 2 of 0 and 1", model_type="smollm3", no_rope_layers=value)


@pytest.mark.parametrize("value", [0, -1, 2.0, "4", None, True])
def test_the_interval_of_layers_that_do_not_turn_must_be_a_period(value: Any) -> None:
    refused("no_rope_layer_interval is .*, must be a positive", model_type="smollm3", no_rope_layer_interval=value)


def test_two_rotary_embeddings_go_to_their_layers_and_only_those_in_use_are_kept() -> None:
    asked = {"model_type": "gemma3_text", "head_dim": 6, "sliding_window": 5, "rope_theta": 1e6}
    kinds = ["sliding_attention", "full_attention"]
    config = read(**asked, layer_types=kinds, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert [layer.rope for layer in config.layers] == ["sliding", "full"]
    full, sliding = sorted(config.ropes, key=lambda rope: rope.name)
    assert (full.type, full.factor, full.theta) == ("linear", 8.0, 1e6)
    assert (sliding.type, sliding.factor, sliding.theta) == ("default", None, 10000.0)
    assert read(**asked, layer_types=kinds, rope_local_base_freq=500.0).ropes == (
        replace(full, type="default", factor=None),
        replace(sliding, theta=500.0),
    )
    alone = read(**asked, layer_types=["full_attention"] * 2)
    assert [rope.name for rope in alone.ropes] == ["full"]


# Experts


def test_experts_are_read_with_their_width_and_the_layers_that_have_them(tmp_path: Path) -> None:
    experts = {**MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = read(**experts, shared_expert_intermediate_size=18, norm_topk_prob=True)
    assert config.experts is not None
    assert (config.experts.count, config.experts.top_k, config.experts.width) == (5, 2, 22)
    assert (config.experts.normalise, config.experts.shared_width) == (True, 18)
    from transformers import AutoModelForCausalLM

    theirs, _ = saved(tmp_path, "qwen2_moe", **{key: experts[key] for key in experts if key != "model_type"})
    blocks = [type(layer.mlp).__name__ for layer in AutoModelForCausalLM.from_config(theirs).model.layers]
    assert [layer.sparse for layer in config.layers] == [name != "Qwen2MoeMLP" for name in blocks]
    assert [layer.sparse for layer in config.layers] == [False, True, False, False, False, True]


def test_a_model_whose_layers_are_all_dense_has_no_experts() -> None:
    config = read(**MOE, mlp_only_layers=[0, 1])
    assert config.experts is None
    assert config.layers == read(intermediate_size=50).layers


def test_experts_may_be_counted_under_either_name() -> None:
    usual = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 22}
    by_one, by_other = read(**usual, num_experts=6), read(**usual, num_local_experts=6)
    assert by_one.experts == by_other.experts
    assert by_one.experts is not None
    assert by_one.experts.count == 6


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_experts": 0}, "num_experts is 0, must be a positive integer"),
        ({"num_experts": "5"}, "num_experts is '5', must be a positive integer"),
        ({"num_experts": 10**6}, "num_experts is 1000000, allowed: up to 65536"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, allowed: up to num_experts 5"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is None, must be a positive integer"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1, must be a positive integer"),
        ({"shared_expert_intermediate_size": "x"}, "shared_expert_intermediate_size is 'x', must be a positive"),
        ({"shared_expert_intermediate_size": -3}, "shared_expert_intermediate_size is -3, must be a positive"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, must be a positive integer"),
        ({"decoder_sparse_step": 1.5}, "decoder_sparse_step is 1.5, must be a positive integer"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, must be a list of layers"),
        ({"mlp_only_layers": [0, "1"]}, r"mlp_only_layers is \[0, '1'\], must be a list of layers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, must be true or false"),
    ],
)
def test_a_wrong_setting_of_experts_is_refused(settings: dict[str, Any], match: str) -> None:
    refused(match, **{**MOE, **settings})
