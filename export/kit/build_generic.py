"""Load every graph of this folder in ONNX Runtime, run the golden inputs and write what comes out.

    python build.py [--output outputs]        then: python replay.py outputs

There is no one compiler for this folder's target: this is the pattern that a script for another tool follows. Needs
Python 3.8, NumPy and onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Run the graphs of this folder on its golden inputs.")
    parser.add_argument("--output", metavar="OUTPUTS", default="outputs", help="folder to write (default outputs)")
    output = Path(parser.parse_args().output)
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        print("build.py needs onnxruntime, which is not installed: pip install onnxruntime", file=sys.stderr)
        return 2
    handoff = json.loads((FOLDER / "handoff.json").read_text(encoding="utf-8"))
    for graph in handoff["graphs"]:
        if graph["name"] not in handoff["golden"]:
            continue
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(FOLDER / graph["file"]), options, providers=["CPUExecutionProvider"])
        names = [value["name"] for value in graph["outputs"]]
        for path in handoff["golden"][graph["name"]]:
            inputs = FOLDER / path / "inputs"
            feeds = {value["name"]: np.load(str(inputs / (value["name"] + ".npy"))) for value in graph["inputs"]}
            results = session.run(names, feeds)
            folder = output / graph["name"] / Path(path).name
            folder.mkdir(parents=True, exist_ok=True)
            for index, name in enumerate(names):
                np.save(str(folder / (name + ".npy")), results[index])
        print("{}: {} golden runs".format(graph["file"], len(handoff["golden"][graph["name"]])))
    print(f"written to {output}; python replay.py {output} compares them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
