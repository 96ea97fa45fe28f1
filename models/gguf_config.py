"""The metadata of a GGUF file in the words of Hugging Face's config.json.

Knows which keys the architectures below have and what llama.cpp takes for one that is absent. Source: llama.cpp,
src/models/*.cpp for what is read, conversion/*.py for what is written. Does not know how a file is laid out, or what a
decoder does with a config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollkv.models.config import CheckpointError
from rollkv.models.gguf_header import Metadata, quoted
from rollkv.models.gguf_tokenizer import end_ids, special_ids

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors, by name
Vector = Callable[[str], NDArray[np.float32]]  # the values of a tensor with one axis, (its length,)

FREQUENCIES = "rope_freqs.weight"  # divisors of the rotary frequencies
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # those of longrope


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One `general.architecture`."""

    model_type: str  # of config.json
    permuted: bool = False  # rows of q and k are interleaved in the file
    settings: tuple[str, ...] = (FREQUENCIES,)  # tensors that belong to the config
    keys: frozenset[str] = frozenset()  # that are read beside _KNOWN_KEYS


ARCHITECTURES = {
    "llama": Architecture(model_type="llama", permuted=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "gemma2": Architecture(
        model_type="gemma2",
        keys=frozenset({"attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window_pattern"}),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        keys=frozenset({"final_logit_softcapping", "attention.sliding_window_pattern", "rope.freq_base_swa"}),
    ),
    "phi3": Architecture(
        model_type="phi3",
        settings=(FREQUENCIES, LONG, SHORT),
        keys=frozenset({"rope.scaling.attn_factor"}),
    ),
}

# Keys of an architecture that are read, or that change no number. One that is neither, and not 0 or false, is refused.
_KNOWN_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "tensor_data_layout",  # a remark in files of 2023
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.causal",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "expert_count",
    }
)


def config_of(metadata: Metadata, shapes: Shapes, vector: Vector) -> dict[str, object]:
    """The settings of a config.json, `model_type` among them, that say what the metadata say.

    Raises CheckpointError: an architecture or a key that is not known, values that do not fit together or the tensors.
    """
    name = architecture_name(metadata)
    architecture, path, prefix = ARCHITECTURES[name], metadata.path, name + "."
    for key in metadata:
        short = key.removeprefix(prefix)
        off = isinstance(value := metadata.value(key), (int, float)) and value == 0
        if short != key and short not in _KNOWN_KEYS | architecture.keys and not off:
            raise CheckpointError(f"{path}: metadata key {key!r} = {quoted(value)} is not understood")
    if metadata.integer(prefix + "expert_count", 0):
        count = metadata.integer(prefix + "expert_count")
        raise CheckpointError(f"{path}: a mixture of {count} experts ({prefix}expert_count) is not supported")
    if not metadata.flag(prefix + "attention.causal", True):
        raise CheckpointError(f"{path}: {prefix}attention.causal is false; only causal attention is supported")
    file = _open(metadata, prefix, shapes, vector)
    biased = {match[1] for name in shapes if (match := re.fullmatch(r"blk\.\d+\.(attn|ffn)_\w+\.bias", name))}
    config: dict[str, object] = {
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": file.hidden,
        "intermediate_size": metadata.integer(prefix + "feed_forward_length", low=1),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.heads,
        "num_key_value_heads": metadata.integer(prefix + "attention.head_count_kv", file.heads, low=1),
        "rms_norm_eps": metadata.number(prefix + "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer(prefix + "context_length", low=1),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "attn" in biased,
        "mlp_bias": "ffn" in biased,
        "bos_token_id": special_ids(metadata).get("bos"),
        "eos_token_id": end_ids(metadata),
    }
    return config | {"gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3}.get(name, _plain)(file)


def architecture_name(metadata: Metadata) -> str:
    """Which of ARCHITECTURES a file is; CheckpointError for another."""
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{metadata.path}: architecture {quoted(name)} is not supported; supported: {allowed}")
    return name


@dataclass(frozen=True)
class _File:
    """The metadata and tensors of one file, and the sizes that most settings need."""

    metadata: Metadata
    prefix: str  # of the architecture's keys
    shapes: Shapes
    vector: Vector
    hidden: int
    heads: int
    head_dim: int
    layers: int

    @property
    def path(self) -> Path:
        return self.metadata.path

    def integer(self, key: str, default: int | None = None, *, low: int = 0) -> int:
        return self.metadata.integer(self.prefix + key, default, low=low)

    def number(self, key: str, default: float | None = None) -> float:
        return self.metadata.number(self.prefix + key, default)


def _open(metadata: Metadata, prefix: str, shapes: Shapes, vector: Vector) -> _File:
    path = metadata.path
    hidden = metadata.integer(prefix + "embedding_length", low=1)
    heads = metadata.integer(prefix + "attention.head_count", low=1)
    if prefix + "attention.key_length" not in metadata and hidden % heads:
        raise CheckpointError(
            f"{path}: {prefix}embedding_length {hidden} is no multiple of {prefix}attention.head_count {heads}, "
            f"and {prefix}attention.key_length is absent"
        )
    head_dim = metadata.integer(prefix + "attention.key_length", hidden // heads, low=1)
    if metadata.integer(prefix + "attention.value_length", head_dim) != head_dim:
        got = metadata.integer(prefix + "attention.value_length")
        raise CheckpointError(
            f"{path}: {prefix}attention.value_length is {got}; only the head's size, {head_dim}, is supported"
        )
    if head_dim % 2:
        raise CheckpointError(f"{path}: heads of odd size {head_dim} cannot be rotated")
    layers = metadata.integer(prefix + "block_count", low=1)
    numbers = {int(match[1]) for name in shapes if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if len(numbers) != layers or max(numbers) != layers - 1:
        found = f"{len(numbers)} layers, the last {max(numbers)}" if numbers else "no layer"
        raise CheckpointError(f"{path}: {prefix}block_count is {layers}, but the file has tensors of {found}")
    return _File(metadata, prefix, shapes, vector, hidden, heads, head_dim, layers)


def _vocab_size(file: _File) -> int:
    """Rows of the embedding table, which the metadata must not contradict."""
    shape = file.shapes.get("token_embd.weight")
    if shape is None:
        raise CheckpointError(f"{file.path}: has no tensor 'token_embd.weight'")
    if len(shape) != 2 or shape[1] != file.hidden:
        raise CheckpointError(
            f"{file.path}: tensor 'token_embd.weight' has shape {list(shape)}, not [vocabulary, {file.hidden}]"
        )
    rows = shape[0]
    said = file.integer("vocab_size", rows)
    if said != rows:
        raise CheckpointError(f"{file.path}: {file.prefix}vocab_size is {said}, 'token_embd.weight' has {rows} rows")
    if "tokenizer.ggml.tokens" in file.metadata and len(file.metadata.strings("tokenizer.ggml.tokens")) > rows:
        count = len(file.metadata.strings("tokenizer.ggml.tokens"))
        raise CheckpointError(f"{file.path}: {count} tokens, but 'token_embd.weight' has {rows} rows")
    return rows


def _plain(file: _File) -> dict[str, object]:
    """What llama, qwen2 and qwen3 have beside the common settings."""
    window = file.integer("attention.sliding_window", 0)
    if window:
        raise CheckpointError(
            f"{file.path}: {file.prefix}attention.sliding_window is {window}, and the file does not say which layers "
            "it is for; export from the model's Hugging Face folder"
        )
    return {"head_dim": file.head_dim, "hidden_act": "silu", "rope_parameters": _whole_rope(file)}


def _gemma2(file: _File) -> dict[str, object]:
    """What gemma2 has beside the common settings; llama.cpp's values for absent keys are those of the models."""
    return _gemma(file, layers_of_27b=46) | {
        "rope_parameters": _whole_rope(file),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        "sliding_window": file.integer("attention.sliding_window", 4096, low=1),
        "layer_types": _layer_types(file, 2),
    }


def _gemma3(file: _File) -> dict[str, object]:
    """What gemma3 has beside the common settings; layers that slide turn by a base of their own, never scaled."""
    window, cap = file.integer("attention.sliding_window", 0), "final_logit_softcapping"
    capped = file.prefix + cap in file.metadata and file.metadata.value(file.prefix + cap) != 0
    return _gemma(file, layers_of_27b=62) | {
        "rope_parameters": {
            "full_attention": _whole_rope(file),
            "sliding_attention": {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 10000.0)},
        },
        cap: file.number(cap) if capped else None,
        "sliding_window": window or None,
        "layer_types": _layer_types(file, 6) if window else ["full_attention"] * file.layers,
    }


def _gemma(file: _File, layers_of_27b: int) -> dict[str, object]:
    """Settings that gemma2 and gemma3 share.

    A file does not hold the scale of the queries. llama.cpp takes the head's size for it, save where the number of
    layers is that of the 27B model, which was trained with hidden size / heads.
    """
    scalar = file.head_dim
    if file.layers == layers_of_27b:
        scalar, rest = divmod(file.hidden, file.heads)
        if rest:
            raise CheckpointError(
                f"{file.path}: {file.prefix}block_count {file.layers} means queries scaled by embedding_length / "
                f"attention.head_count, and {file.hidden} is no multiple of {file.heads}"
            )
    return {
        "head_dim": file.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
    }


def _layer_types(file: _File, period: int) -> list[str]:
    """Which layers slide: all but every n-th, or what an array says of each layer.

    period: n where the file does not say.
    """
    key = file.prefix + "attention.sliding_window_pattern"
    if key in file.metadata and isinstance(file.metadata.value(key), np.ndarray):
        slides = [bool(flag) for flag in file.metadata.array(key, file.layers, "biu")]
    else:
        period = file.metadata.integer(key, period)
        slides = [period == 0 or i % period < period - 1 for i in range(file.layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _phi3(file: _File) -> dict[str, object]:
    """What phi3 has beside the common settings: a window on every layer, partial rotation, longrope."""
    if file.head_dim * file.heads != file.hidden:
        raise CheckpointError(
            f"{file.path}: {file.prefix}attention.key_length is {file.head_dim}; only embedding_length / "
            f"attention.head_count, {file.hidden} / {file.heads}, is supported"
        )
    rotary = file.integer("rope.dimension_count", file.head_dim, low=1)
    original = file.integer("rope.scaling.original_context_length", file.integer("context_length"), low=1)
    rope = _rope(file, rotary)
    held = {name: list(file.shapes[name]) for name in (SHORT, LONG) if name in file.shapes}
    if held:
        if len(held) == 1 or any(shape != [rotary // 2] for shape in held.values()):
            raise CheckpointError(
                f"{file.path}: longrope needs the tensors {SHORT!r} and {LONG!r} of {rotary // 2} numbers each; "
                f"the file has {', '.join(f'{name} of shape {shape}' for name, shape in held.items())}"
            )
        if rope["rope_type"] != "default":
            raise CheckpointError(f"{file.path}: has both rope scaling {rope['rope_type']!r} and tensor {LONG!r}")
        rope |= {
            "rope_type": "longrope",
            "short_factor": [
                float(str(factor)) for factor in file.vector(SHORT)
            ],  # the shortest decimals, see Metadata
            "long_factor": [float(str(factor)) for factor in file.vector(LONG)],
            "attention_factor": file.number("rope.scaling.attn_factor"),
            "original_max_position_embeddings": original,
        }
    elif file.number("rope.scaling.attn_factor", 1.0) != 1:
        raise CheckpointError(f"{file.path}: has {file.prefix}rope.scaling.attn_factor, but no tensor {LONG!r}")
    if rotary != file.head_dim:
        share = rotary / file.head_dim
        # config.json means int(head_dim * share), which must not fall one short
        rope["partial_rotary_factor"] = share if int(file.head_dim * share) == rotary else math.nextafter(share, 2)
    return {
        "hidden_act": "silu",
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": file.integer("attention.sliding_window", 0) or None,
    }


def _whole_rope(file: _File) -> dict[str, object]:
    """The rotation of whole heads."""
    rotary = file.integer("rope.dimension_count", file.head_dim)
    if rotary != file.head_dim:
        raise CheckpointError(
            f"{file.path}: {file.prefix}rope.dimension_count is {rotary}; only the head's size, {file.head_dim}, "
            "is supported"
        )
    return _rope(file, rotary)


def _rope(file: _File, rotary: int) -> dict[str, object]:
    """`rope_parameters` of config.json, exactly as the file scales its frequencies, or CheckpointError."""
    type_key, factor_key = "rope.scaling.type", "rope.scaling.factor"
    theta = file.number("rope.freq_base", 10000.0)  # llama.cpp's value for a file without the key
    if file.prefix + factor_key not in file.metadata and file.prefix + "rope.scale_linear" in file.metadata:
        factor_key = "rope.scale_linear"  # its name in 2023
    if file.prefix + type_key in file.metadata:
        kind = file.metadata.text(file.prefix + type_key)
    else:
        kind = "linear" if file.prefix + factor_key in file.metadata else "none"
    if kind not in ("none", "linear"):
        raise CheckpointError(f"{file.path}: {file.prefix}{type_key} is {quoted(kind)}; supported: 'none', 'linear'")
    if FREQUENCIES in file.shapes:
        if kind != "none":
            raise CheckpointError(f"{file.path}: has both {file.prefix}{type_key} {kind!r} and tensor {FREQUENCIES!r}")
        return {"rope_theta": theta} | _llama3(file, theta, rotary)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": kind, "rope_theta": theta, "factor": file.number(factor_key)}


def _llama3(file: _File, theta: float, rotary: int) -> dict[str, object]:
    """Name the llama3 scaling whose divisors of the frequencies, (rotary / 2,), the file has as a tensor.

    Llama 3.1 scales by 8 and 3.2 by 32, both between the wavelengths 8192 / 4 and 8192 / 1 (config.json of those
    models; formula: transformers, modeling_rope_utils). Divisors that are all 1 scale nothing.
    """
    low, high, original = 1.0, 4.0, 8192
    if file.shapes[FREQUENCIES] == (rotary // 2,):
        divisors = file.vector(FREQUENCIES)
        if (divisors == 1).all():
            return {"rope_type": "default"}
        turns = original / (2 * math.pi) * theta ** (-np.arange(0, rotary, 2) / rotary)  # (rotary / 2,)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        for factor in (8.0, 32.0):
            if np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    raise CheckpointError(
        f"{file.path}: tensor {FREQUENCIES!r} of shape {list(file.shapes[FREQUENCIES])} scales the rotary frequencies "
        f"in another way than Llama 3.1 (factor 8) and 3.2 (factor 32) do with {rotary // 2} frequencies"
    )
