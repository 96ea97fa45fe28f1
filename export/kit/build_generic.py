"""Load every graph of this folder in ONNX Runtime, run the golden inputs and write what comes out.

    python build.py [GRAPH ...]      BUILD/outputs/<graph>/<k>/<name>.npy

Then `python replay.py BUILD/outputs`. There is no one compiler for this folder's target: a script for another tool
follows this pattern. Needs Python 3.8, NumPy and onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np


def main() -> int:
    """Entry point."""
    own = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Run the graphs of this folder on its golden inputs.")
    parser.add_argument("graphs", metavar="GRAPH", nargs="*", help="graphs to take (default: all of handoff.json)")
    parser.add_argument("--simulate", action="store_true", help="the same: nothing is compiled")
    parser.add_argument("--folder", metavar="FOLDER", type=Path, default=own, help="the hand-off (default: this one)")
    parser.add_argument("--build", metavar="BUILD", type=Path, help="folder to write (default FOLDER/build)")
    options = parser.parse_args()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        parser.error("onnxruntime is not installed: pip install onnxruntime")
    folder, build = options.folder, options.build or options.folder / "build"
    handoff = json.loads((folder / "handoff.json").read_text(encoding="utf-8"))
    there = [graph for graph in handoff["graphs"] if graph["name"] in handoff["golden"]]
    for name in options.graphs:
        if name not in [graph["name"] for graph in there]:
            parser.error("no graph {}; there are {}".format(name, ", ".join(graph["name"] for graph in there)))
    for graph in there:
        if options.graphs and graph["name"] not in options.graphs:
            continue
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            str(folder / graph["file"]), settings, providers=["CPUExecutionProvider"]
        )
        names = [value["name"] for value in graph["outputs"]]
        for path in handoff["golden"][graph["name"]]:
            inputs = folder / path / "inputs"
            feeds = {value["name"]: np.load(str(inputs / (value["name"] + ".npy"))) for value in graph["inputs"]}
            results = session.run(names, feeds)
            target = build / "outputs" / graph["name"] / Path(path).name
            target.mkdir(parents=True, exist_ok=True)
            for index, name in enumerate(names):
                np.save(str(target / (name + ".npy")), results[index])
        print("{}: {} golden runs".format(graph["file"], len(handoff["golden"][graph["name"]])))
    print("written to {}; compare with: python replay.py {}".format(build / "outputs", build / "outputs"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
