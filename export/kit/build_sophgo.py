"""Compile the graphs of this folder with tpu-mlir for a Sophgo chip, and run the golden inputs on its C model.

    python build.py [GRAPH ...]               BUILD/<graph>.bmodel
    python build.py --simulate [GRAPH ...]    BUILD/outputs/<graph>/<k>/<name>.npy

Numbers are F16 unless --quantize says otherwise. Needs tpu-mlir (Python 3.10) and NumPy. Its lib/third_party brings a
libc.so.6 and a libm.so.6, which have to be moved away on a system with a newer glibc. It imports torch and
onnxruntime_extensions for conversions that these graphs do not need; where they are missing, stand-ins are put there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

FLAGS: dict[str, dict[str, Any]] = {
    "--quantize": {"choices": ("F16", "BF16", "F32", "W8F16", "W4F16"), "default": "F16", "help": "(default F16)"},
    "--chip": {"help": "chip (default: that of the target in handoff.json, bm1684x where it names none of Sophgo's)"},
}
STAND_INS = """
import importlib.util, os, runpy, sys, types

class Tensor:
    def __init__(self, array):
        self._array = array
    def numpy(self):
        import numpy
        return numpy.asarray(self._array)

class Names:
    def __getattr__(self, name):
        return name

def stand_in(name, **members):
    if importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module

stand_in("torch", tensor=Tensor)
stand_in("onnxruntime_extensions", onnx_op=lambda **_: lambda function: function, PyOp=Names(), PyOrtFunction=None)
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def compile_graph(job: Job) -> None:
    """Two steps: to MLIR, and from there to a .bmodel."""
    mlir = job.name + ".mlir"
    run("model_transform", "--model_name", job.name, "--model_def", str(job.model), "--mlir", mlir, "--not_inference")
    chip = job.options.chip or named_chip(job.handoff.get("target") or "")
    quantize = ["--quantize", job.options.quantize, "--chip", chip]
    bmodel = job.name + ".bmodel"  # written here and moved: the tool does not take a path with a space in it
    run("model_deploy", "--mlir", mlir, *quantize, "--model", bmodel)
    shutil.move(bmodel, job.file(".bmodel"))
    final = list(Path().glob(job.name + "_*_final.mlir"))
    job.not_on_npu = on_cpu(final[0].read_text(encoding="utf-8")) if final else None


def simulate_graph(job: Job) -> None:
    """Golden runs on the C model. Its outputs are called <name>_<op>_f32."""
    shutil.copyfile(job.file(".bmodel"), "model.bmodel")
    for sample in job.golden:
        feeds = {k: v.astype(np.int32) if v.dtype.kind == "i" else v for k, v in job.inputs(sample).items()}
        np.savez("in.npz", **feeds)
        run("model_runner", "--input", "in.npz", "--model", "model.bmodel", "--output", "out.npz")
        with np.load("out.npz") as arrays:
            job.save(sample, {name: arrays[written(name, arrays.files)] for name in job.outputs})


def written(name: str, files: list[str]) -> str:
    """The one array that is called `name`, or `name` and an op."""
    found = [file for file in files if file == name or re.match(re.escape(name) + r"_[A-Za-z]", file)]
    if len(found) != 1:
        raise ValueError("tpu-mlir: output {} is {} of {}".format(name, found or "none", files))
    return found[0]


def named_chip(target: str) -> str:
    """The chip of a target's name."""
    maker, _, chip = target.partition("-")
    return chip if maker == "sophgo" else "bm1684x"


def on_cpu(mlir: str) -> dict[str, int]:
    """Ops of the compiled graph that the host's CPU runs, counted by what they are."""
    counts: dict[str, int] = {}
    for op in re.findall(r'"tpu\.GenericCpu".*?cpu_op_name = "(\w+)"', mlir):
        counts[op] = counts.get(op, 0) + 1
    return counts


def run(tool: str, *arguments: str) -> None:
    """A tool of tpu-mlir, in its own process. Raises RuntimeError when it fails."""
    import tpu_mlir  # noqa: F401  # sets the variables that the process needs

    script = Path(os.environ["TPUC_ROOT"]) / "python" / "tools" / (tool + ".py")
    done = subprocess.run([sys.executable, "-c", STAND_INS, str(script), *arguments], check=False)
    if done.returncode:
        raise RuntimeError(f"tpu-mlir: {tool} failed with {done.returncode}; its reason is above")


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
