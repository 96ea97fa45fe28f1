"""Tokens as far apart as a model allows: each rope type against transformers, and without its scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import export
from family_shapes import make_family

from rollkv.export.reference import Reference
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle
from rollkv.runtime.mask import run_mask

POSITIONS = (0, 1, 5, 1000, 5000, 32_767, 65_000, 99_999)  # of the 8 rows of one run
FAR = {"max_position_embeddings": 131_072}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.5, 8.0],
}
GLOBAL_LINEAR = {
    "full_attention": {**LINEAR, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama-yarn", {**FAR, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "linear": ("llama-yarn", {**FAR, "rope_parameters": LINEAR}),
    "llama3": ("llama-yarn", {**FAR, "rope_parameters": LLAMA3}),
    "yarn": ("llama-yarn", {**FAR, "rope_parameters": YARN}),
    # C = 48 is more than 30, so the base grows; the model reaches 30 x 4096 positions
    "dynamic": (
        "llama-yarn",
        {
            "max_position_embeddings": 30,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4096.0},
        },
    ),
    "longrope": ("phi3-longrope", {**FAR, "original_max_position_embeddings": 40, "rope_parameters": LONG}),
    "two-bases": ("gemma3-linear", {**FAR, "rope_parameters": GLOBAL_LINEAR}),
    "interleaved-partial": ("glm", FAR),
    "query-scale": (
        "ministral3",
        {**FAR, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
}


def first_run(bundle: Bundle, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits (8, V) of one run of the prefill graph whose rows stand at POSITIONS, each seeing those before it."""
    m = bundle.manifest
    graph = next(graph for graph in m.graphs if graph.role == "prefill")
    feeds = {}
    for value in graph.inputs:
        if value.role == "ids":
            feeds[value.name] = np.array([ids], value.dtype)
        elif value.role == "position_ids":
            feeds[value.name] = np.array([POSITIONS], value.dtype)
        elif value.role.endswith("attention_mask"):
            feeds[value.name] = run_mask(0, 0, 8, value.shape[-1], m.mask_value)
        else:
            feeds[value.name] = np.zeros(value.shape, value.dtype)
    return np.array(OrtBackend(bundle).run(graph, feeds)["logits"][0])


@pytest.mark.parametrize("case", CASES)
def test_logits_of_far_positions_equal_transformers_and_need_the_scaling(case: str, tmp_path: Path) -> None:
    shape, settings = CASES[case]
    source = make_family(tmp_path / "source", shape, **settings)
    bundle = export(source, tmp_path / "bundle", head="all")
    ids = np.random.default_rng(7).integers(0, 211, 8).tolist()
    reference = Reference(open_checkpoint(str(source)), bundle.manifest.max_kvcache_len)
    wanted = np.stack(reference.rows(ids, POSITIONS))
    got = first_run(bundle, ids)
    largest = np.abs(wanted).max()
    assert np.abs(got - wanted).max() < 1e-4 * largest

    plain = tmp_path / "source" / "config.json"
    raw = json.loads(plain.read_text(encoding="utf-8"))
    theta = {"rope_type": "default", "rope_theta": 10000.0}
    if case == "default":
        theta["rope_theta"] = 20000.0  # nothing to leave out: another base
    elif case == "two-bases":
        theta = {"full_attention": {**theta, "rope_theta": 1000000.0}, "sliding_attention": theta}
    elif case == "interleaved-partial":
        theta["partial_rotary_factor"] = 0.25
    raw["rope_parameters"] = theta
    if case == "dynamic":
        raw["max_position_embeddings"] = 131_072
    plain.write_text(json.dumps(raw), encoding="utf-8")
    without = first_run(export(source, tmp_path / "without", head="all"), ids)
    assert np.abs(without - wanted).max() > 1e-2 * largest
