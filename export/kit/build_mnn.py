"""Convert the graphs of this folder to MNN, and run the golden inputs with MNN on the CPU.

    python build.py [GRAPH ...]               BUILD/<graph>.mnn, weights in float16
    python build.py --simulate [GRAPH ...]    BUILD/outputs/<graph>/<k>/<name>.npy

The converter is called itself: the command `mnnconvert` and the module behind it install a log client and report each
conversion home. It ends well even where it could not convert an op, so what it wrote is looked at.
No op is told to be off an NPU. Needs MNN and NumPy.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from jobs import Job, main

FLAGS: dict[str, dict[str, Any]] = {
    "--weight-bits": {"type": int, "choices": (4, 8), "help": "quantise the weights (default: float16)"},
    "--precision": {
        "choices": ("high", "low"),
        "default": "high",
        "help": "of the CPU (default high)",
    },
}


def compile_graph(job: Job) -> None:
    """Convert; raises RuntimeError when the converter wrote nothing that holds every output."""
    import _tools  # of the distribution MNN

    target = job.file(".mnn")
    if target.exists():
        target.unlink()
    words = ["mnnconvert", "-f", "ONNX", "--modelFile", str(job.model), "--MNNModel", str(target), "--bizCode", "none"]
    words += ["--fp16"] if job.options.weight_bits is None else ["--weightQuantBits", str(job.options.weight_bits)]
    converted = _tools.mnnconvert(words)
    if converted is False or not target.is_file() or not target.stat().st_size:
        raise RuntimeError(f"MNN could not convert {job.model.name}; its reason is above")
    load(job)


def simulate_graph(job: Job) -> None:
    """Golden runs on the CPU."""
    import MNN.expr

    types = {"float32": MNN.expr.float, "int32": MNN.expr.int}
    module = load(job)
    for sample in job.golden:
        feeds = []
        for array in job.inputs(sample).values():
            array = np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else np.int32)
            feeds.append(MNN.expr.const(array, list(array.shape), MNN.expr.NCHW, types[str(array.dtype)]))
        results = module.forward(feeds)
        made = {
            name: MNN.expr.convert(result, MNN.expr.NCHW).read()
            for name, result in zip(job.outputs, results, strict=True)
        }
        job.save(sample, made)


def load(job: Job) -> Any:
    """The converted graph, with inputs and outputs in the order of handoff.json."""
    import MNN.nn

    setting = {"backend": "CPU", "precision": job.options.precision, "numThread": os.cpu_count() or 1}
    manager = MNN.nn.create_runtime_manager((setting,))
    names = [value["name"] for value in job.graph["inputs"]]
    module = MNN.nn.load_module_from_file(str(job.file(".mnn")), names, job.outputs, runtime_manager=manager)
    if module is None:
        raise RuntimeError("MNN cannot load {}: not every op of the graph was converted".format(job.file(".mnn").name))
    return module


if __name__ == "__main__":
    sys.exit(main(__doc__, FLAGS, compile_graph, simulate_graph))
