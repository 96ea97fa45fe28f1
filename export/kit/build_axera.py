"""Write the configuration that AXERA's pulsar2 takes for each graph of this folder, and call it if it is there.

    python build.py [GRAPH ...]               BUILD/<graph>.json, and with pulsar2 BUILD/<graph>/compiled.axmodel

Written from AXERA's public documents and not run: pulsar2 comes as a container image. The calibration samples of an
input are .npy files in a tar, as the hand-off has them. --simulate is not offered. Needs NumPy, and pulsar2 on the PATH
to compile.
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
