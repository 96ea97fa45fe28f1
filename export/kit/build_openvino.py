"""Compile the graphs of this folder with OpenVINO, and run the golden inputs on its CPU device.

    python build.py [GRAPH ...]               BUILD/<graph>.xml and .bin, weights in float16
    python build.py --simulate [GRAPH ...]    BUILD/outputs/<graph>/<k>/<name>.npy

The IR is what an NPU's driver compiles on the board: `Core().compile_model("<graph>.xml", "NPU")`. Without an NPU the
CPU stands in, in float32 unless --hint says otherwise: that device has bfloat16 in place of float16. No op is told to
be off the NPU: only its driver knows. Nothing reports home: `ovc` and `convert_model`, which may, are not used.
Needs openvino and NumPy.
"""

from __future__ import annotations

import sys
from typing import Any

from jobs import Job, main

FLAGS: dict[str, dict[str, Any]] = {
    "--hint": {"choices": ("f32", "bf16", "f16"), "default": "f32", "help": "precision on the CPU (default f32)"}
}


def compile_graph(job: Job) -> None:
    """Write the IR, and compile it for the CPU, which shows that every op is known."""
    import openvino

    core = openvino.Core()
    openvino.save_model(core.read_model(str(job.model)), str(job.file(".xml")), compress_to_fp16=True)
    core.compile_model(str(job.file(".xml")), "CPU")


def simulate_graph(job: Job) -> None:
    """Golden runs of the IR on the CPU."""
    import openvino

    hint = {"INFERENCE_PRECISION_HINT": job.options.hint}
    compiled = openvino.Core().compile_model(str(job.file(".xml")), "CPU", hint)
    for sample in job.golden:
        results = compiled(job.inputs(sample))
        job.save(sample, {name: results[name] for name in job.outputs})


if __name__ == "__main__":
    sys.exit(main(__doc__, FLAGS, compile_graph, simulate_graph))
