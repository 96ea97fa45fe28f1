"""Decoder families as data: how each one's config.json reads, and what its tensors are called.

The file that knows what Hugging Face calls settings and tensors. A family is looked up by the exact `model_type`; a
setting that would change the numbers and is not understood is refused. Knows no file format and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollkv.models.config import CheckpointError, DecoderConfig, RopeConfig

# No model is near them: a damaged number is refused before memory is asked for. Beyond 2^24 float32 skips positions.
LARGEST = {"num_hidden_layers": 10_000, "max_position_embeddings": 2**24}
REQUIRED = object()  # in Family.settings: the key must be there
_FIXED = {"is_causal": True}  # transformers reads it from any config: false lets a row see later tokens


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: its settings with the values that an absent key stands for, and what is built in."""

    model_type: str
    settings: Mapping[str, Any]
    qkv_bias: bool = False  # always there, not a setting
    qk_norm: bool = False
    fixed: Mapping[str, Any] = field(default_factory=lambda: {**_FIXED})  # may be there with this value only
    windows: str = "none"  # "none", "all" layers, or "from" the layer max_window_layers on, behind use_sliding_window


_GEOMETRY = {
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
_WINDOW_SWITCH = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            settings={**_GEOMETRY, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2},
        ),
        Family(
            model_type="mistral",
            settings={
                **_GEOMETRY,
                "num_key_value_heads": REQUIRED,
                "sliding_window": 4096,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            windows="all",
        ),
        Family(
            model_type="qwen2",
            settings={**_GEOMETRY, "num_key_value_heads": REQUIRED, **_WINDOW_SWITCH},
            qkv_bias=True,
            fixed={**_FIXED, "attention_bias": True},
            windows="from",
        ),
        Family(
            model_type="qwen3",
            settings={
                **_GEOMETRY,
                "num_key_value_heads": REQUIRED,
                "head_dim": 128,
                "attention_bias": False,
                **_WINDOW_SWITCH,
            },
            qk_norm=True,
            windows="from",
        ),
    )
}

# Settings that say nothing about the numbers of a forward pass in evaluation mode.
_HARMLESS = frozenset(
    [
        "architectures",
        "attention_dropout",
        "auto_map",
        "bad_words_ids",
        "chunk_size_feed_forward",
        "dtype",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "model_type",
        "name_or_path",
        "_name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
    ]
)
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROPE_HARMLESS = ("rope_type", "type", "rope_theta", "finetuned")


def read_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """The content of a config.json, read by its family.

    where: the file's name, for messages.
    Raises CheckpointError: unknown model_type, missing or unknown setting, geometry that does not fit together.
    """
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    for key, value in raw.items():
        if key in family.fixed and value is not None and value != family.fixed[key]:
            raise CheckpointError(f"{where}: {key} is {value!r}; allowed for {model_type}: {family.fixed[key]!r}")
        if key in family.settings or key in family.fixed or key in _HARMLESS or value is None or value is False:
            continue
        raise CheckpointError(f"{where}: setting {key!r} = {str(value)[:80]!r} is not understood for {model_type}")
    got = {key: raw.get(key, default) for key, default in family.settings.items()}
    missing = [
        key for key, value in got.items() if value is REQUIRED or (value is None and family.settings[key] is REQUIRED)
    ]
    if missing:
        raise CheckpointError(f"{where}: {', '.join(missing)} missing")
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
        if got[key] is not None and (not isinstance(got[key], int) or isinstance(got[key], bool) or got[key] < 1):
            raise CheckpointError(f"{where}: {key} is {got[key]!r}, must be a positive integer")
        if got[key] is not None and got[key] > LARGEST.get(key, 2**31):
            raise CheckpointError(f"{where}: {key} is {got[key]}, allowed: up to {LARGEST.get(key, 2**31)}")
    if got["hidden_act"] != "silu":
        raise CheckpointError(f"{where}: hidden_act {got['hidden_act']!r} is not supported; allowed: 'silu'")
    for key, default in family.settings.items():
        if default is False and got[key] is not None and not isinstance(got[key], bool):
            raise CheckpointError(f"{where}: {key} is {got[key]!r}, must be true or false")
    bos = got["bos_token_id"]
    if bos is not None and not _is_token_id(bos):
        raise CheckpointError(f"{where}: bos_token_id is {bos!r}, must be a token id or null")
    heads, kv_heads = got["num_attention_heads"], got["num_key_value_heads"] or got["num_attention_heads"]
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if got["head_dim"] is None and got["hidden_size"] % heads:
        raise CheckpointError(f"{where}: hidden_size {got['hidden_size']} / num_attention_heads {heads} is no head_dim")
    head_dim = got["head_dim"] or got["hidden_size"] // heads
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim {head_dim} is odd; a rotated head has an even size")
    eps = got["rms_norm_eps"]
    if not _is_positive(eps):
        raise CheckpointError(f"{where}: rms_norm_eps is {eps!r}, must be a positive number")
    return DecoderConfig(
        family=family.model_type,
        vocab_size=got["vocab_size"],
        hidden_size=got["hidden_size"],
        intermediate_size=got["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(eps),
        max_position=got["max_position_embeddings"],
        windows=_windows(family, got, where),
        rope=_rope(got, head_dim, where),
        bos_token_id=got["bos_token_id"],
        eos_token_ids=token_ids(got["eos_token_id"], f"{where}: eos_token_id"),
        qkv_bias=family.qkv_bias or bool(got.get("attention_bias")),
        out_bias=bool(got.get("attention_bias")),
        mlp_bias=bool(got.get("mlp_bias")),
        qk_norm=family.qk_norm,
        tied_head=bool(got["tie_word_embeddings"]),
    )


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """A token id setting: null, an id, or a list of ids. Raises CheckpointError for anything else."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(map(_is_token_id, ids)):
        raise CheckpointError(f"{where} is {value!r}, must be a token id or a list of them")
    return ids


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    """A finite number above 0; JSON as Python reads it may hold Infinity and NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _windows(family: Family, got: Mapping[str, Any], where: str) -> tuple[int | None, ...]:
    """Window of each layer. null and 0 mean none: a window of 0 would let no query see anything."""
    layers: int = got["num_hidden_layers"]
    kinds, known = got.get("layer_types"), ("full_attention", "sliding_attention")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == layers and all(kind in known for kind in kinds)
    ):
        raise CheckpointError(f"{where}: layer_types {str(kinds)[:80]} must be {layers} of {', '.join(known)}")
    window: int | None = got.get("sliding_window") or None
    if family.windows == "none" or window is None or (family.windows == "from" and not got["use_sliding_window"]):
        return (None,) * layers
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise CheckpointError(f"{where}: sliding_window is {window!r}, must be a positive integer or null")
    if family.windows == "all":
        return (window,) * layers
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = got["max_window_layers"]
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise CheckpointError(f"{where}: max_window_layers is {first!r}, must be a number of layers")
    return tuple(window if i >= first else None for i in range(layers))


def _rope(got: Mapping[str, Any], head_dim: int, where: str) -> RopeConfig:
    """Rotary settings, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    for key in ("rope_scaling", "rope_parameters"):
        if got[key] is not None and not isinstance(got[key], dict):
            raise CheckpointError(f"{where}: {key} is {got[key]!r}, must be an object or null")
    given = {**(got["rope_scaling"] or {}), **(got["rope_parameters"] or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    keys = _ROPE_KEYS[kind]
    for key, value in given.items():
        if key == "partial_rotary_factor" and value == 1.0:
            continue
        if key not in keys and key not in _ROPE_HARMLESS and value is not None:
            raise CheckpointError(f"{where}: rope setting {key!r} = {value!r} is not understood for rope type {kind!r}")
    values: dict[str, Any] = {key: given.get(key) for key in keys}
    thetas = (given.get("rope_theta"), got["rope_theta"], 10000.0)
    values["rope_theta"] = next(theta for theta in thetas if theta is not None)
    for key, value in values.items():
        if not _is_positive(value):
            raise CheckpointError(f"{where}: rope setting {key!r} is {value!r}, must be a positive number")
    return RopeConfig(
        type=kind,
        theta=float(values["rope_theta"]),
        rotary_dim=head_dim,
        factor=values.get("factor"),
        low_freq_factor=values.get("low_freq_factor"),
        high_freq_factor=values.get("high_freq_factor"),
        original_max_position=values.get("original_max_position_embeddings"),
    )


@dataclass(frozen=True)
class TensorName:
    """One tensor of a decoder, and what it is called in each kind of checkpoint."""

    decoder: str  # a parameter's name in decoder.Decoder
    hf: str
    gguf: str
    transposed: bool = False  # the decoder keeps (in, out) where checkpoints keep (out, in)


_LINEARS = (
    ("attention.q", "self_attn.q_proj", "attn_q"),
    ("attention.k", "self_attn.k_proj", "attn_k"),
    ("attention.v", "self_attn.v_proj", "attn_v"),
    ("attention.out", "self_attn.o_proj", "attn_output"),
    ("mlp.gate", "mlp.gate_proj", "ffn_gate"),
    ("mlp.up", "mlp.up_proj", "ffn_up"),
    ("mlp.down", "mlp.down_proj", "ffn_down"),
)


def tensor_names(config: DecoderConfig) -> Iterator[TensorName]:
    """Every tensor that a checkpoint of this config must hold, in the order in which the decoder uses them.

    A tied head has none of its own.
    """
    yield TensorName("embedding.weight", "model.embed_tokens.weight", "token_embd.weight")
    biased = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "out": config.out_bias}
    for i in range(config.num_layers):
        ours, hf, gguf = f"layers.{i}", f"model.layers.{i}", f"blk.{i}"
        yield TensorName(f"{ours}.attention_norm.weight", f"{hf}.input_layernorm.weight", f"{gguf}.attn_norm.weight")
        for name, hf_name, gguf_name in _LINEARS:
            yield TensorName(f"{ours}.{name}.weight", f"{hf}.{hf_name}.weight", f"{gguf}.{gguf_name}.weight", True)
            if biased.get(name.split(".")[1], config.mlp_bias):
                yield TensorName(f"{ours}.{name}.bias", f"{hf}.{hf_name}.bias", f"{gguf}.{gguf_name}.bias")
        if config.qk_norm:
            for x in "qk":
                yield TensorName(
                    f"{ours}.attention.{x}_norm.weight",
                    f"{hf}.self_attn.{x}_norm.weight",
                    f"{gguf}.attn_{x}_norm.weight",
                )
        yield TensorName(f"{ours}.mlp_norm.weight", f"{hf}.post_attention_layernorm.weight", f"{gguf}.ffn_norm.weight")
    yield TensorName("head.norm.weight", "model.norm.weight", "output_norm.weight")
    if not config.tied_head:
        yield TensorName("head.weight", "lm_head.weight", "output.weight", True)


def expected_shape(name: str, config: DecoderConfig) -> tuple[int, ...]:
    """Shape of a decoder tensor in a checkpoint, (out, in) for a linear weight."""
    hidden, width = config.hidden_size, config.intermediate_size
    queries, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    part = name.split(".", 2)[2] if name.startswith("layers.") else name
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (config.vocab_size, hidden),
        "head.weight": (config.vocab_size, hidden),
        "attention.q.weight": (queries, hidden),
        "attention.k.weight": (kv, hidden),
        "attention.v.weight": (kv, hidden),
        "attention.out.weight": (hidden, queries),
        "mlp.gate.weight": (width, hidden),
        "mlp.up.weight": (width, hidden),
        "mlp.down.weight": (hidden, width),
        "attention.q_norm.weight": (config.head_dim,),
        "attention.k_norm.weight": (config.head_dim,),
    }
    if part.endswith(".bias"):
        return shapes[part.removesuffix("bias") + "weight"][:1]
    return shapes.get(part, (hidden,))
