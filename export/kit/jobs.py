"""What every build script of a hand-off shares: a graph as a job, the command line, the lines of the answer.

Lies beside build.py and knows no tool. Needs Python 3.8 and NumPy.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable  # noqa: UP035 (Python 3.8)

import numpy as np


class Job:
    """One graph of the folder. Arrays go by the names of handoff.json."""

    def __init__(self, folder: Path, build: Path, handoff: dict[str, Any], graph: dict[str, Any], options: Any) -> None:
        self.folder, self.build, self.handoff, self.graph, self.options = folder, build, handoff, graph, options
        self.name: str = graph["name"]
        self.model = folder / graph["file"]
        self.outputs: list[str] = [value["name"] for value in graph["outputs"]]
        self.golden: list[str] = handoff["golden"].get(self.name, [])
        self.not_on_npu: dict[str, int] | None = None  # op -> count; None: the tool does not tell
        self.compile_seconds: float | None = None  # of a simulation that compiles too

    def file(self, suffix: str) -> Path:
        """A file of the build folder that is named after the graph."""
        return self.build / (self.name + suffix)

    def inputs(self, sample: str) -> dict[str, Any]:
        """The arrays of a golden run, in the graph's order."""
        names = [value["name"] for value in self.graph["inputs"]]
        return {name: np.load(self.folder / sample / "inputs" / f"{name}.npy") for name in names}

    def save(self, sample: str, arrays: dict[str, Any]) -> None:
        """Write what the tool gave for a golden run: float32, in the shapes of handoff.json."""
        target = self.build / "outputs" / self.name / Path(sample).name
        target.mkdir(parents=True, exist_ok=True)
        for value in self.graph["outputs"]:
            made = np.asarray(arrays[value["name"]], np.float32)
            if made.size != np.prod(value["shape"]):
                raise ValueError(f"{self.name}: {value['name']} has shape {made.shape}, not {value['shape']}")
            np.save(target / f"{value['name']}.npy", made.reshape(value["shape"]))


def peak_rss_mb() -> int | None:
    """The most memory of this process or of one that it started; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    status = Path("/proc/self/status")  # ru_maxrss of a new process begins with that of the one that started it
    own = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.is_file() else None
    most = max(most, int(own[1]) << 10 if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return int(most >> 20)


def main(
    description: str | None,
    flags: dict[str, dict[str, Any]],
    compile_graph: Callable[[Job], None],
    simulate_graph: Callable[[Job], None],
) -> int:
    """What build.py does with its tool's two functions.

    flags: more for the command line, with their settings for argparse. What the tool prints goes to stderr; stdout has
    one line of JSON for each graph.
    """
    own = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(
        prog="build.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graphs", metavar="GRAPH", nargs="*", help="graphs to take (default: all of handoff.json)")
    parser.add_argument("--simulate", action="store_true", help="run the golden inputs through the tool's simulator")
    parser.add_argument("--folder", metavar="FOLDER", type=Path, default=own, help="the hand-off (default: this one)")
    parser.add_argument("--build", metavar="BUILD", type=Path, help="folder to write (default FOLDER/build)")
    for flag, settings in flags.items():
        parser.add_argument(flag, **settings)
    options = parser.parse_args()
    folder = options.folder.resolve()
    handoff = json.loads((folder / "handoff.json").read_text(encoding="utf-8"))
    graphs = {graph["name"]: graph for graph in handoff["graphs"]}
    unknown = [name for name in options.graphs if name not in graphs]
    if unknown:
        parser.error(f"no graph {unknown[0]!r} in handoff.json; allowed: {', '.join(graphs)}")
    build = (options.build or folder / "build").resolve()
    build.mkdir(parents=True, exist_ok=True)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # also what a tool's own code prints
    lines = []
    before = os.getcwd()
    for name in options.graphs or graphs:
        with tempfile.TemporaryDirectory(dir=build) as scratch:  # tools leave files where they are started
            os.chdir(scratch)
            started = time.perf_counter()
            job = Job(folder, build, handoff, graphs[name], options)
            (simulate_graph if options.simulate else compile_graph)(job)
            line = {"graph": name, "seconds": round(time.perf_counter() - started, 2), "peak_rss_mb": peak_rss_mb()}
            line["not_on_npu"] = job.not_on_npu
            if job.compile_seconds is not None:
                line["compile_seconds"] = round(job.compile_seconds, 2)
            lines.append(json.dumps(line))
            os.chdir(before)
    print("\n".join(lines), file=answers, flush=True)
    return 0
