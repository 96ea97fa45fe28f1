"""Rotary tables against transformers' own, near and far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rollkv.models.config import RopeConfig
from rollkv.models.families import read_config
from rollkv.models.layers import inverse_frequencies, rope_tables

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 1000000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        LLAMA3,
    ],
    ids=["default", "large-theta", "linear", "llama3"],
)
def test_rotary_tables_equal_transformers_at_near_and_far_positions(rope: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=131072, vocab_size=9, rope_parameters=dict(rope)
    )
    ours = read_config(config.to_dict(), "config.json").rope
    theirs = LlamaRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(ours), theirs.inv_freq)
    positions = torch.tensor([[0, 1, 1000, 5000, 8192, 100_000]])
    cos, sin = theirs(torch.zeros(1), positions)
    own_cos, own_sin = rope_tables(ours, 100_001)
    half = ours.rotary_dim // 2
    assert torch.equal(own_cos[positions[0]], cos[0, :, :half])
    assert torch.equal(own_sin[positions[0]], sin[0, :, half:])


def test_leaving_the_scaling_out_would_show() -> None:
    plain = RopeConfig(type="default", theta=500000.0, rotary_dim=64)
    scaled = RopeConfig(
        type="llama3", theta=500000.0, rotary_dim=64, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position=8192,
    )  # fmt: skip
    near = (rope_tables(plain, 2000)[0] - rope_tables(scaled, 2000)[0]).abs().max()
    assert near > 0.1


def test_the_tables_never_come_in_half_precision(tmp_path: Path) -> None:
    rope = RopeConfig(type="default", theta=10000.0, rotary_dim=8)
    assert all(table.dtype == torch.float32 for table in rope_tables(rope, 16))
