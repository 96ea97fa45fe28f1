"""`rollkv bench`: what is timed, that its parts add up, and what cannot be timed is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Run, user_error
from conftest import export, make_checkpoint

from rollkv.export.reference import Reference
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime import bench as module
from rollkv.runtime.align import PromptError
from rollkv.runtime.bench import Times, bench
from rollkv.runtime.bundle import Bundle, GraphInfo


def test_times_are_the_median_the_ninth_tenth_and_the_hosts_part() -> None:
    samples = [(float(n), n - 0.5) for n in range(1, 11)]
    times = Times.of(samples)
    assert (times.p50, times.p90) == (5.5, 10.0)
    assert times.host_share == pytest.approx(float(np.median([0.5 / n for n in range(1, 11)])))


def test_every_prompt_is_timed_with_steps_after_it(text_bundle: Bundle) -> None:
    report = bench(str(text_bundle.path), prompts=[5, 30], steps=3, rounds=2, threads=1)
    assert [p.n for p in report.prompts] == [5, 30]
    for p in report.prompts:
        for times in (p.first_token, p.decode):
            assert 0 < times.p50 <= times.p90
            assert 0 < times.host_share < 1
        assert p.prefill_rate == p.n / p.first_token.p50
        assert p.concatenating > 0
    assert (report.threads, report.weights) == (1, text_bundle.manifest.weights.unique_bytes)
    assert report.peak_rss > report.weights
    assert report.load > 0
    assert len(report.lines()) == 4


def test_the_engines_time_is_that_of_its_runs(text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that takes no time leaves all of it to the host."""
    monkeypatch.setattr(module._TimedBinding, "run", lambda self: self._inner.run())
    report = bench(str(text_bundle.path), prompts=[5], steps=2, rounds=1, threads=1)
    assert report.prompts[0].decode.host_share == 1


def test_the_concatenating_driver_takes_the_same_steps(text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    take = np.take

    def spied(array: np.ndarray, *rest: object) -> np.ndarray:
        taken = take(array, *rest)  # type: ignore[call-overload]
        shapes.append((array.shape[1], taken.shape[1]))
        return np.asarray(taken)

    monkeypatch.setattr(module.np, "take", spied)
    bench(str(text_bundle.path), prompts=[5], steps=2, rounds=1, threads=1)
    C, caches = text_bundle.manifest.max_kvcache_len, len(text_bundle.manifest.kv_pairs)
    assert shapes == [(C + 1, C)] * caches * 2


def test_prompts_are_c_half_of_l_and_l_as_far_as_the_steps_fit(text_bundle: Bundle) -> None:
    report = bench(str(text_bundle.path), steps=2, rounds=1, threads=1)  # c = 8, L = 120, C = 160
    assert [p.n for p in report.prompts] == [8, 60, 120]
    report = bench(str(text_bundle.path), steps=45, rounds=1, threads=1)
    assert [p.n for p in report.prompts] == [8, 60, 115]


@pytest.mark.parametrize(("given", "most"), [([0], 120), ([8, 121], 120)])
def test_a_prompt_that_does_not_fit_is_refused(text_bundle: Bundle, given: list[int], most: int) -> None:
    with pytest.raises(PromptError, match=rf"a prompt of {given[-1]} tokens and 4 steps .* allowed: 1 \.\. {most}"):
        bench(str(text_bundle.path), prompts=given, steps=4)


def test_steps_that_leave_no_room_are_refused(text_bundle: Bundle) -> None:
    with pytest.raises(PromptError, match="160 steps leave no room for a prompt in C = 160; time fewer steps"):
        bench(str(text_bundle.path), steps=160)


def test_the_command_prints_a_table_or_json(run: Run, text_bundle: Bundle, tmp_path: Path) -> None:
    flags = ("--prompts", "5,9", "--steps", 2, "--rounds", 1, "--threads", 1)
    code, out, err = run("bench", text_bundle.path, *flags)
    assert (code, err, len(out.splitlines())) == (0, "", 4)
    code, out, _ = run("bench", text_bundle.path, *flags, "--json", "--memory", "low")
    report = json.loads(out)
    assert (code, report["memory"], [p["n"] for p in report["prompts"]]) == (0, "low", [5, 9])
    first = report["prompts"][0]
    assert first["decode_tokens_per_second"] == pytest.approx(1 / first["decode"]["p50"])
    assert "a prompt of 1000 tokens" in user_error(run("bench", text_bundle.path, "--prompts", 1000))
    assert "'x' is no size" in user_error(run("bench", text_bundle.path, "--prompts", "x"))
    user_error(run("bench", tmp_path))


def test_transformers_takes_turns_with_the_bundle_where_the_model_is_given(
    run: Run, text_bundle: Bundle, source: Path
) -> None:
    flags = ("--prompts", "5,9", "--steps", 2, "--rounds", 2, "--threads", 1, "--reference", source)
    code, out, _ = run("bench", text_bundle.path, *flags)
    lines = [line for line in out.splitlines() if line.startswith("transformers, n = ")]
    assert (code, [line.split(":")[0].split()[-1] for line in lines]) == (0, ["5", "9"])
    code, out, _ = run("bench", text_bundle.path, *flags, "--json")
    for prompt in json.loads(out)["prompts"]:
        assert len(prompt["transformers"]) == 2
        assert min(prompt["transformers"]) > 0


def test_what_is_timed_of_transformers_is_its_greedy_answer(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(open_checkpoint(str(source)), 160, attention="sdpa")
    fed, model = [], reference._model

    def spied(ids: torch.Tensor, **more: object) -> object:
        fed.append(ids[0].tolist())
        return model(ids, **more)

    monkeypatch.setattr(reference, "_model", spied)
    first, steps = reference.timed([5, 6, 7, 8], 3)
    assert first > 0
    assert len(steps) == 3
    monkeypatch.undo()
    assert fed == [[5, 6, 7, 8], *([token] for token in reference.greedy([5, 6, 7, 8], 3)[1])]


@pytest.mark.parametrize("name", ["times.png", "times.SVG"])
def test_a_plot_is_drawn_in_the_format_that_its_name_says(
    run: Run, text_bundle: Bundle, tmp_path: Path, name: str
) -> None:
    flags = ("--prompts", "5,9", "--steps", 2, "--rounds", 1, "--threads", 1, "--plot", tmp_path / name)
    code, out, err = run("bench", text_bundle.path, *flags)
    assert (code, err, len(out.splitlines())) == (0, "", 4)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(b"\x89PNG") if name.endswith("png") else b"a decode step after it" in data or b"<svg" in data


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_timed(
    run: Run, text_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "bench", lambda *_, **__: pytest.fail("timed"))
    (tmp_path / "folder.png").mkdir()
    for name, says in (("a.pdf", "must end in .png or .svg"), ("no/a.png", "no such folder"), ("folder.png", "folder")):
        assert says in user_error(run("bench", text_bundle.path, "--plot", tmp_path / name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = user_error(run("bench", text_bundle.path, "--plot", tmp_path / "a.png"))
    assert "needs matplotlib" in said
    assert "pip install 'rollkv[plot]'" in said


def test_another_model_is_no_reference_and_a_length_is_timed_once(
    run: Run, text_bundle: Bundle, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", num_hidden_layers=1)
    said = user_error(run("bench", text_bundle.path, "--reference", other))
    assert "is another model than the bundle's" in said
    assert [p.n for p in bench(str(text_bundle.path), prompts=[5, 9, 5], steps=1, rounds=1, threads=1).prompts] == [
        5,
        9,
    ]


def test_the_report_is_printed_before_the_plot_is_drawn_which_may_fail(
    run: Run, text_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "draw", lambda *_: print("drawn"))
    flags = ("--prompts", "5", "--steps", 1, "--rounds", 1, "--threads", 1, "--plot", tmp_path / "a.svg")
    code, out, err = run("bench", text_bundle.path, *flags)
    assert (code, err, out.splitlines()[3:]) == (0, "", ["drawn"])


def test_the_concatenating_driver_runs_the_graph_that_serves_the_steps(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = export(source, tmp_path / "b", max_lm_input_len=120, max_kvcache_len=160, context_buckets=(32, 64))
    ran: list[int] = []
    run = module.OrtBackend.run

    def spied(self: object, graph: GraphInfo, feeds: object) -> object:
        ran.append(graph.kv_len)
        return run(self, graph, feeds)  # type: ignore[arg-type]

    monkeypatch.setattr(module.OrtBackend, "run", spied)
    bench(str(made.path), prompts=[20, 50, 100], steps=3, rounds=1, threads=1)
    assert ran == [32] * 3 + [64] * 3 + [160] * 3
