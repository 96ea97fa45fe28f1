"""The ladder holds for every form of the graph; test_proof_*.py climb it for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import export, make_checkpoint

from rollkv.export import reference, verify
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime.bundle import Bundle
from rollkv.runtime.session import Session


def climb(bundle: Bundle, checkpoint: Path) -> verify.Report:
    return verify.verify_bundle(bundle, open_checkpoint(str(checkpoint)), lambda line: None)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_layout": "bksd", "ids": "int64"},
        {"kv_layout": "bksd-kt", "head": "all"},
        {"opset": 13, "simplify": False, "mask_value": -255.0},
        {"input": "embeds", "ids": "int64"},
        {"chunk_size": 1},
        {"chunk_size": 48},
        {"max_lm_input_len": 48, "allow_no_room": True, "chunk_size": 5},
        {"max_lm_input_len": 1, "allow_no_room": True, "chunk_size": 1, "max_kvcache_len": 1},
    ],
    ids=["bksd-int64", "bksd-kt-all", "opset13-plain", "embeds", "c=1", "c=C", "C=L", "C=1"],
)
def test_every_rung_holds_for_each_form(
    settings: dict[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    made = export(checkpoint("qwen2-window"), tmp_path / "bundle", **settings)
    assert climb(made, checkpoint("qwen2-window")).fault is None


@pytest.mark.parametrize("mask_value", [-32768.0, -10000.0, -255.0])
def test_the_best_tokens_are_those_of_transformers_at_every_mask_value(
    mask_value: float, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    session = Session(export(checkpoint("llama"), tmp_path / "bundle", mask_value=mask_value))
    judge = reference.Reference(open_checkpoint(str(checkpoint("llama"))), 48)
    for n in (1, 7, 21, 40):
        ids = np.random.default_rng(n).integers(0, 307, n).tolist()
        wanted, tokens = judge.greedy(ids, 6)
        got = verify.follow_session(session, ids, tokens)
        assert [x.argmax() for x in got.logits] == [x.argmax() for x in wanted.logits]


def test_a_trace_depends_on_what_the_shared_traces_say_and_the_ladder_holds_on_a_fresh_one(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollkv.export import pipeline, signature, trace

    for module in (pipeline, verify):
        monkeypatch.setattr(module, "trace_graphs", trace.trace_graphs)
    made = export(checkpoint("mistral-window"), tmp_path / "bundle")
    assert climb(made, checkpoint("mistral-window")).fault is None
    config = open_checkpoint(str(checkpoint("mistral-window"))).config
    lengths = {"chunk_size": 8, "max_kvcache_len": 48}
    usual = signature.resolve(config, max_lm_input_len=40, **lengths)
    other = signature.resolve(config, max_lm_input_len=3, **lengths, opset=13, simplify=False)
    assert trace.trace_graphs(config, usual, (8, 1)) == trace.trace_graphs(config, other, (8, 1))


@pytest.mark.parametrize("lengths", [(8, 8, 12), (5, 1, 9)])
def test_a_window_of_one_token_holds(lengths: tuple[int, int, int], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "mistral-window", sliding_window=1)
    names = ("max_lm_input_len", "chunk_size", "max_kvcache_len")
    made = export(source, tmp_path / "bundle", **dict(zip(names, lengths, strict=True)))
    assert climb(made, source).fault is None
