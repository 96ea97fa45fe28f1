"""Compile the graphs of this folder for Qualcomm's HTP with onnxruntime-qnn, and run the golden inputs.

    python build.py [GRAPH ...]               BUILD/<graph>.onnx and its context binary
    python build.py --simulate [GRAPH ...]    BUILD/outputs/<graph>/<k>/<name>.npy

On x86-64 the runs go through the HTP simulator of the package; on a Snapdragon through the NPU. No op may fall back to
the CPU (session.disable_cpu_ep_fallback): a graph that compiles is on the NPU as a whole. Numbers are float16.
Needs onnxruntime-qnn and NumPy.
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
    # Without soc_model the compiler fails with MEM_ALLOC 1002, which has nothing to do with memory.
    "--soc-model": {"type": int, "default": 57, "help": "QNN number of the chip: 43 is SM8550, 57 SM8650 (default), "
                    "69 SM8750, 60 SC8380XP"},
}  # fmt: skip


def compile_graph(job: Job) -> None:
    """Write the context binary. What is not on the NPU is looked up when the compiler refuses the whole graph."""
    try:
        open_session(job, job.model, compiling=True)
    except Exception:
        job.not_on_npu = elsewhere(job)
        print("ops that QNN does not take: {}".format(job.not_on_npu or "none; the compiler itself failed"))
        raise
    job.not_on_npu = {}


def simulate_graph(job: Job) -> None:
    """Golden runs of the context binary."""
    session = open_session(job, job.file(".onnx"), compiling=False)
    for sample in job.golden:
        job.save(sample, dict(zip(job.outputs, session.run(job.outputs, job.inputs(sample)), strict=True)))


def open_session(job: Job, model: Path, compiling: bool, fallback: bool = False) -> Any:
    """A session on the HTP backend."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # its Linux builds report each session to their maker
    import onnxruntime
    import onnxruntime_qnn

    name = onnxruntime_qnn.get_ep_name()
    if not any(device.ep_name == name for device in onnxruntime.get_ep_devices()):
        onnxruntime.register_execution_provider_library(name, onnxruntime_qnn.get_library_path())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    entries = {"session.disable_cpu_ep_fallback": "0" if fallback else "1"}
    if fallback:
        entries["session.record_ep_graph_assignment_info"] = "1"
    elif compiling:
        for old in (job.file(".onnx"), job.file("_qnn.bin")):
            if old.exists():
                old.unlink()
        entries["ep.context_enable"] = "1"
        entries["ep.context_embed_mode"] = "0"
        entries["ep.context_file_path"] = str(job.file(".onnx"))
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]
    npus = [device for device in devices if device.device.type == onnxruntime.OrtHardwareDeviceType.NPU]
    settings = {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), "soc_model": str(job.options.soc_model)}
    options.add_provider_for_devices(npus or devices[:1], settings)
    return onnxruntime.InferenceSession(str(model), sess_options=options)


def elsewhere(job: Job) -> dict[str, int] | None:
    """Ops that ONNX Runtime gives to its CPU when it may; None when that fails as well."""
    try:
        session = open_session(job, job.model, compiling=False, fallback=True)
        counts: dict[str, int] = {}
        for part in session.get_provider_graph_assignment_info():
            if part.ep_name != "QNNExecutionProvider":
                for node in part.get_nodes():
                    counts[node.op_type] = counts.get(node.op_type, 0) + 1
        return counts
    except Exception as error:
        print(error)
        return None


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
