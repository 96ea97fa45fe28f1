"""Tiny models of every GGUF architecture, written as llama.cpp's converter writes them, against their originals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHAPES, export, make_checkpoint
from family_shapes import make_family
from safetensors.torch import load_file, save_file
from tiny_gguf import BYTE_LEVEL, converted_metadata, converted_tensors, write_gguf

from rollkv.export.reference import Reference
from rollkv.models.checkpoint import Checkpoint, open_checkpoint
from rollkv.runtime import Bundle, Session

# shape -> changes. A file does not hold the scale of gemma's queries: it is that of the head's size.
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-linear": {},
    "llama-bias": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "gemma3-linear": {"query_pre_attn_scalar": 8},
    "phi3": {"partial_rotary_factor": 0.75},
    "phi3-longrope": {"sliding_window": 9},
}
EXTRA: dict[str, dict[str, object]] = {
    "gemma3": {"gemma3.attention.sliding_window_pattern": 3},
    "gemma3-linear": {"gemma3.attention.sliding_window_pattern": [True, False, True]},
}
TOKENIZER = {**BYTE_LEVEL, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.padding_token_id": 0}
PROMPTS = [list(range(3, 4 + n)) for n in (0, 7, 21, 39)]


def architecture_of(case: str) -> str:
    return case.partition("-")[0]


def in_bfloat16(folder: Path) -> Path:
    """The models' own type; float16 holds nearly every value of it as well."""
    file = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in made:
            make = make_checkpoint if case in SHAPES else make_family
            made[case] = in_bfloat16(make(tmp_path_factory.mktemp("original") / case, case, **CASES[case]))
        return made[case]

    return get


@pytest.fixture(scope="module")
def original_bundle(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    made: dict[str, Bundle] = {}

    def get(case: str) -> Bundle:
        if case not in made:
            made[case] = export(original(case), tmp_path_factory.mktemp("bundle") / case)
        return made[case]

    return get


def as_gguf(folder: Path, path: Path, case: str, kind: str) -> Path:
    architecture = architecture_of(case)
    values = {**converted_metadata(folder, architecture), **EXTRA.get(case, {}), **TOKENIZER}
    return write_gguf(path, values, converted_tensors(folder, architecture), architecture=architecture, kind=kind)


def values(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Every parameter of the decoder."""
    found = {}
    for weight in checkpoint.weights:
        found[weight.name] = np.empty(weight.shape, np.float32)
        weight.copy_to(found[weight.name])
    return found


def without_tokens(checkpoint: Checkpoint) -> Any:
    """The config without ids, and without what a file has as float32 and the original does not."""
    ropes = tuple(replace(rope, attention_scaling=0.0) for rope in checkpoint.config.ropes)
    return replace(checkpoint.config, bos_token_id=None, eos_token_ids=(), ropes=ropes)


@pytest.mark.parametrize("case", CASES)
def test_a_file_in_float32_holds_the_config_and_every_bit_of_the_original(case: str, original: Any, tmp_path: Path):
    there = open_checkpoint(str(original(case)))
    here = open_checkpoint(str(as_gguf(original(case), tmp_path / "m.gguf", case, "F32")))
    assert here.image_attention == ("bidirectional" if "gemma3" in case else "causal")
    assert without_tokens(here) == without_tokens(there)
    for ours, theirs in zip(here.config.ropes, there.config.ropes, strict=True):
        assert ours.attention_scaling == pytest.approx(theirs.attention_scaling, rel=1e-7)  # float32 in the file
    got, wanted = values(here), values(there)
    assert got.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)


@pytest.mark.parametrize(("kind", "bound"), [("F32", 1e-5), ("F16", 1e-3)])
@pytest.mark.parametrize("case", ["qwen2", "qwen3", "gemma2", "gemma3", "phi3-longrope"])  # llama: test_gguf_export.py
def test_a_bundle_gives_the_logits_of_the_originals_bundle(
    case: str, kind: str, bound: float, original: Any, original_bundle: Any, tmp_path: Path
) -> None:
    made = export(as_gguf(original(case), tmp_path / "m.gguf", case, kind), tmp_path / "bundle")
    here, there = Session(made), Session(original_bundle(case))
    for ids in PROMPTS:
        here.reset()
        there.reset()
        got, wanted = here.prefill(ids), there.prefill(ids)
        assert np.abs(got - wanted).max() <= bound * np.abs(wanted).max()


@pytest.mark.parametrize("case", CASES)
def test_the_reference_of_a_file_is_that_of_its_original(case: str, original: Any, tmp_path: Path) -> None:
    path = as_gguf(original(case), tmp_path / "m.gguf", case, "F32")
    here, there = (Reference(open_checkpoint(str(source)), 48) for source in (path, original(case)))
    got, wanted = here.greedy(PROMPTS[-1], 0)[0].logits[0], there.greedy(PROMPTS[-1], 0)[0].logits[0]
    assert np.abs(got - wanted).max() <= 1e-6 * np.abs(wanted).max()
