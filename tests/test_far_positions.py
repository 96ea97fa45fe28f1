"""Tokens as far apart as a model allows: each rope type against transformers, and without its scaling."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gemma4_models
import numpy as np
import pytest
import vision_models
from conftest import export
from family_shapes import make_family

from rollkv.export.reference import Reference
from rollkv.models.checkpoint import open_checkpoint
from rollkv.models.config import ROPE_TYPES
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
Raw = dict[str, Any]  # a config.json


@dataclass(frozen=True)
class Case:
    """A model whose positions are far apart, and the one thing that its control lacks."""

    save: Callable[[Path], Path]
    without: Callable[[Raw], None]


def family(shape: str, **settings: Any) -> Callable[[Path], Path]:
    return partial(make_family, name=shape, **{**FAR, **settings})


def scaled(shape: str, scaling: Raw, **settings: Any) -> Case:
    """Scaling in a shape with one rotation; the control is of type default with the same base."""

    def without(raw: Raw) -> None:
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": scaling["rope_theta"]}

    return Case(family(shape, rope_parameters=scaling, **settings), without)


def inside(*path: str, **values: Any) -> Callable[[Raw], None]:
    """A change of the object at a path."""

    def change(raw: Raw) -> None:
        for key in path:
            raw = raw[key]
        raw.update(values)

    return change


CASES = {
    # nothing to leave out: another base
    "default": Case(
        family("llama-yarn", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        inside("rope_parameters", rope_theta=20000.0),
    ),
    "linear": scaled("llama-yarn", LINEAR),
    "llama3": scaled("llama-yarn", LLAMA3),
    "yarn": scaled("llama-yarn", YARN),
    # C = 48 is more than 30, so the base grows; the model reaches 30 x 4096 positions
    "dynamic": Case(
        family(
            "llama-yarn",
            max_position_embeddings=30,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4096.0},
        ),
        lambda raw: raw.update(
            max_position_embeddings=131_072, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
        ),
    ),
    "longrope": scaled("phi3-longrope", LONG, original_max_position_embeddings=40),
    "global layers only": Case(
        family("gemma3-linear", rope_parameters=GLOBAL_LINEAR),
        inside("rope_parameters", "full_attention", rope_type="default", factor=None),
    ),
    "two bases": Case(
        family("gemma3-linear", rope_parameters=GLOBAL_LINEAR),
        inside("rope_parameters", "sliding_attention", rope_theta=1000000.0),
    ),
    "interleaved, partial": Case(family("glm"), inside("rope_parameters", partial_rotary_factor=0.25)),
    "query scale": Case(
        family(
            "ministral3", rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        ),
        inside("rope_parameters", llama_4_scaling_beta=0),
    ),
    "proportional": Case(
        lambda folder: gemma4_models.save(folder, **{**gemma4_models.EXPORTED["keys"], **FAR}),
        inside("rope_parameters", "full_attention", rope_type="default", partial_rotary_factor=None),
    ),
    "three-part": Case(
        lambda folder: vision_models.save(
            folder, "qwen2_vl", text_config={**vision_models.MODELS["qwen2_vl"]["text_config"], **FAR}
        ),
        inside("text_config", "rope_parameters", mrope_section=[2, 1, 1]),
    ),
}
OF_TYPE = {"proportional": "proportional", "two bases": "linear"} | {name: name for name in ROPE_TYPES if name in CASES}


def test_every_rope_type_has_a_case() -> None:
    assert set(ROPE_TYPES) == set(OF_TYPE.values())


def first_run(bundle: Bundle, ids: list[int]) -> tuple[Any, Any]:
    """Logits (8, V) of one run of the prefill graph whose rows stand at POSITIONS, each seeing those before it.

    Also the positions as fed; three-part ones in three different orders.
    """
    m = bundle.manifest
    graph = next(graph for graph in m.graphs if graph.role == "prefill")
    feeds: dict[str, Any] = {}
    for value in graph.inputs:
        if value.role == "ids":
            feeds[value.name] = np.array([ids], value.dtype)
        elif value.role == "position_ids":
            parts = [POSITIONS, POSITIONS[::-1], POSITIONS[3:] + POSITIONS[:3]]
            feeds[value.name] = np.array(parts[: value.shape[0]], value.dtype).reshape(value.shape)
        elif value.role.endswith("attention_mask"):
            window = next((layer.window for layer in m.layers if layer.window), None)
            window = window if value.role.startswith("sliding") else None
            feeds[value.name] = run_mask(0, 0, 8, value.shape[-1], m.mask_value, window=window)
        else:
            feeds[value.name] = np.zeros(value.shape, value.dtype)
    logits = np.array(OrtBackend(bundle).run(graph, feeds)["logits"][0])
    return logits, feeds["position_ids"]


@pytest.mark.parametrize("name", CASES)
def test_logits_of_far_positions_equal_transformers_and_need_the_scaling(name: str, tmp_path: Path) -> None:
    source = CASES[name].save(tmp_path / "source")
    bundle = export(source, tmp_path / "bundle", head="all")
    ids = np.random.default_rng(7).integers(11, 211, 8).tolist()
    got, positions = first_run(bundle, ids)
    reference = Reference(open_checkpoint(str(source)), bundle.manifest.max_kvcache_len)
    wanted = np.stack(reference.rows(ids, positions))
    largest = np.abs(wanted).max()
    assert np.abs(got - wanted).max() < 1e-4 * largest

    file = tmp_path / "source" / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    CASES[name].without(raw)
    file.write_text(json.dumps(raw), encoding="utf-8")
    without, _ = first_run(export(source, tmp_path / "without", head="all"), ids)
    assert np.abs(without - wanted).max() > 1e-2 * largest
