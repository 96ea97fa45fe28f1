"""The least that a config.json of each family may hold, and ways to read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL

from rollkv.models.config import CheckpointError, DecoderConfig, RopeConfig
from rollkv.models.families import FAMILIES
from rollkv.models.family import REQUIRED
from rollkv.models.settings import read_config

BARE = {"model_type": "llama"} | {
    key: value for key, value in SMALL.items() if key not in ("initializer_range", "bos_token_id", "eos_token_id")
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 22}


def bare(family: str, **more: Any) -> dict[str, Any]:
    """The least that a config.json of this family may hold."""
    raw = {**BARE, "hidden_size": 48, "model_type": family, "vocab_size": 262_144, "num_hidden_layers": 9}
    if family in ("phi", "gpt_neox"):  # heads of 16: they turn a half or a quarter of it
        raw["num_attention_heads"] = raw["num_key_value_heads"] = 3
    raw |= {key: value for key, value in NEEDED.items() if FAMILIES[family].settings.get(key) is REQUIRED}
    theirs = FAMILIES[family].keys
    return {theirs.get(key, key): value for key, value in {**raw, **more}.items() if known(family, key)}


NEEDED = {
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 7.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64,
    },
}


def known(family: str, key: str) -> bool:
    row = FAMILIES[family]
    return key == "model_type" or row.keys.get(key, key) in {**row.settings, **row.fixed}


def saved(folder: Path, family: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """transformers' config object, and the config.json that it writes."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**SMALL, **settings})
    config.save_pretrained(folder)
    return config, json.loads((folder / "config.json").read_text())


def read(**settings: Any) -> DecoderConfig:
    return read_config({**BARE, **settings}, "config.json")


def rope(**settings: Any) -> RopeConfig:
    return read(**settings).ropes[0]


def refused(match: str, **settings: Any) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        read(**settings)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
