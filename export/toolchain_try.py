"""Trying a toolchain on a handed-off folder: compile, simulate, compare with the golden vectors.

Runs the folder's own build script in the toolchain's environment, one graph at a time, and compares as the folder's
replay.py does. Knows handoff.json, the script's lines of JSON, and no tool.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollkv.export.kit.replay import difference, in_order, real_rows
from rollkv.export.toolchains import Toolchain, ToolchainChoiceError, ToolchainError
from rollkv.runtime.backend import Array

FORMAT = 1
DIVERGES = 0.9999  # cosine below which an output is named as the first to look at
LAST_LINES = 20
KIT = Path(__file__).parent / "kit"


class ToolFailure(ToolchainError):
    """A tool that ended badly; `lines` is the end of what it said."""

    def __init__(self, message: str, lines: Sequence[str]) -> None:
        super().__init__(message)
        self.lines = tuple(lines)


@dataclass(frozen=True, kw_only=True)
class OutputError:
    """The worst of one output over the golden runs: least cosine, largest absolute error, in which run the first."""

    name: str
    cosine: float
    max_abs: float
    run: str


@dataclass(frozen=True, kw_only=True)
class GraphTrial:
    """One graph. Seconds and MB are of the tool's process, with its start; runs: golden runs that were compared.

    not_on_npu: op -> count; None where the tool does not tell.
    """

    graph: str
    compile_seconds: float
    simulate_seconds: float
    peak_rss_mb: int | None
    not_on_npu: Mapping[str, int] | None
    runs: int
    outputs: tuple[OutputError, ...]

    @property
    def worst(self) -> OutputError:
        """The output of the least cosine."""
        return min(self.outputs, key=lambda error: error.cosine)

    @property
    def first_diverging(self) -> str | None:
        """The first output, layer by layer, whose cosine is under DIVERGES."""
        return next((error.name for error in self.outputs if not error.cosine >= DIVERGES), None)


def read_handoff(folder: Path) -> dict[str, Any]:
    """handoff.json. Raises ToolchainChoiceError for a folder that is no hand-off, or one of a newer format."""
    file = folder / "handoff.json"
    if not file.is_file():
        raise ToolchainChoiceError(
            f"{folder}: is no hand-off, there is no handoff.json in it; rollkv handoff writes one"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        known = data["format"] <= FORMAT
        missing = [key for key in ("graphs", "golden", "golden_runs", "kv_layout", "mask_value") if key not in data]
        for graph in data.get("graphs", []):
            missing += [f"graphs[].{key}" for key in ("name", "file", "rows", "inputs", "outputs") if key not in graph]
    except (ValueError, TypeError, KeyError) as error:
        raise ToolchainChoiceError(f"{file}: is not what rollkv handoff writes: {error!r}") from None
    if not known:
        raise ToolchainChoiceError(f"{file}: format {data['format']}, this version reads up to {FORMAT}")
    if missing:
        raise ToolchainChoiceError(f"{file}: {missing[0]} is missing")
    return dict(data)


def chosen_graphs(handoff: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The graphs that have golden runs, or those of them that are named. Raises ToolchainChoiceError for another."""
    graphs = {graph["name"]: graph for graph in handoff["graphs"] if handoff["golden"].get(graph["name"])}
    if not graphs:
        raise ToolchainChoiceError("handoff.json: no graph has golden runs")
    for name in names:
        if name not in graphs:
            raise ToolchainChoiceError(f"--graph {name}: allowed: {', '.join(graphs)}")
    return [graphs[name] for name in names or graphs]


def build_script(folder: Path, handoff: Mapping[str, Any], toolchain: Toolchain) -> Path:
    """The folder's own, or the kit's where the folder was written for another tool or for none.

    Raises ToolchainChoiceError when the folder's is missing.
    """
    if str(handoff.get("tool")).partition("==")[0] != toolchain.requirement.partition("==")[0]:
        return KIT / toolchain.script
    if not (folder / "build.py").is_file():
        raise ToolchainChoiceError(f"{folder}: build.py is missing; write the hand-off anew")
    return folder / "build.py"


def try_graph(
    folder: Path,
    handoff: Mapping[str, Any],
    graph: dict[str, Any],
    toolchain: Toolchain,
    python: Path,
    build: Path,
    flags: Sequence[str],
    report: Callable[[str], None],
) -> GraphTrial:
    """Compile, simulate and compare one graph.

    flags: more for the build script. build: where it writes. Raises ToolFailure when the tool fails or leaves out an
    output, ToolchainChoiceError before it is called for a golden file that cannot be read.
    """
    name = graph["name"]
    golden = read_golden(folder, handoff, graph)
    script = build_script(folder, handoff, toolchain)
    base = [str(python), str(script), "--folder", str(folder), "--build", str(build), *flags, name]
    answers = []
    for simulate in (True,) if toolchain.compiles_to_simulate else (False, True):
        what = (
            "compiling and simulating" if toolchain.compiles_to_simulate else "simulating" if simulate else "compiling"
        )
        report(f"{what} {name}")
        answers.append(run_script([*base, *(["--simulate"] if simulate else [])], name, build, python))
    last = answers[-1]
    compiling = float(last["compile_seconds"] if toolchain.compiles_to_simulate else answers[0]["seconds"])
    peaks = [answer["peak_rss_mb"] for answer in answers if answer["peak_rss_mb"] is not None]
    return GraphTrial(
        graph=name,
        compile_seconds=compiling,
        simulate_seconds=round(float(last["seconds"]) - (compiling if toolchain.compiles_to_simulate else 0.0), 2),
        peak_rss_mb=max(peaks, default=None),
        not_on_npu=answers[0]["not_on_npu"],
        runs=len(handoff["golden"][name]),
        outputs=compare(golden, build, handoff, graph),
    )


def run_script(command: Sequence[str], graph: str, build: Path, python: Path) -> dict[str, Any]:
    """One call of a build script for one graph: its line of JSON. What the tool says is kept in BUILD/<graph>.log.

    Raises ToolFailure.
    """
    build.mkdir(parents=True, exist_ok=True)
    log = build / f"{graph}.log"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    environment |= {
        "PATH": os.pathsep.join([str(python.parent), environment.get("PATH", "")]),
        "PYTHONNOUSERSITE": "1",
        "PYTHONIOENCODING": "utf-8",
        "ORT_DISABLE_TELEMETRY": "1",
    }
    with log.open("w", encoding="utf-8") as errors:
        done = subprocess.run(
            [*command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment, check=False
        )
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if done.returncode:
        if any("No space left" in line for line in said[-LAST_LINES:]):
            raise OSError(28, "No space left on device", str(build))
        how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        raise ToolFailure(
            f"graph {graph}: the tool failed with {how}; all that it said is in {log}", said[-LAST_LINES:]
        )
    for line in reversed(done.stdout.decode("utf-8", "replace").splitlines()):
        answer = read_answer(line)
        if answer is not None and answer["graph"] == graph:
            return answer
    raise ToolFailure(f"graph {graph}: the build script gave no line of JSON for it; see {log}", said[-LAST_LINES:])


def read_answer(line: str) -> dict[str, Any] | None:
    """A line of a build script as data; None for one that is something else."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    keys = {"graph", "seconds", "peak_rss_mb", "not_on_npu"}
    return answer if isinstance(answer, dict) and keys <= set(answer) else None


def read_golden(folder: Path, handoff: Mapping[str, Any], graph: Mapping[str, Any]) -> dict[tuple[str, str], Array]:
    """(path of the run, output) -> what is expected. Reads the inputs too, for a tool may take an hour to miss one.

    Raises ToolchainChoiceError for a file that is missing or damaged.
    """
    found = {}
    for run in handoff["golden_runs"][graph["name"]]:
        for part in ("inputs", "outputs"):
            for value in graph[part]:
                file = folder / run["path"] / part / f"{value['name']}.npy"
                try:
                    array = np.asarray(np.load(file, allow_pickle=False))
                except (OSError, ValueError, EOFError) as error:
                    raise ToolchainChoiceError(f"{file}: cannot be read: {error}; write the hand-off anew") from None
                if part == "outputs":
                    found[run["path"], value["name"]] = array
    return found


def compare(
    golden: Mapping[tuple[str, str], Array], build: Path, handoff: Mapping[str, Any], graph: dict[str, Any]
) -> tuple[OutputError, ...]:
    """What the tool computed against the golden outputs, as the folder's own replay.py compares and orders them.

    Raises ToolFailure for an output that was not written, cannot be read or has another shape.
    """
    name = graph["name"]
    errors = []
    for value in in_order(graph["outputs"]):
        found = []
        for run in handoff["golden_runs"][name]:
            sample = Path(run["path"]).name
            want = golden[run["path"], value["name"]]
            made = build / "outputs" / name / sample / f"{value['name']}.npy"
            if not made.is_file():
                raise ToolFailure(f"graph {name}: the tool gave no {value['name']} for {run['path']}", [])
            try:
                got = np.load(made, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise ToolFailure(f"graph {name}: {made}: cannot be read: {error}", []) from None
            if got.shape != want.shape:
                raise ToolFailure(f"graph {name}: {value['name']} has shape {got.shape}, golden is {want.shape}", [])
            want, got = (real_rows(array, graph, run, value, dict(handoff)) for array in (want, got))
            found.append((*difference(want, got)[:2], sample))
        cosine, _, worst = min(found, key=lambda item: item[0])
        errors.append(OutputError(name=value["name"], cosine=cosine, max_abs=max(item[1] for item in found), run=worst))
    return tuple(errors)
