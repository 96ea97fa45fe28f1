"""Graphs of smaller visible lengths: one weight file, one cache, taken while P + c <= C', and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run
from conftest import Recorder, export
from proof import MODELS
from test_signature import config
from test_verify import climb
from toy_model import close, some_ids, toy, whole_pass

from rollkv.export.reference import Reference
from rollkv.export.signature import ExportError, graph_inputs, resolve
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime import Session
from rollkv.runtime.align import LimitError
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle
from rollkv.runtime.cover import Run as PlannedRun

LAYOUTS = ("bskd", "bksd", "bksd-kt")
BUCKETS = {"chunk_size": (4, 8), "context_buckets": (12, 24)}  # L = 40, C = 48


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Bundle, Path]]:
    """made(name, layout): the bundle of a tiny model with the graphs of BUCKETS, and its checkpoint, made once."""
    cached: dict[Any, Any] = {}

    def get(name: str, layout: str) -> tuple[Bundle, Path]:
        if name not in cached:
            cached[name] = MODELS[name].save(tmp_path_factory.mktemp("source") / name)
        if (name, layout) not in cached:
            output = tmp_path_factory.mktemp("bundle") / f"{name}-{layout}"
            cached[name, layout] = export(cached[name], output, kv_layout=layout, **BUCKETS)
        return cached[name, layout], cached[name]

    return get


def lengths_of(recorder: Any) -> list[int]:
    """The visible length of each run's graph."""
    return [graph.kv_len for graph, _ in recorder.runs]


# What is written


def test_every_length_has_a_graph_for_each_size_on_the_one_weight_file(made: Callable[..., Any]) -> None:
    m = made("gemma3", "bskd")[0].manifest
    assert [(graph.file, graph.rows, graph.kv_len) for graph in m.graphs] == [
        (f"{name}_k{kv_len}.onnx", rows, kv_len)
        for name, rows in (("prefill_c4", 4), ("prefill_c8", 8), ("decode", 1))
        for kv_len in (48, 24, 12)
    ]
    assert m.kv_lens == [12, 24, 48]
    assert (m.max_kvcache_len, {layer.kv_len for layer in m.layers if layer.window}) == (48, {6 - 1 + 8})
    for graph in m.graphs:
        shapes = {value.name: value.shape for value in graph.inputs}
        sliding = min(graph.kv_len, 13)
        assert shapes["attention_mask"] == [1, 1, graph.rows, graph.kv_len]
        assert shapes["sliding_attention_mask"] == [1, 1, graph.rows, sliding]
        slots = {shapes[name][1] for name in shapes if name.startswith("past")}
        assert slots == {graph.kv_len, sliding}


def test_a_length_below_a_chunk_size_has_no_graph_of_it(tmp_path: Path) -> None:
    source = MODELS["llama"].save(tmp_path / "source")
    m = export(source, tmp_path / "b", chunk_size=8, context_buckets=(8, 5)).manifest
    assert [(g.file, g.rows, g.kv_len) for g in m.graphs] == [
        ("prefill_c8_k48.onnx", 8, 48),
        ("prefill_c8_k8.onnx", 8, 8),
        ("decode_k48.onnx", 1, 48),
        ("decode_k8.onnx", 1, 8),
        ("decode_k5.onnx", 1, 5),
    ]
    session = Session(tmp_path / "b", threads=1)
    plain = Session(export(source, tmp_path / "plain", chunk_size=8), threads=1)
    for n in (1, 4, 5, 7, 8, 9, 20):
        ids = list(range(3, 3 + n))
        session.reset()
        plain.reset()
        assert _off(plain.prefill(ids), session.prefill(ids)) < 1e-5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((1,), "--context-buckets names 1, allowed: 2 .. 47, less than -C"),
        ((24, 48), "--context-buckets names 48, allowed: 2 .. 47, less than -C"),
        ((24, 24), "--context-buckets names 24 twice; give each length once"),
    ],
)
def test_a_length_that_makes_no_graph_is_refused(given: tuple[int, ...], message: str) -> None:
    with pytest.raises(ExportError) as refused:
        resolve(config(), max_lm_input_len=40, chunk_size=8, max_kvcache_len=48, context_buckets=given)
    assert str(refused.value) == message


def test_lengths_may_be_given_in_any_order() -> None:
    options = resolve(config(), max_lm_input_len=40, max_kvcache_len=48, context_buckets=[30, 12])
    assert (options.context_buckets, options.kv_lens) == ((12, 30), (12, 30, 48))
    shapes = {value.name: value.shape for value in graph_inputs(config(), options, 4, 12)}
    assert (shapes["attention_mask"], shapes["past_key_0"][1]) == ([1, 1, 4, 12], 12)


# What is run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_takes_the_smallest_length_that_holds_what_is_behind_it_and_itself(layout: str) -> None:
    session, recorder = toy(c=4, C=24, layout=layout, buckets=(8, 12))
    ids = some_ids(24)
    close(session.prefill(ids[:11]), whole_pass(ids[:11])[-1])  # padded: P = 0, 3, 7
    close(session.decode(ids[11]), whole_pass(ids[:12])[-1])
    for token in ids[12:14]:
        logits = session.decode(token)
    close(logits, whole_pass(ids[:14])[-1])
    assert lengths_of(recorder) == [8, 8, 12, 12, 24, 24]
    session.rewind(3)  # in bskd every length is a view; else the cache stays as it is laid out
    close(session.prefill(ids[3:7]), whole_pass(ids[:7])[-1])
    assert lengths_of(recorder)[6:] == [8 if layout == "bskd" else 24]
    session.reset()
    close(session.prefill(ids[:4]), whole_pass(ids[:4])[-1])
    assert lengths_of(recorder)[-1] == 8


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", [{"on_limit": "roll"}, {"on_limit": "sinks", "sinks": 2}])
def test_runs_that_forget_see_all_slots(layout: str, policy: dict[str, Any]) -> None:
    session, recorder = toy(c=4, C=24, layout=layout, buckets=(8, 12))
    session.prefill(some_ids(40), **policy)
    assert lengths_of(recorder) == [8, 8, 12, 24, 24, 24, 24, 24, 24, 24]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_prefix_starts_at_the_length_that_holds_it(layout: str, tmp_path: Path) -> None:
    session, _ = toy(c=4, C=24, layout=layout, buckets=(8, 12))
    ids = some_ids(13)
    session.prefill(ids[:10])
    session.save(tmp_path / "p")
    other, recorder = toy(c=4, C=24, layout=layout, buckets=(8, 12))
    other.load_prefix(tmp_path / "p")
    for token in ids[10:]:
        logits = other.decode(token)
    close(logits, whole_pass(ids)[-1])
    assert lengths_of(recorder) == [12, 12, 24]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_laying_the_cache_out_anew_is_counted_and_bskd_never_does(layout: str) -> None:
    session, _ = toy(c=4, C=24, layout=layout, buckets=(8, 12))
    session.prefill(some_ids(8))
    before = session.sequence.cache.copied_bytes
    session.decode(1)
    assert (session.sequence.cache.copied_bytes > before) == (layout != "bskd")


@pytest.mark.parametrize(("name", "layout"), [("llama", "bksd"), ("gemma3", "bskd"), ("gemma3", "bksd-kt")])
def test_the_bundle_gives_transformers_logits_on_both_sides_of_every_length(
    made: Callable[..., Any], name: str, layout: str
) -> None:
    bundle, source = made(name, layout)
    reference, recorder = Reference(open_checkpoint(str(source)), 48), Recorder(OrtBackend(bundle, threads=1))
    session = Session(bundle, backend=recorder)
    ids = np.random.default_rng(5).integers(3, bundle.manifest.vocab_size, 40).tolist()
    rows = reference.rows(ids)
    for n in (1, 4, 5, 8, 11, 12, 13, 23, 24, 25, 36, 39):
        session.reset()
        assert _off(rows[n - 1], session.prefill(ids[:n])) < 1e-4
        if n < 40:
            assert _off(rows[n], session.decode(ids[n])) < 1e-4
    assert set(lengths_of(recorder)) == {12, 24, 48}


# What is proved


@pytest.mark.parametrize(("name", "layout"), [("mistral-window", "bskd"), ("llama", "bksd-kt")])
def test_verify_climbs_every_length(made: Callable[..., Any], name: str, layout: str) -> None:
    bundle, source = made(name, layout)
    report = climb(bundle, source)
    assert report.fault is None
    rungs = {row.rung for row in report.rows}
    for rung in ("torch", "traced", "graph"):
        assert {f"{rung} c={c}{k}" for c in (4, 8) for k in ("", " k=12", " k=24")} <= rungs


def test_the_command_line_takes_lengths_and_info_shows_them(run: Run, source: Path, tmp_path: Path) -> None:
    code, out, _ = run(
        "export", source, "-o", tmp_path / "b", "-L", 30, "-c", 8, "-C", 40, "--context-buckets", "16,24"
    )
    assert (code, "visible 16/24/40" in out) == (0, True)
    code, out, _ = run("info", tmp_path / "b")
    assert "prefill_c8_k16.onnx: prefill, 8 rows, 16 slots" in out
    code, out, err = run("export", source, "-o", tmp_path / "c", "-C", 40, "-L", 30, "--context-buckets", "40")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert not (tmp_path / "c").exists()


def _off(wanted: Any, got: Any) -> float:
    return float(np.abs(np.asarray(wanted) - np.asarray(got)).max() / np.abs(np.asarray(wanted)).max())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_feeds_for_a_graph_that_sees_too_little_are_refused(layout: str) -> None:
    session, _ = toy(c=4, C=24, layout=layout, buckets=(8, 12))
    session.prefill(some_ids(12))
    short = next(g for g in session.manifest.graphs if g.role == "decode" and g.kv_len == 8)
    with pytest.raises(LimitError, match=r"sees 8 slots, too few for 1 rows after 12 tokens; give one that sees C"):
        session.feeds(short, PlannedRun(1, 0), [5])
    assert session.feeds(session.loaded.decode, PlannedRun(1, 0), [5])["attention_mask"].shape[-1] == 24
