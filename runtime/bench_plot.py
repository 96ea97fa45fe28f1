"""The report of `rollkv bench` as a picture, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollkv.runtime.align import PromptError

if TYPE_CHECKING:
    from rollkv.runtime.bench import BenchReport

FORMATS = (".png", ".svg")


def check_plot(path: str) -> None:
    """Raise what would keep a picture from being drawn, before anything is measured.

    PromptError: a name with another ending, or in a folder that is not there. ModuleNotFoundError: no matplotlib.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise PromptError(f"--plot {path}: the name must end in {' or '.join(FORMATS)}")
    if not Path(path).absolute().parent.is_dir():
        raise PromptError(f"--plot {path}: no such folder")
    if Path(path).is_dir():
        raise PromptError(f"--plot {path}: is a folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


def draw(report: BenchReport, path: str) -> None:
    """Time to the first token and of a decode step over the prompt's tokens; bars reach to the ninth tenth.

    Raises OSError when the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    first, step = figure.subplots(1, 2)
    ns = [p.n for p in report.prompts]
    _line(first, ns, [(p.first_token.p50, p.first_token.p90) for p in report.prompts], "rollkv")
    _line(step, ns, [(p.decode.p50, p.decode.p90) for p in report.prompts], "rollkv")
    step.plot(
        ns,
        [1e3 * p.concatenating for p in report.prompts],
        "s--",
        color="C1",
        label="caches concatenated at every step",
    )
    theirs = [p.transformers for p in report.prompts]
    for axes, part in ((first, 0), (step, 1)):
        if all(times is not None for times in theirs):
            axes.plot(
                ns, [1e3 * times[part] for times in theirs if times is not None], "^:", color="C2", label="transformers"
            )
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel("ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    first.set_title("time to the first token")
    step.set_title("a decode step after it")
    memory = f"peak {report.peak_rss / 1e6:.0f} MB, weights {report.weights / 1e6:.0f} MB"
    figure.suptitle(f"{Path(report.bundle).name}: {report.threads} threads, memory {report.memory}, {memory}")
    figure.savefig(path, dpi=150)


def _line(axes: Any, ns: list[int], times: list[tuple[float, float]], label: str) -> None:
    median = [1e3 * p50 for p50, _ in times]
    above = [1e3 * (p90 - p50) for p50, p90 in times]
    axes.errorbar(ns, median, yerr=[[0.0] * len(ns), above], fmt="o-", capsize=3, color="C0", label=label)
