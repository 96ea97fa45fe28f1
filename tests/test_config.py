"""A word that no part of the code knows does not make another model of a config or a row: it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from test_trace import ROPE, config, layers

from rollkv.models.config import LayerConfig, RopeConfig
from rollkv.models.family import GEOMETRY, TURNS, WINDOWS, ExpertKeys, Family, Key, Source, geometry
from rollkv.models.layer_settings import TURN_RULES, WINDOW_RULES


@pytest.mark.parametrize(
    "typo",
    [
        {"order": "parallel-to"},
        {"norm": "layer_bias"},
        {"qk_norm": "rms-heads"},
        {"activation": "gelu_tanh"},
        {"biases": frozenset({"q"})},
        {"layers": layers(None, sparse=True)},  # and no experts
    ],
)
def test_a_decoder_has_features_of_the_known_names_only(typo: dict[str, Any]) -> None:
    config()
    with pytest.raises(AssertionError):
        config(**typo)


def test_a_layer_and_its_rotation_have_known_names_and_sizes_that_can_be() -> None:
    fields: dict[str, Any] = {"kv_heads": 2, "head_dim": 6, "intermediate_size": 24}
    for wrong in ({"rope": "local"}, {"window": 0}):
        with pytest.raises(AssertionError):
            LayerConfig(**fields, **wrong)
    rope: dict[str, Any] = {"type": "default", "theta": 1e4, "rotary_dim": 6}
    assert RopeConfig(**rope) == ROPE
    for wrong in ({"type": "ntk"}, {"name": "local"}, {"rotary_dim": 5}, {"sections": (1, 1, 2)}):
        with pytest.raises(AssertionError):
            RopeConfig(**{**rope, **wrong})


@pytest.mark.parametrize(
    "typo",
    [
        {"fields": {"orders": "post"}},
        {"fields": {"order": "pots"}},
        {"fields": {"logit_scale": Key("logit_scaling")}},
        {"biases": {"kqv": True}},
        {"biases": {"qkv": "qkv_bais"}},
        {"biases": {"qkv": False}},
        {"windows": "patern"},
        {"windows": "all"},  # and no sliding_window among the settings
        {"pattern": 3},
        {"experts": ExpertKeys(count=("num_expert",))},
        {"turns": "widowed"},
        {"ropes": ("full", "local")},
        {"activations": {"gelu": "gelu_tanh"}},
        {"keys": {"hidden_act": "activation"}},
        {"fixed": {"hidden_act": "silu"}},
    ],
)
def test_a_row_names_what_there_is(typo: dict[str, Any]) -> None:
    Family(model_type="llama", settings=GEOMETRY)
    with pytest.raises(AssertionError, match="llama"):
        Family(model_type="llama", settings=GEOMETRY, **typo)


def test_a_layout_is_a_known_one_and_what_a_row_leaves_out_was_there() -> None:
    with pytest.raises(AssertionError, match="qvk"):
        Source("self_attn.qkv_proj", "qvk")
    with pytest.raises(AssertionError, match="head_dims"):
        geometry("head_dims")


def test_every_rule_that_a_row_may_name_is_one_that_is_read() -> None:
    assert tuple(WINDOW_RULES) == WINDOWS
    assert tuple(TURN_RULES) == TURNS
