"""Tiny GGUF files for the tests, written with the gguf package as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
TOKENS = ["<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa"]
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "Ġ a"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def metadata(architecture: str = "llama", hidden: int = HIDDEN) -> dict[str, object]:
    values = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": hidden,
        "feed_forward_length": FEED_FORWARD if hidden == HIDDEN else hidden,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    return {f"{architecture}.{key}": value for key, value in values.items()} | BYTE_LEVEL


def shapes(*, hidden: int = HIDDEN, bias: str = "", tied: bool = True, vocab: int = len(TOKENS)) -> dict[str, tuple]:
    """Tensor shapes, (out, in); `bias` has one letter for each of q, k, v and o that has one."""
    ff, kv = FEED_FORWARD if hidden == HIDDEN else hidden, hidden // HEADS * KV_HEADS
    layer = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (hidden, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, hidden),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ff, hidden),
        "ffn_up.weight": (ff, hidden),
        "ffn_down.weight": (hidden, ff),
    }
    for part, size in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
        if part in bias:
            layer[f"attn_{'output' if part == 'o' else part}.bias"] = (size,)
    table = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    table |= {} if tied else {"output.weight": (vocab, hidden)}
    return table | {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


def random_tensors(wanted: Mapping[str, tuple]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in wanted.items()}


def random_blocks(shape: tuple, kind: GGMLQuantizationType) -> np.ndarray:
    """Random bytes of a type that gguf cannot quantise to, with scales small and finite: (rows, bytes of a row)."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
    scale = np.array([0.01], np.float16).view(np.uint8)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_XS": (0,)}[
        kind.name
    ]
    for at in halves:
        blocks[..., at : at + 2] = scale
    return blocks.reshape(shape[0], -1)


def write_gguf(
    path: Path,
    values: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: str = "F32",
) -> Path:
    """Write a file; matrices are stored as `kind`, vectors as F32. A value None leaves its key out."""
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    stored = GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        if tensor.dtype == np.uint8:  # blocks
            writer.add_tensor(name, tensor, raw_dtype=stored)
        elif tensor.ndim == 1 or kind == "F32":
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
