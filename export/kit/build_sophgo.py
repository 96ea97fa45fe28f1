"""Compile the graphs of this folder with tpu-mlir for a Sophgo chip, and run the golden inputs on its C model.

    python build.py [GRAPH ...]               BUILD/<graph>.bmodel
    python build.py --simulate [GRAPH ...]    BUILD/outputs/<graph>/<k>/<name>.npy

Numbers are F16 unless --quantize says otherwise. Needs tpu-mlir (Python 3.10) and NumPy. Its lib/third_party brings a
libc.so.6 and a libm.so.6, which have to be moved away on a system with a newer glibc. It imports torch and
onnxruntime_extensions for conversions that these graphs do not need; where they are missing, stand-ins are put there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jobs import Job, main

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


if __name__ == "__main__":
    sys.exit(main(__doc__, FLAGS, compile_graph, simulate_graph))
