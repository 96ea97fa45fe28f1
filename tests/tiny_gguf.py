"""Tiny GGUF files for the tests, written with the gguf package as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType
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


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp keeps them: the two halves of a head in turn."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def converted_tensors(folder: Path, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face folder as llama.cpp's converter writes them, named by the gguf package."""
    from safetensors.torch import load_file

    raw = json.loads((folder / "config.json").read_text())
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, raw["num_hidden_layers"])
    heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        value = tensor.float().numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if architecture == "llama" and (part := name.split(".")[-2]) in heads:
            value = interleaved(value, heads[part])
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        tensors[found] = value
    for length in ("long", "short"):
        factors = raw["rope_parameters"].get(f"{length}_factor")
        if factors:
            tensors[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
    return tensors


def converted_metadata(folder: Path, architecture: str) -> dict[str, object]:
    """The metadata of a Hugging Face folder as llama.cpp's converter writes them, without a tokenizer."""
    raw = json.loads((folder / "config.json").read_text())
    rope = raw["rope_parameters"]
    whole = rope.get("full_attention", rope)
    values: dict[str, object] = {
        "block_count": raw["num_hidden_layers"],
        "vocab_size": raw["vocab_size"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "rope.freq_base": float(whole["rope_theta"]),
    }
    if raw.get("head_dim"):
        values |= {"attention.key_length": raw["head_dim"], "attention.value_length": raw["head_dim"]}
    if whole["rope_type"] == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": whole["factor"]}
    if architecture in ("gemma2", "gemma3"):
        values |= {
            "attn_logit_softcapping": raw["attn_logit_softcapping"],
            "final_logit_softcapping": raw["final_logit_softcapping"],
            "attention.sliding_window": raw["sliding_window"],
        }
    if architecture == "phi3":
        original = raw["original_max_position_embeddings"]
        head_dim = raw["hidden_size"] // raw["num_attention_heads"]
        values |= {
            "attention.sliding_window": raw["sliding_window"] or 0,
            "rope.scaling.original_context_length": original,
            "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        }
        if rope["rope_type"] == "longrope":
            scale = raw["max_position_embeddings"] / original
            values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return {f"{architecture}.{key}": value for key, value in values.items()}
