"""Load every graph of this folder in ONNX Runtime, run the golden inputs and write what comes out.

    python build.py [GRAPH ...]      BUILD/outputs/<graph>/<k>/<name>.npy; --simulate does the same

Then `python replay.py BUILD/outputs`. There is no one compiler for this folder's target: a script for another tool
follows this pattern. Needs Python 3.8, NumPy and onnxruntime.
"""

from __future__ import annotations

import os
import sys

from jobs import Job, main


def run_graph(job: Job) -> None:
    """Golden runs. Ends the program with 2 when onnxruntime is not installed."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        print("build.py: onnxruntime is not installed: pip install onnxruntime", file=sys.stderr)
        sys.exit(2)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(job.model), settings, providers=["CPUExecutionProvider"])
    for sample in job.golden:
        made = session.run(job.outputs, job.inputs(sample))
        job.save(sample, {name: made[i] for i, name in enumerate(job.outputs)})


if __name__ == "__main__":
    sys.exit(main(__doc__, {}, run_graph, run_graph))
