"""Write the configuration that AXERA's pulsar2 takes for each graph of this folder, and call it if it is there.

    python build.py [GRAPH ...]               BUILD/<graph>.json, and with pulsar2 BUILD/<graph>/compiled.axmodel

Written from AXERA's public documents and not run: pulsar2 comes as a container image. The calibration samples of an
input are .npy files in a tar, as the hand-off has them. --simulate is not offered. Needs NumPy, and pulsar2 on the PATH
to compile.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

from jobs import Job, main

FLAGS: dict[str, dict[str, Any]] = {
    "--chip": {"default": "AX650", "help": "target_hardware (default AX650)"},
    "--npu-mode": {"default": "NPU3", "help": "cores (default NPU3)"},
}


def compile_graph(job: Job) -> None:
    """Write the configuration; compile where the compiler is there."""
    config = job.file(".json")
    config.write_text(json.dumps(configuration(job), indent=2) + "\n", encoding="utf-8")
    compiler = shutil.which("pulsar2")
    if compiler is None:
        raise SystemExit(f"pulsar2 is not on the PATH; {config} is written for it: pulsar2 build --config {config}")
    subprocess.run([compiler, "build", "--config", str(config)], check=True)


def simulate_graph(job: Job) -> None:
    """Not offered."""
    raise SystemExit("pulsar2's simulator is not driven here: use `pulsar2 run` on the .axmodel, see replay.py")


def configuration(job: Job) -> dict[str, Any]:
    """An entry for each input, in the graph's order. Float inputs in numbers of 16 bits, which a mask value fits."""
    samples = job.folder / job.handoff["calibration"]["graphs"][job.name]["path"]
    return {
        "input": str(job.model),
        "output_dir": str(job.build / job.name),
        "output_name": "compiled.axmodel",
        "model_type": "ONNX",
        "target_hardware": job.options.chip,
        "npu_mode": job.options.npu_mode,
        "quant": {
            "input_configs": [
                {
                    "tensor_name": value["name"],
                    "calibration_dataset": str(samples / (value["name"] + ".tar")),
                    "calibration_format": "Numpy",
                    "calibration_size": -1,
                }
                for value in job.graph["inputs"]
            ],
            "layer_configs": [{"start_tensor_names": ["DEFAULT"], "end_tensor_names": ["DEFAULT"], "data_type": "U16"}],
            "calibration_method": "MinMax",
        },
        "compiler": {"check": 0},
    }


if __name__ == "__main__":
    sys.exit(main(__doc__, FLAGS, compile_graph, simulate_graph))
