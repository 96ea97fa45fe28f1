"""Trying a toolchain on a handed-off folder: compile, simulate, compare with the golden vectors.

Runs the folder's own build script in the toolchain's environment, one graph at a time, and compares here, with NumPy.
Knows handoff.json, the script's lines of JSON, and no tool. Rows of pads see nothing and mean nothing: what they give
is left out of every comparison.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollkv.export.toolchains import Toolchain, ToolchainChoiceError, ToolchainError
from rollkv.runtime.backend import Array
from rollkv.runtime.manifest import SLOT_AXES

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
        missing = [key for key in ("graphs", "golden", "kv_layout", "mask_value") if key not in data]
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
    graph: Mapping[str, Any],
    toolchain: Toolchain,
    python: Path,
    build: Path,
    flags: Sequence[str],
    report: Callable[[str], None],
) -> GraphTrial:
    """Compile, simulate and compare one graph.

    flags: more for the build script. build: where it writes. Raises ToolFailure when the tool fails or leaves out an
    output.
    """
    name = graph["name"]
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
        outputs=compare(folder, build, handoff, graph),
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


def compare(folder: Path, build: Path, handoff: Mapping[str, Any], graph: Mapping[str, Any]) -> tuple[OutputError, ...]:
    """What the tool computed against the golden outputs: layer by layer, keys before values, logits last.

    Raises ToolFailure for an output that was not written or has another shape, ToolchainChoiceError for a golden file
    that is missing.
    """
    name = graph["name"]
    real = {sample: _real_rows(folder / sample, handoff, graph) for sample in handoff["golden"][name]}
    errors = []
    for value in sorted(graph["outputs"], key=layer_order):
        found = []
        axis = _row_axis(value, handoff["kv_layout"], graph["rows"])
        for sample in handoff["golden"][name]:
            want = _golden(folder / sample / "outputs" / f"{value['name']}.npy")
            made = build / "outputs" / name / Path(sample).name / f"{value['name']}.npy"
            if not made.is_file():
                raise ToolFailure(f"graph {name}: the tool gave no {value['name']} for {sample}", [])
            got = np.load(made)
            if got.shape != want.shape:
                raise ToolFailure(f"graph {name}: {value['name']} has shape {got.shape}, golden is {want.shape}", [])
            if axis is not None:
                want, got = want.compress(real[sample], axis), got.compress(real[sample], axis)
            found.append((*difference(want, got), Path(sample).name))
        cosine, _, run = min(found, key=lambda item: item[0])
        errors.append(OutputError(name=value["name"], cosine=cosine, max_abs=max(item[1] for item in found), run=run))
    return tuple(errors)


def difference(want: Array, got: Array) -> tuple[float, float]:
    """Cosine and largest absolute error, in float64; -1 and infinity for what is not finite."""
    if not np.isfinite(got).all():
        return -1.0, float("inf")
    a, b = want.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    sizes = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a @ b) / sizes if sizes else float(not a.any() and not b.any())
    return min(cosine, 1.0), float(np.abs(a - b).max(initial=0.0))


def layer_order(value: Mapping[str, Any]) -> tuple[float, str]:
    """A sort key: keys and values by layer, then what comes out at the end."""
    number = re.search(r"_(\d+)$", value["name"])
    return (float(number[1]) if number and value["role"] in ("new_key", "new_value") else float("inf"), value["name"])


def _real_rows(sample: Path, handoff: Mapping[str, Any], graph: Mapping[str, Any]) -> Array:
    """(rows,): whether a row sees a slot in any mask. Rows of pads see none."""
    real = np.zeros(graph["rows"], bool)
    masks = [value["name"] for value in graph["inputs"] if value["role"].endswith("_mask")]
    for mask in masks:
        real |= (_golden(sample / "inputs" / f"{mask}.npy")[0, 0] > handoff["mask_value"] / 2).any(axis=-1)
    return real if masks else np.ones(graph["rows"], bool)


def _row_axis(value: Mapping[str, Any], kv_layout: str, rows: int) -> int | None:
    """The axis of an output that has an entry for each row of the run; None: it has none."""
    if value["role"] in ("new_key", "new_value"):
        return SLOT_AXES[kv_layout][value["role"] == "new_value"]
    return 1 if value["shape"][1] == rows and rows > 1 else None


def _golden(file: Path) -> Array:
    try:
        return np.asarray(np.load(file))
    except (OSError, ValueError, EOFError) as error:
        raise ToolchainChoiceError(f"{file}: cannot be read: {error}; write the hand-off anew") from None
