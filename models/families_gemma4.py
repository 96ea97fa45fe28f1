"""The family gemma4_text: what of its config.json no row can say, and its row as data.

Two layer types with heads of different sizes, layers that read an earlier layer's cache, experts beside the MLP, and
embeddings for each layer. What an absent setting stands for is that of transformers' `configuration_gemma4.py`.
Knows no file format and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollkv.models.config import CheckpointError, DecoderConfig, ExpertsConfig, Gemma4Config, LayerConfig, RopeConfig
from rollkv.models.family import ATTENTION_BIAS, GEMMA, SANDWICH, SQRT_H, Family, Key, geometry
from rollkv.models.rope_settings import merge_rope, read_rope
from rollkv.models.setting_values import count, items

BY_TYPE = "by layer type"  # per_layer_config that is not there; null is another thing: no layer differs
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_ROPE_TYPES = ("default", "linear", "proportional")
_OVERRIDES = ("head_dim", "num_key_value_heads")
_KINDS = {"full": "full_attention", "sliding": "sliding_attention"}


def _finish(config: DecoderConfig, got: Mapping[str, Any], where: str) -> DecoderConfig:
    """The config with what only Gemma 4 has.

    config: read as every family's, with the windows in its layers. got: the settings, absent ones filled in.
    Raises CheckpointError: a setting that is not understood, or numbers that do not fit together.
    """
    # "vision" lets the tokens of one image see each other both ways in layers with a window, and text nothing more:
    # see `wrappers.Model.image_attention`. "all" would do it to text, and change the windows.
    if got["use_bidirectional_attention"] not in (None, "vision"):
        raise CheckpointError(
            f"{where}: use_bidirectional_attention is {got['use_bidirectional_attention']!r}; allowed for gemma4_text: "
            "'vision', null"
        )
    _integer(got, "sliding_window", where, 1)
    heads = config.num_heads
    # transformers lets no model end with a window: its last layer becomes a full one, whatever the config says.
    windows = [*config.windows[:-1], None]
    sizes = _sizes(got, windows, where)
    for size in sizes.values():
        kv_heads = size["num_key_value_heads"]
        if heads % kv_heads:
            raise CheckpointError(
                f"{where}: num_attention_heads {heads} is not a multiple of {kv_heads} key/value heads of a layer type"
            )
    owners = _owners(got, windows, where)
    experts = _experts(got, where)
    wide = 2 if got["use_double_wide_mlp"] else 1
    layers = tuple(
        LayerConfig(
            kv_heads=sizes[kind]["num_key_value_heads"],
            head_dim=sizes[kind]["head_dim"],
            intermediate_size=got["intermediate_size"] * (1 if owner is None else wide),
            window=window,
            rope=kind,
            sparse=experts is not None,
            kv_from=owner,
        )
        for window, kind, owner in zip(windows, map(_kind, windows), owners, strict=True)
    )
    width = _integer(got, "hidden_size_per_layer_input", where, 0)
    rows = _integer(got, "vocab_size_per_layer_input", where, 1)
    if width and rows < config.vocab_size:
        raise CheckpointError(
            f"{where}: vocab_size_per_layer_input is {rows}, below vocab_size {config.vocab_size}: ids without a row"
        )
    return replace(
        config,
        layers=layers,
        ropes=_ropes(got, sizes, config.max_position, where),
        experts=experts,
        gemma4=Gemma4Config(
            per_layer_width=width,
            per_layer_vocab=got["vocab_size_per_layer_input"],
            per_layer_scale=math.sqrt(width),
            values_from_keys=bool(got["attention_k_eq_v"]),
        ),
    )


def _kind(window: int | None) -> str:
    """Name of the rotary embedding of a layer, and of its layer type."""
    return "full" if window is None else "sliding"


def _sizes(got: Mapping[str, Any], windows: list[int | None], where: str) -> dict[str, dict[str, int]]:
    """head_dim and num_key_value_heads of the layers of each type that is there."""
    common = {"head_dim": got["head_dim"], "num_key_value_heads": got["num_key_value_heads"]}
    kinds = list(map(_kind, windows))
    given = got["per_layer_config"]
    if given == BY_TYPE:
        full = {**common, "head_dim": _integer(got, "global_head_dim", where, 1)}
        if got["attention_k_eq_v"] and got["num_global_key_value_heads"] is not None:
            full["num_key_value_heads"] = _integer(got, "num_global_key_value_heads", where, 1)
        return {kind: full if kind == "full" else common for kind in dict.fromkeys(kinds)}
    layers = [common] * len(kinds)
    for key, own in items(given, f"{where}: per_layer_config"):
        if not key.isdecimal() or int(key) >= len(kinds):
            raise CheckpointError(f"{where}: per_layer_config has {key!r}, allowed: layers 0 .. {len(kinds) - 1}")
        for name, value in items(own, f"{where}: per_layer_config.{key}"):
            if name not in _OVERRIDES:
                raise CheckpointError(
                    f"{where}: per_layer_config.{key}.{name} is not understood; allowed: {', '.join(_OVERRIDES)}"
                )
            _integer({name: value}, name, f"{where}: per_layer_config.{key}", 1)
        layers[int(key)] = {**common, **own}
    sizes = dict(zip(kinds, layers, strict=True))
    for i, (kind, size) in enumerate(zip(kinds, layers, strict=True)):
        if size != sizes[kind]:
            raise CheckpointError(
                f"{where}: per_layer_config gives layer {i} {size}, another {_KINDS[kind]} layer {sizes[kind]}; "
                "layers of one type must agree"
            )
    return sizes


def _owners(got: Mapping[str, Any], windows: list[int | None], where: str) -> list[int | None]:
    """Whose keys and values each layer reads: of the last layers those of the last one before them of their type."""
    shared = _integer(got, "num_kv_shared_layers", where, 0)
    first = len(windows) - shared
    owners: list[int | None] = [None] * len(windows)
    if first < 1:
        raise CheckpointError(f"{where}: num_kv_shared_layers is {shared}, allowed: up to {len(windows) - 1}")
    last = {_kind(window): i for i, window in enumerate(windows[:first])}
    for i, window in enumerate(windows[first:], first):
        if _kind(window) not in last:
            raise CheckpointError(
                f"{where}: num_kv_shared_layers is {shared}, but no layer before the last {shared} is a "
                f"{_KINDS[_kind(window)]} layer whose keys and values layer {i} could read"
            )
        owners[i] = last[_kind(window)]
    return owners


def _ropes(
    got: Mapping[str, Any], sizes: Mapping[str, Mapping[str, int]], max_position: int, where: str
) -> tuple[RopeConfig, ...]:
    """The rotary embedding of each layer type that is there: the full layers' first."""
    given = _ROPE if got["rope_parameters"] is None else got["rope_parameters"]
    items(given, f"{where}: rope_parameters")
    ropes = []
    for name, kind in _KINDS.items():
        if name not in sizes:
            continue
        own = dict(items(given.get(kind), f"{where}: rope_parameters.{kind}"))
        if own.get("rope_type") not in _ROPE_TYPES:
            raise CheckpointError(
                f"{where}: rope_parameters.{kind}: rope_type is {own.get('rope_type')!r}; supported for gemma4_text: "
                f"{', '.join(_ROPE_TYPES)}"
            )
        if own.get("rope_theta") is None:
            raise CheckpointError(f"{where}: rope_parameters.{kind}: rope_theta missing")
        head_dim = sizes[name]["head_dim"]
        rope, _ = read_rope(
            merge_rope({"rope_parameters": given}, theta_default=10000.0, kind=kind, where=where),
            head_dim=head_dim,
            rotary_dim=head_dim,
            max_position=max_position,
            interleaved=False,
            where=where,
            name=name,
        )
        if rope.query_scale is not None:
            raise CheckpointError(
                f"{where}: rope_parameters.{kind}: llama_4_scaling_beta is {own['llama_4_scaling_beta']!r}; "
                "gemma4_text scales no queries by position, allowed: null"
            )
        ropes.append(rope)
    return tuple(ropes)


def _experts(got: Mapping[str, Any], where: str) -> ExpertsConfig | None:
    if not got["enable_moe_block"]:
        return None
    number, top_k, width = (
        _integer(got, key, where, 1) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")
    )
    if top_k > number:
        raise CheckpointError(f"{where}: top_k_experts is {top_k}, allowed: up to num_experts {number}")
    return ExpertsConfig(count=number, top_k=top_k, width=width, normalise=True)


def _integer(got: Mapping[str, Any], key: str, where: str, least: int) -> int:
    return count(got[key], key, where, least=least, what=f"an integer from {least}")


ROWS = (
    Family(
        model_type="gemma4_text",
        settings=geometry(
            "hidden_act",
            "rope_theta",
            "rope_scaling",
            **GEMMA,
            num_key_value_heads=4,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            sliding_window=512,
            layer_types=None,
            final_logit_softcapping=None,
            global_head_dim=512,
            num_global_key_value_heads=None,
            per_layer_config=BY_TYPE,
            attention_k_eq_v=False,
            num_kv_shared_layers=0,
            use_double_wide_mlp=False,
            vocab_size_per_layer_input=262144,
            hidden_size_per_layer_input=256,
            enable_moe_block=False,
            num_experts=None,
            top_k_experts=None,
            moe_intermediate_size=None,
            use_bidirectional_attention=None,
        ),
        keys={"hidden_act": "hidden_activation"},
        fields={
            "order": "sandwich",
            "qk_norm": "rms-head",
            "embedding_scale": SQRT_H,
            "attention_scale": 1.0,
            "logit_softcap": Key("final_logit_softcapping"),
        },
        biases=ATTENTION_BIAS,
        windows="pattern",
        pattern=6,
        turns="none",  # the rotations, as all that differs by layer type, are read by `finish`
        names={
            **SANDWICH,
            "scalar": "layer_scalar",
            "per_layer_embedding": "model.embed_tokens_per_layer",
            "per_layer.projection": "model.per_layer_model_projection",
            "per_layer.norm": "model.per_layer_projection_norm",
            "own_gate": "per_layer_input_gate",
            "own_out": "per_layer_projection",
            "own_norm": "post_per_layer_input_norm",
            "mlp_own_norm": "post_feedforward_layernorm_1",
            "experts_norm": "pre_feedforward_layernorm_2",
            "experts_post_norm": "post_feedforward_layernorm_2",
            "experts.router_norm": "router.scale",
            "experts.router": "router.proj",
            "experts.factors": "router.per_expert_scale",
            "experts.gate-up": "experts.gate_up_proj",
            "experts.down": "experts.down_proj",
        },
        finish=_finish,
        notes=(
            "two rotations",
            "two head sizes",
            "shared keys and values",
            "values from keys on request",
            "embeddings for each layer",
            "mixture of experts on request",
        ),
    ),
)
