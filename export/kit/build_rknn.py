"""Compile the graphs of this folder with rknn-toolkit2, and run the golden inputs through its simulator.

    python build.py [GRAPH ...]               BUILD/<graph>.rknn
    python build.py --simulate [GRAPH ...]    the same, and BUILD/outputs/<graph>/<k>/<name>.npy

The simulator runs only what the same process compiled, so --simulate compiles too. Numbers are float16; --quantize
takes the calibration samples. The tool's placement table, among what it prints, tells which ops run on the board's
CPU. Needs rknn-toolkit2 and NumPy.
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
from typing import Any

import numpy as np

FLAGS: dict[str, dict[str, Any]] = {
    "--quantize": {"choices": ("w8a8", "w8a16", "w4a16"), "help": "quantise (w4a16: rk3576 only; default: float16)"},
    "--chip": {"help": "chip (default: the target of handoff.json, rk3588 where that is none of Rockchip's)"},
}
EDGES = ("InputOperator", "OutputOperator")  # where data enter and leave; they are always the CPU's


def compile_graph(job: Job) -> None:
    """Write the .rknn."""
    compiled(job).release()


def simulate_graph(job: Job) -> None:
    """Golden runs of what was just compiled."""
    started = time.perf_counter()
    rknn = compiled(job)
    job.compile_seconds = time.perf_counter() - started
    check(rknn.init_runtime(), "init_runtime")
    for sample in job.golden:
        feeds = list(job.inputs(sample).values())
        # Without data_format an input of rank 4 is read as NHWC.
        results = rknn.inference(inputs=feeds, data_format=["nchw"] * len(feeds))
        if results is None:
            raise RuntimeError(f"rknn-toolkit2: the simulator gave nothing for {sample}")
        job.save(sample, dict(zip(job.outputs, results, strict=True)))
    rknn.release()


def compiled(job: Job) -> Any:
    """The compiled model, also written; job.not_on_npu from the table that the compiler prints."""
    from rknn.api import RKNN

    target = job.handoff.get("target") or ""
    settings: dict[str, Any] = {
        "target_platform": job.options.chip or (target if target.startswith("rk") else "rk3588")
    }
    if job.options.quantize:
        settings["quantized_dtype"] = job.options.quantize
    said = Path("said.txt")
    kept = os.dup(1), os.dup(2)
    try:
        with said.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        rknn = RKNN(verbose=True)
        check(rknn.config(float_dtype="float16", **settings), "config")
        check(rknn.load_onnx(model=str(job.model)), "load_onnx")
        dataset = calibration(job) if job.options.quantize else None
        check(rknn.build(do_quantization=dataset is not None, dataset=dataset), "build")
        check(rknn.export_rknn(str(job.file(".rknn"))), "export_rknn")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        text = said.read_text(encoding="utf-8", errors="replace")
        sys.stderr.write(text)
    job.not_on_npu = on_cpu(text)
    return rknn


def on_cpu(text: str) -> dict[str, int] | None:
    """Ops whose target in the placement table is the CPU, counted; None without a table.

    A row is `ID OpType DataType Target ...`, behind a time stamp.
    """
    rows = re.findall(r"^D RKNN: \[[\d:.]+\] +\d+ +(\S+) +[A-Z]+\d* +([A-Z]+) +[\\(]", text, re.M)
    counts: dict[str, int] = {}
    for op, where in rows:
        if where == "CPU" and op not in EDGES:
            counts[op] = counts.get(op, 0) + 1
    return counts if rows else None


def calibration(job: Job) -> str:
    """The list of samples with full paths, which the tool takes from any folder."""
    listed = job.folder / job.handoff["calibration"]["graphs"][job.name]["list"]
    lines = listed.read_text(encoding="utf-8").splitlines()
    Path("dataset.txt").write_text(
        "".join(" ".join(str(job.folder / path) for path in line.split()) + "\n" for line in lines), encoding="utf-8"
    )
    return "dataset.txt"


def check(code: Any, call: str) -> None:
    """The tool returns -1 where others raise."""
    if code != 0:
        raise RuntimeError(f"rknn-toolkit2: {call} failed with {code}; its reason is above")


# ---- From here on every build script is the same: what a job is, the command line, the lines of the answer. ----


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


def main() -> int:
    """Entry point. What the tool prints goes to stderr; stdout has one line of JSON for each graph."""
    own = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", metavar="GRAPH", nargs="*", help="graphs to take (default: all of handoff.json)")
    parser.add_argument("--simulate", action="store_true", help="run the golden inputs through the tool's simulator")
    parser.add_argument("--folder", metavar="FOLDER", type=Path, default=own, help="the hand-off (default: this one)")
    parser.add_argument("--build", metavar="BUILD", type=Path, help="folder to write (default FOLDER/build)")
    for flag, settings in FLAGS.items():
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
    with tempfile.TemporaryDirectory(dir=build) as scratch:  # tools leave files where they are started
        before = os.getcwd()
        os.chdir(scratch)
        for name in options.graphs or graphs:
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


if __name__ == "__main__":
    sys.exit(main())
