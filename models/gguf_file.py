"""A GGUF file as a checkpoint: its config in the words of Hugging Face's config.json, and its tensors in slices.

Knows which metadata keys and tensors the architectures below have, and how llama.cpp's converter lays rows out.
Does not know Hugging Face's tensor names, what a decoder does with a config, or how text becomes token ids.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from rollkv.models.config import CheckpointError
from rollkv.models.gguf_header import Header, Metadata, TensorInfo, quoted, read_header
from rollkv.models.gguf_tokenizer import end_ids, special_ids, tokenizer_files
from rollkv.models.tensors import StoredTensor

PERMUTED = {"llama": True, "qwen2": False, "qwen3": False}  # architecture -> are rows of q and k interleaved

_ROPE_FACTORS = "rope_freqs.weight"
_CHUNK_ELEMENTS = 1 << 17  # dequantised at a time; the working memory of a read beyond its result

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


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file; a `StoredTensor`.

    `heads` is None, or the number of heads whose rows the file has interleaved: (heads, D/2, 2, ...) there is
    (heads, 2, D/2, ...) in the rotate-half order in which `read` gives them.
    """

    info: TensorInfo
    data: NDArray[np.uint8]  # (bytes of the file,), mapped
    heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor: (out, in), or (length,)."""
        return self.info.shape

    @property
    def storage(self) -> str:
        """See `tensors.storage_type`."""
        kinds = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}
        return kinds.get(self.info.type, "float32")

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start .. stop - 1, as float32: (stop - start, *shape[1:])."""
        assert 0 <= start <= stop <= self.shape[0], (self.info.name, start, stop, self.shape)
        if self.heads is None:
            return self._stored_rows(start, stop)
        size = self.shape[0] // self.heads
        stored = np.arange(size).reshape(size // 2, 2).T.ravel()  # (D,): where the file has each row of a head
        rows = np.empty((stop - start, *self.shape[1:]), np.float32)
        for head in range(start // size, -(-stop // size)):
            first, last = max(start, head * size), min(stop, (head + 1) * size)
            of_head = self._stored_rows(head * size, (head + 1) * size)
            rows[first - start : last - start] = of_head[stored[first - head * size : last - head * size]]
        return rows

    def _stored_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows in the order of the file, dequantised chunk by chunk."""
        block, block_bytes = GGML_QUANT_SIZES[self.info.type]
        inner = math.prod(self.shape[1:])
        first, last = start * inner // block, -(-stop * inner // block)  # blocks; a vector's ends may fall inside one
        values = np.empty((last - first) * block, np.float32)
        step = max(1, _CHUNK_ELEMENTS // block)
        for chunk in range(first, last, step):
            end = min(chunk + step, last)
            at = self.info.offset
            packed = np.asarray(self.data[at + chunk * block_bytes : at + end * block_bytes]).reshape(1, -1)
            values[(chunk - first) * block : (end - first) * block] = dequantize(packed, self.info.type)[0]
        skip = start * inner - first * block
        return values[skip : skip + (stop - start) * inner].reshape(stop - start, *self.shape[1:])


@dataclass(frozen=True)
class GgufFile:
    """A GGUF checkpoint."""

    path: Path
    config: Mapping[str, object]  # in the vocabulary of config.json
    tensors: Mapping[str, StoredTensor]  # by GGUF's names
    metadata: Metadata

    def text_files(self) -> dict[str, bytes]:
        """The files that turn text into token ids and back, by the names that Hugging Face gives them.

        tokenizer.json, tokenizer_config.json, generation_config.json, and chat_template.jinja when the file has a
        template. The same file gives the same bytes. Raises CheckpointError for a tokenizer that is not understood.
        """
        files = tokenizer_files(self.metadata)
        ends = {"bos_token_id": self.config["bos_token_id"], "eos_token_id": self.config["eos_token_id"]}
        files["generation_config.json"] = (json.dumps(ends, indent=2) + "\n").encode()
        if "tokenizer.chat_template" in self.metadata:
            files["chat_template.jinja"] = self.metadata.text("tokenizer.chat_template").encode()
        return files


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's header; tensors stay in the file until they are read.

    `rope_freqs.weight` is not among the tensors: it says how the rotary frequencies are scaled, and is in the config.
    Raises CheckpointError, naming the file, for a file that is damaged, split, or of a model that is not supported.
    """
    header = read_header(path)
    metadata = header.metadata
    if metadata.integer("split.count", 1) > 1:
        raise CheckpointError(
            f"{path}: one of {metadata.integer('split.count')} parts of a split GGUF file; "
            "join them with `llama-gguf-split --merge` first"
        )
    architecture = metadata.text("general.architecture")
    if architecture not in PERMUTED:
        allowed = ", ".join(PERMUTED)
        raise CheckpointError(f"{path}: architecture {quoted(architecture)} is not supported; supported: {allowed}")
    infos = {info.name: info for info in header.tensors}
    for info in header.tensors:
        if not _dequantises(info.type):
            raise CheckpointError(f"{path}: tensor {info.name!r} has type {info.type.name}, which cannot be read")
    config = _config(architecture, header, infos)
    tensors: dict[str, StoredTensor] = {}
    for name, info in infos.items():
        if name != _ROPE_FACTORS:
            heads = _interleaved_heads(path, info, config) if PERMUTED[architecture] else None
            tensors[name] = GgufTensor(info, header.data, heads)
    return GgufFile(path, config, tensors, metadata)


@cache
def _dequantises(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package can dequantise a type: it is tried on one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _interleaved_heads(path: Path, info: TensorInfo, config: Mapping[str, object]) -> int | None:
    """How many heads of interleaved rows a tensor of architecture llama has; None: its rows are as they should be."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", info.name)
    if match is None:
        return None
    heads, head_dim = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"], config["head_dim"]
    assert isinstance(heads, int)
    assert isinstance(head_dim, int)
    if info.shape[0] != heads * head_dim:
        raise CheckpointError(f"{path}: tensor {info.name!r} has {info.shape[0]} rows, not {heads} heads x {head_dim}")
    return heads


def _config(architecture: str, header: Header, infos: Mapping[str, TensorInfo]) -> dict[str, object]:
    """The metadata in the vocabulary of config.json."""
    metadata = header.metadata
    path, prefix = metadata.path, architecture + "."
    for key in metadata:
        name = key.removeprefix(prefix)
        off = isinstance(value := metadata.value(key), (int, float)) and value == 0
        if name != key and name not in _KNOWN_KEYS and not off:
            raise CheckpointError(f"{path}: metadata key {key!r} = {quoted(value)} is not understood")
    if metadata.integer(prefix + "expert_count", 0):
        count = metadata.integer(prefix + "expert_count")
        raise CheckpointError(f"{path}: a mixture of {count} experts ({prefix}expert_count) is not supported")
    if not metadata.flag(prefix + "attention.causal", True):
        raise CheckpointError(f"{path}: {prefix}attention.causal is false; only causal attention is supported")
    _refuse_window(metadata, architecture)
    hidden = metadata.integer(prefix + "embedding_length", low=1)
    heads = metadata.integer(prefix + "attention.head_count", low=1)
    head_dim = _head_dim(metadata, prefix, hidden, heads)
    layers = metadata.integer(prefix + "block_count", low=1)
    _check_layers(path, prefix, layers, infos)
    biased = {match[1] for name in infos if (match := re.fullmatch(r"blk\.\d+\.(attn|ffn)_\w+\.bias", name))}
    return {
        "model_type": architecture,
        "vocab_size": _vocab_size(metadata, prefix, hidden, infos),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(prefix + "feed_forward_length", low=1),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(prefix + "attention.head_count_kv", heads, low=1),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number(prefix + "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer(prefix + "context_length", low=1),
        "rope_parameters": _rope(metadata, prefix, head_dim, header, infos.get(_ROPE_FACTORS)),
        "tie_word_embeddings": "output.weight" not in infos,
        "hidden_act": "silu",
        "attention_bias": "attn" in biased,
        "mlp_bias": "ffn" in biased,
        "bos_token_id": special_ids(metadata).get("bos"),
        "eos_token_id": end_ids(metadata),
    }


def _head_dim(metadata: Metadata, prefix: str, hidden: int, heads: int) -> int:
    path = metadata.path
    if prefix + "attention.key_length" not in metadata and hidden % heads:
        raise CheckpointError(
            f"{path}: {prefix}embedding_length {hidden} is no multiple of {prefix}attention.head_count {heads}, "
            f"and {prefix}attention.key_length is absent"
        )
    head_dim = metadata.integer(prefix + "attention.key_length", hidden // heads, low=1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(prefix + key, head_dim) != head_dim:
            got = metadata.integer(prefix + key)
            raise CheckpointError(f"{path}: {prefix}{key} is {got}; only the head's size, {head_dim}, is supported")
    if head_dim % 2:
        raise CheckpointError(f"{path}: heads of odd size {head_dim} cannot be rotated")
    return head_dim


def _check_layers(path: Path, prefix: str, layers: int, infos: Mapping[str, TensorInfo]) -> None:
    numbers = {int(match[1]) for name in infos if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if len(numbers) != layers or max(numbers) != layers - 1:
        found = f"{len(numbers)} layers, the last {max(numbers)}" if numbers else "no layer"
        raise CheckpointError(f"{path}: {prefix}block_count is {layers}, but the file has tensors of {found}")


def _vocab_size(metadata: Metadata, prefix: str, hidden: int, infos: Mapping[str, TensorInfo]) -> int:
    """Rows of the embedding table, which the metadata must not contradict."""
    table = infos.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{metadata.path}: has no tensor 'token_embd.weight'")
    if len(table.shape) != 2 or table.shape[1] != hidden:
        raise CheckpointError(
            f"{metadata.path}: tensor 'token_embd.weight' has shape {list(table.shape)}, not [vocabulary, {hidden}]"
        )
    rows = table.shape[0]
    said = metadata.integer(prefix + "vocab_size", rows)
    if said != rows:
        raise CheckpointError(f"{metadata.path}: {prefix}vocab_size is {said}, 'token_embd.weight' has {rows} rows")
    if "tokenizer.ggml.tokens" in metadata and len(metadata.strings("tokenizer.ggml.tokens")) > rows:
        count = len(metadata.strings("tokenizer.ggml.tokens"))
        raise CheckpointError(f"{metadata.path}: {count} tokens, but 'token_embd.weight' has {rows} rows")
    return rows


def _refuse_window(metadata: Metadata, architecture: str) -> None:
    """A window that the file names without its layers."""
    key = architecture + ".attention.sliding_window"
    window = metadata.integer(key, 0)
    if window:
        raise CheckpointError(
            f"{metadata.path}: {key} is {window}, and the file does not say which layers it is for; "
            "export from the model's Hugging Face folder"
        )


def _rope(
    metadata: Metadata, prefix: str, head_dim: int, header: Header, factors: TensorInfo | None
) -> dict[str, object]:
    """`rope_parameters` of config.json, exactly as the file scales its frequencies, or CheckpointError."""
    path = metadata.path
    theta = metadata.number(prefix + "rope.freq_base", 10000.0)  # llama.cpp's value for a file without the key
    kind = metadata.text(prefix + "rope.scaling.type") if prefix + "rope.scaling.type" in metadata else "none"
    if kind == "none" and prefix + "rope.scale_linear" in metadata:  # how files of 2023 say it
        kind, factor_key = "linear", prefix + "rope.scale_linear"
    else:
        factor_key = prefix + "rope.scaling.factor"
    if kind not in ("none", "linear"):
        raise CheckpointError(f"{path}: {prefix}rope.scaling.type is {quoted(kind)}; supported: 'none', 'linear'")
    if factors is not None:
        if kind != "none":
            raise CheckpointError(f"{path}: has both {prefix}rope.scaling.type {kind!r} and tensor {_ROPE_FACTORS!r}")
        return {"rope_theta": theta} | _llama3(path, theta, head_dim, GgufTensor(factors, header.data))
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": kind, "rope_theta": theta, "factor": metadata.number(factor_key)}


def _llama3(path: Path, theta: float, head_dim: int, stored: GgufTensor) -> dict[str, object]:
    """Name the llama3 scaling whose divisors of the frequencies, (head_dim / 2,), the file has as a tensor.

    Llama 3.1 scales by 8 and 3.2 by 32, both between the wavelengths 8192 / 4 and 8192 / 1 (config.json of those
    models; formula: transformers, modeling_rope_utils). Divisors that are all 1 scale nothing.
    """
    low, high, original = 1.0, 4.0, 8192
    if stored.shape == (head_dim // 2,):
        divisors = stored.read(0, head_dim // 2)
        if (divisors == 1).all():
            return {"rope_type": "default"}
        turns = original / (2 * math.pi) * theta ** (-np.arange(0, head_dim, 2) / head_dim)  # (head_dim / 2,)
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
        f"{path}: tensor {_ROPE_FACTORS!r} of shape {list(stored.shape)} scales the rotary frequencies in another way "
        f"than Llama 3.1 (factor 8) and 3.2 (factor 32) do with {head_dim // 2} frequencies"
    )
