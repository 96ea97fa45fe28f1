"""Compile the graphs of this folder for Qualcomm's HTP with onnxruntime-qnn, and run the golden inputs.

    python build.py [GRAPH ...]               BUILD/<graph>.onnx and its context binary
    python build.py --simulate [GRAPH ...]    BUILD/outputs/<graph>/<k>/<name>.npy

On x86-64 the runs go through the HTP simulator of the package; on a Snapdragon through the NPU. No op may fall back to
the CPU (session.disable_cpu_ep_fallback): a graph that compiles is on the NPU as a whole. Numbers are float16.
Needs onnxruntime-qnn and NumPy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from jobs import Job, main

FLAGS: dict[str, dict[str, Any]] = {
    # Without soc_model the compiler fails with MEM_ALLOC 1002, which has nothing to do with memory.
    "--soc-model": {"type": int, "default": 57, "help": "QNN number of the chip: 43 is SM8550, 57 SM8650 (default), "
                    "69 SM8750, 60 SC8380XP"},
}  # fmt: skip


def compile_graph(job: Job) -> None:
    """Write the context binary. What is not on the NPU is looked up when the compiler refuses the whole graph."""
    try:
        open_session(job, job.model, compiling=True)
    except Exception:
        job.not_on_npu = elsewhere(job)
        print("ops that QNN does not take: {}".format(job.not_on_npu or "none; the compiler itself failed"))
        raise
    job.not_on_npu = {}


def simulate_graph(job: Job) -> None:
    """Golden runs of the context binary."""
    session = open_session(job, job.file(".onnx"), compiling=False)
    for sample in job.golden:
        job.save(sample, dict(zip(job.outputs, session.run(job.outputs, job.inputs(sample)), strict=True)))


def open_session(job: Job, model: Path, compiling: bool, fallback: bool = False) -> Any:
    """A session on the HTP backend."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # its Linux builds report each session to their maker
    import onnxruntime
    import onnxruntime_qnn

    name = onnxruntime_qnn.get_ep_name()
    if not any(device.ep_name == name for device in onnxruntime.get_ep_devices()):
        onnxruntime.register_execution_provider_library(name, onnxruntime_qnn.get_library_path())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    entries = {"session.disable_cpu_ep_fallback": "0" if fallback else "1"}
    if fallback:
        entries["session.record_ep_graph_assignment_info"] = "1"
    elif compiling:
        for old in (job.file(".onnx"), job.file("_qnn.bin")):
            if old.exists():
                old.unlink()
        entries["ep.context_enable"] = "1"
        entries["ep.context_embed_mode"] = "0"
        entries["ep.context_file_path"] = str(job.file(".onnx"))
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]
    npus = [device for device in devices if device.device.type == onnxruntime.OrtHardwareDeviceType.NPU]
    settings = {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), "soc_model": str(job.options.soc_model)}
    options.add_provider_for_devices(npus or devices[:1], settings)
    return onnxruntime.InferenceSession(str(model), sess_options=options)


def elsewhere(job: Job) -> dict[str, int] | None:
    """Ops that ONNX Runtime gives to its CPU when it may; None when that fails as well."""
    try:
        session = open_session(job, job.model, compiling=False, fallback=True)
        counts: dict[str, int] = {}
        for part in session.get_provider_graph_assignment_info():
            if part.ep_name != "QNNExecutionProvider":
                for node in part.get_nodes():
                    counts[node.op_type] = counts.get(node.op_type, 0) + 1
        return counts
    except Exception as error:
        print(error)
        return None


if __name__ == "__main__":
    sys.exit(main(__doc__, FLAGS, compile_graph, simulate_graph))
