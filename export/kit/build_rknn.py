"""Compile the graphs of this folder with rknn-toolkit2, and run the golden inputs through its simulator.

    python build.py [GRAPH ...]               BUILD/<graph>.rknn
    python build.py --simulate [GRAPH ...]    the same, and BUILD/outputs/<graph>/<k>/<name>.npy

The simulator runs only what the same process compiled, so --simulate compiles too. Numbers are float16; --quantize
takes the calibration samples. The tool's placement table, among what it prints, tells which ops run on the board's
CPU. Needs rknn-toolkit2 and NumPy.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from jobs import Job, main

FLAGS: dict[str, dict[str, Any]] = {
    "--quantize": {"choices": ("w8a8", "w8a16", "w4a16"), "help": "quantise (w4a16: rk3576 only; default: float16)"},
    "--chip": {"help": "chip (default: the target of handoff.json, rk3588 where that is none of Rockchip's)"},
}
EDGES = ("InputOperator", "OutputOperator")  # where data enter and leave; they are always the CPU's


def compile_graph(job: Job) -> None:
    """Write the .rknn."""
    compiled(job).release()


def simulate_graph(job: Job) -> None:
    """Golden runs of what was just compiled."""
    started = time.perf_counter()
    rknn = compiled(job)
    job.compile_seconds = time.perf_counter() - started
    check(rknn.init_runtime(), "init_runtime")
    for sample in job.golden:
        feeds = list(job.inputs(sample).values())
        # Without data_format an input of rank 4 is read as NHWC.
        results = rknn.inference(inputs=feeds, data_format=["nchw"] * len(feeds))
        if results is None:
            raise RuntimeError(f"rknn-toolkit2: the simulator gave nothing for {sample}")
        job.save(sample, dict(zip(job.outputs, results, strict=True)))
    rknn.release()


def compiled(job: Job) -> Any:
    """The compiled model, also written; job.not_on_npu from the table that the compiler prints."""
    from rknn.api import RKNN

    target = job.handoff.get("target") or ""
    settings: dict[str, Any] = {
        "target_platform": job.options.chip or (target if target.startswith("rk") else "rk3588")
    }
    if job.options.quantize:
        settings["quantized_dtype"] = job.options.quantize
    said = Path("said.txt")
    kept = os.dup(1), os.dup(2)
    try:
        with said.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        rknn = RKNN(verbose=True)
        check(rknn.config(float_dtype="float16", **settings), "config")
        check(rknn.load_onnx(model=str(job.model)), "load_onnx")
        dataset = calibration(job) if job.options.quantize else None
        check(rknn.build(do_quantization=dataset is not None, dataset=dataset), "build")
        check(rknn.export_rknn(str(job.file(".rknn"))), "export_rknn")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        text = said.read_text(encoding="utf-8", errors="replace")
        sys.stderr.write(text)
    job.not_on_npu = on_cpu(text)
    return rknn


def on_cpu(text: str) -> dict[str, int] | None:
    """Ops whose target in the placement table is the CPU, counted; None without a table.

    A row is `ID OpType DataType Target ...`, behind a time stamp.
    """
    rows = re.findall(r"^D RKNN: \[[\d:.]+\] +\d+ +(\S+) +[A-Z]+\d* +([A-Z]+) +[\\(]", text, re.M)
    counts: dict[str, int] = {}
    for op, where in rows:
        if where == "CPU" and op not in EDGES:
            counts[op] = counts.get(op, 0) + 1
    return counts if rows else None


def calibration(job: Job) -> str:
    """The list of samples. Its paths go through a link: the tool divides a line at blanks, the folder's own too."""
    listed = job.folder / job.handoff["calibration"]["graphs"][job.name]["list"]
    Path("folder").symlink_to(job.folder, target_is_directory=True)
    lines = [line.split() for line in listed.read_text(encoding="utf-8").splitlines()]
    Path("dataset.txt").write_text(
        "".join(" ".join(f"folder/{path}" for path in line) + "\n" for line in lines), encoding="utf-8"
    )
    return "dataset.txt"


def check(code: Any, call: str) -> None:
    """The tool returns -1 where others raise."""
    if code != 0:
        raise RuntimeError(f"rknn-toolkit2: {call} failed with {code}; its reason is above")


if __name__ == "__main__":
    sys.exit(main(__doc__, FLAGS, compile_graph, simulate_graph))
