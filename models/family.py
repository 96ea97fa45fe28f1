"""What a row of the family table can say, and what many rows have in common.

A row says which settings config.json has and what an absent one stands for (transformers' configuration classes), what
each means as a field of `DecoderConfig`, and where the tensors' names differ from llama's. `settings.py` reads a config
by its row, `names.py` the tensors. The rows are in the files families_*.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollkv.models.config import (
    ACTIVATIONS,
    BIASES,
    NORMS,
    ORDERS,
    QK_NORMS,
    ROPE_NAMES,
    ROPE_TYPES,
    DecoderConfig,
)

REQUIRED = object()  # in Family.settings: the key must be there
LAYOUTS = ("conv", "qkv", "conv-qkv", "qkv-by-head", "gate-up", "per-head")  # see names.py
TURNS = ("all", "none", "windowed", "windowed-if-any", "listed")
WINDOWS = ("none", "all", "pattern", "still", "upper", "odd")
_WORDS = {"order": ORDERS, "norm": NORMS, "qk_norm": QK_NORMS}  # what a field may be


@dataclass(frozen=True)
class Key:
    """A field that is the value of a setting, perhaps through a function."""

    name: str
    through: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Source:
    """A tensor whose checkpoint stores it otherwise than llama's: see `names.py` for each layout."""

    name: str
    layout: str  # one of LAYOUTS

    def __post_init__(self) -> None:
        assert self.layout in LAYOUTS, self.layout


@dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """Which settings say what a mixture of experts is."""

    count: tuple[str, ...]  # the first that is not null counts
    top_k: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    normalise: str | None = "norm_topk_prob"  # None: always


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`."""

    model_type: str
    settings: Mapping[str, Any]  # key of config.json -> value when absent
    keys: Mapping[str, str] = field(default_factory=dict)  # llama's key -> this family's for the same thing
    unread: frozenset[str] = frozenset()  # in published configs, and read by no class of transformers
    fixed: Mapping[str, Any] = field(default_factory=dict)  # may be there with this value only
    fields: Mapping[str, Any] = field(default_factory=dict)  # of DecoderConfig: a value, or the Key of one
    activations: Mapping[str, str] = field(default_factory=dict)  # what the config calls otherwise than others do
    biases: Mapping[str, bool | str] = field(default_factory=dict)  # "qkv", ... -> always, or the setting that asks
    experts: ExpertKeys | None = None  # the settings of a mixture of experts
    windows: str = "none"  # one of WINDOWS: which layers have one, see layer_settings.WINDOW_RULES
    pattern: int = 0  # for windows == "pattern": every pattern-th layer has none
    turns: str = "all"  # one of TURNS: layers whose queries and keys rotate; "none": there is no rotation at all
    ropes: tuple[str, ...] = ("full",)  # ("full", "sliding"): layers with a window have a rotation of their own
    theta: float = 10000.0  # base of the rotation when the config names none
    rotary_factor: float = 1.0  # how much of a head rotates when the config does not say
    interleaved: bool = False  # pairs (2i, 2i + 1) rotate
    rope_types: tuple[str, ...] = tuple(kind for kind in ROPE_TYPES if kind != "proportional")
    ntk_alpha: bool = False  # type dynamic with `alpha` stretches the base alone, whatever the length
    query_scale: bool = False  # llama_4_scaling_beta is read; transformers' other classes pass it over
    names: Mapping[str, str | Source] = field(default_factory=dict)  # part -> tensor, where it is not llama's
    gguf: Mapping[str, str | Source] | None = None  # the same for GGUF files; None: not read from them
    norm_plus: float = 0.0  # the checkpoint's norm weights lack this
    image_attention: str = "causal"  # see Manifest.image_attention; of a text half that does not say whose it is
    finish: Callable[[DecoderConfig, Mapping[str, Any], str], DecoderConfig] | None = None  # what no row can say
    prefix: str = ""  # that published checkpoints leave out of every name
    notes: tuple[str, ...] = ()  # features that no other field tells, for `rollkv families`

    def __post_init__(self) -> None:
        """A row with a typo is not another model."""
        own, settings = self.model_type, self.settings.keys()
        assert not settings & self.fixed.keys(), (own, settings & self.fixed.keys())
        assert set(self.keys.values()) <= settings, (own, self.keys)
        assert self.fields.keys() <= {each.name for each in fields(DecoderConfig)}, (own, self.fields.keys())
        for name, value in self.fields.items():
            assert not isinstance(value, Key) or value.name in settings, (own, value.name)
            assert isinstance(value, Key) or value in _WORDS.get(name, (value,)), (own, name, value)
        assert set(self.activations.values()) <= set(ACTIVATIONS), (own, self.activations)
        assert self.biases.keys() <= set(BIASES), (own, self.biases)
        assert all(on is True or on in settings for on in self.biases.values()), (own, self.biases)
        if self.experts is not None:
            read = {*self.experts.count, self.experts.top_k, self.experts.width, self.experts.normalise} - {None}
            assert read <= settings, (own, self.experts)
        assert self.windows in WINDOWS, (own, self.windows)
        assert self.windows == "none" or "sliding_window" in settings, (own, self.windows)
        assert (self.windows == "pattern") == (self.pattern > 0), (own, self.windows, self.pattern)
        assert self.turns in TURNS, (own, self.turns)
        assert set(self.ropes) <= set(ROPE_NAMES), (own, self.ropes)


GEOMETRY = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,  # None: as many as query heads
    "head_dim": None,  # None: hidden_size / num_attention_heads
    "max_position_embeddings": REQUIRED,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ONE_TWO = {"bos_token_id": 1, "eos_token_id": 2}
WINDOW_SWITCH = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
LAYER_NORM = {"layer_norm_eps": 1e-5}
NEEDS_KV = {"num_key_value_heads": REQUIRED}
PART = {"partial_rotary_factor": None}  # of families that may turn a part of each head only
POST = {  # names of a layer whose norms stand after attention and MLP only
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def geometry(*without: str, **more: Any) -> dict[str, Any]:
    """The usual settings, without some of them, with others or other defaults."""
    assert set(without) <= GEOMETRY.keys() - more.keys(), without
    return {key: value for key, value in GEOMETRY.items() if key not in without} | more


ATTENTION_BIAS = {"qkv": "attention_bias", "out": "attention_bias"}
GATE_UP = {"mlp.gate": Source("mlp.gate_up_proj", "gate-up"), "mlp.up": Source("mlp.gate_up_proj", "gate-up")}
QKV = {f"attention.{x}": Source("self_attn.qkv_proj", "qkv") for x in "qkv"}
SANDWICH = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
FC = {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
    "mlp.gate.experts": "mlp.experts.{}.gate_proj",
    "mlp.up.experts": "mlp.experts.{}.up_proj",
    "mlp.down.experts": "mlp.experts.{}.down_proj",
}
GEMMA = {"tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "attention_bias": False}
GGUF_SANDWICH = {
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
}
GLM: dict[str, Any] = {
    "settings": geometry(
        **PART,
        head_dim=128,
        num_key_value_heads=2,
        rms_norm_eps=1.5625e-07,
        attention_bias=True,
        eos_token_id=[151329, 151336, 151338],
    ),
    "biases": {"qkv": "attention_bias"},
    "rotary_factor": 0.5,
    "interleaved": True,
}
SQRT_H = Key("hidden_size", math.sqrt)
QUERY_SCALE = Key("query_pre_attn_scalar", lambda scalar: scalar**-0.5)
