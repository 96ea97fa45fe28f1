"""Write the configuration that Horizon's hb_compile takes for each graph of this folder, and call it if it is there.

    python build.py [GRAPH ...]               BUILD/<graph>.yaml, and with hb_compile BUILD/<graph>/<graph>.hbm

Written from Horizon's public documents and not run: the compiler is not public. Check the march of your chip (--march)
and the keys against your version. Caches come with the slots first and the mask as numbers, so every input is a
feature map without preprocessing. --simulate is not offered. Needs NumPy, and hb_compile on the PATH to compile.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

from jobs import Job, main

FLAGS: dict[str, dict[str, Any]] = {
    "--march": {"default": "nash-m", "help": "architecture of the chip (default nash-m; nash-e, nash-p)"},
}
TEMPLATE = """\
model_parameters:
  onnx_model: "{model}"
  march: "{march}"
  output_model_file_prefix: "{name}"
  working_dir: "{working}"
input_parameters:
  input_name: "{names}"
  input_type_rt: "{types}"
  input_type_train: "{types}"
  input_layout_train: "{layouts}"
  input_shape: "{shapes}"
calibration_parameters:
  cal_data_dir: "{samples}"
  calibration_type: "default"
compiler_parameters:
  compile_mode: "latency"
  optimize_level: "O2"
"""


def compile_graph(job: Job) -> None:
    """Write the configuration; compile where the compiler is there."""
    config = job.file(".yaml")
    config.write_text(configuration(job), encoding="utf-8")
    compiler = shutil.which("hb_compile")
    if compiler is None:
        raise SystemExit(f"hb_compile is not on the PATH; {config} is written for it: hb_compile --config {config}")
    subprocess.run([compiler, "--config", str(config)], check=True)


def simulate_graph(job: Job) -> None:
    """Not offered."""
    raise SystemExit("hb_compile's simulator is not driven here: run the .hbm with Horizon's own tools, see replay.py")


def configuration(job: Job) -> str:
    """One entry for each input, in the graph's order, separated by semicolons."""
    inputs = job.graph["inputs"]
    samples = job.folder / job.handoff["calibration"]["graphs"][job.name]["path"]

    def joined(words: Any) -> str:
        return ";".join(words)

    return TEMPLATE.format(
        model=job.model,
        march=job.options.march,
        name=job.name,
        working=job.build / job.name,
        names=joined(value["name"] for value in inputs),
        types=joined("featuremap" for _ in inputs),
        layouts=joined("NCHW" for _ in inputs),
        shapes=joined("x".join(map(str, value["shape"])) for value in inputs),
        samples=joined(str(samples / value["name"]) for value in inputs),
    )


if __name__ == "__main__":
    sys.exit(main(__doc__, FLAGS, compile_graph, simulate_graph))
