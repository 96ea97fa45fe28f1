"""Settings that transformers' classes read otherwise than their names say: computed as there, or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from bare_configs import bare

from rollkv.models.config import CheckpointError
from rollkv.models.settings import read_config


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        (
            "gemma3_text",
            {"attn_logit_softcapping": 2.0},
            "attn_logit_softcapping is 2.0; allowed for gemma3",
        ),
        ("gpt_neox", {"rope_theta": 300.0}, "setting 'rope_theta' = '300.0' is not understood for gpt_neox"),
        ("glm", {"partial_rotary_factor": None}, "partial_rotary_factor is null; leave it out for 0.5"),
        ("olmo3", {"rope_parameters": {"rope_theta": 300.0}}, "rope_parameters must hold an object each for full_att"),
        ("olmo3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling says its type as 'type'; write"),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear' is not supported for phi3; supported",
        ),
        ("llama", {"rope_scaling": {"type": "proportional"}}, "rope type 'proportional' is not supported for llama"),
        ("llama", {"rms_norm_eps": 10**400}, "must be a positive number"),
        ("llama", {"rms_norm_eps": 10.0}, "rms_norm_eps is 10.0, allowed: above 0, up to 1"),
        (
            "granite",
            {"embedding_multiplier": 1e5},
            "embedding_multiplier is 100000.0, which makes a constant above",
        ),
        ("granite", {"logits_scaling": 1e-6}, "logits_scaling is 1e-06, which makes a constant above 65504"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": 10.0, "gamma": 1}},
            "rope setting 'gamma' is not understood beside alpha",
        ),
        (
            "hunyuan_v1_dense",
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 10.0}},
            "rope setting 'alpha' is 10 with head_dim 2; allowed: up to 65504, with heads larger than 2",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": 1e300}},
            "rope setting 'alpha' is 1e+300 with head_dim",
        ),
    ],
)
def test_what_transformers_class_reads_otherwise_is_refused(family: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_config({**bare(family), **settings}, "c")


def test_hunyuan_stretches_its_base_by_alpha_as_its_class_does() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    config = read_config(bare("hunyuan_v1_dense", head_dim=8, rope_theta=10000.0, rope_scaling=scaling), "c")
    assert config.ropes[0].type == "default"
    assert config.ropes[0].theta == 10000.0 * 1000.0 ** (8 / 6)


@pytest.mark.parametrize("key", ["full_attn_mod", "interpolate_factor"])
def test_settings_that_no_class_reads_are_passed_over_in_their_family_alone(key: str) -> None:
    assert read_config({**bare("phi3"), key: 1}, "c") == read_config(bare("phi3"), "c")
    with pytest.raises(CheckpointError, match=f"setting '{key}' = '1' is not understood for llama"):
        read_config({**bare("llama"), key: 1}, "c")


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 24}
LLAMA_4 = {**YARN, "llama_4_scaling_beta": 0.1}


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("llama", {"rope_parameters": {**YARN, "truncate": None}}, "'truncate' is None, must be true or false"),
        ("olmo3", {"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling: 'truncate' is not true, which tra"),
        (
            "llama",
            {"rope_parameters": {**YARN, "attention_factor": 1e5}},
            "scale cos and sin by 100000; allowed: up to 65504",
        ),
        ("ministral3", {"rope_parameters": {**LLAMA_4, "llama_4_scaling_beta": 1e5}}, "makes a scale above 65504"),
        ("ministral3", {"rope_parameters": YARN}, "rope setting 'llama_4_scaling_beta' is missing"),
        (
            "smollm3",
            {"sliding_window": None, "layer_types": ["full_attention"] * 8 + ["sliding_attention"]},
            "layer_types has sliding_attention, but sliding_window is null",
        ),
    ],
)
def test_what_transformers_class_cannot_run_is_refused(family: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_config({**bare(family), **settings}, "c")
