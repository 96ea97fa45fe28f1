"""What ONNX Runtime's packed copies of the weights cost and give: SmolLM2-135M, both graphs loaded, 2 threads.

    python -m benchmarks.memory

Resident memory is what a process has after prompts and steps, the interpreter, its libraries and the cache included;
the peak is that of loading.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from benchmarks.bundles import preset_bundle

CHILD = """
import json, statistics, sys, time
from rollkv.runtime import Session

def rss():
    lines = open("/proc/self/status").read().splitlines()
    wanted = ("VmHWM", "VmRSS", "RssAnon", "RssFile")
    return {l.split(":")[0]: int(l.split()[1]) * 1024 / 1e6 for l in lines if l.startswith(wanted)}

start = time.perf_counter()
session = Session(sys.argv[1], threads=2, memory=sys.argv[2])
load = time.perf_counter() - start
chunks, steps = [], []
for _ in range(3):
    session.reset()
    start = time.perf_counter()
    session.prefill(list(range(100, 612)))
    chunks.append((time.perf_counter() - start) / 4)
for _ in range(30):
    start = time.perf_counter()
    session.decode(7)
    steps.append(time.perf_counter() - start)
print(json.dumps({"load": load, "run": statistics.median(chunks), "step": statistics.median(steps), **rss()}))
"""


def main() -> int:
    bundle = preset_bundle("smollm2-135m", 896, 128, 1024)
    weights = bundle.manifest.weights.unique_bytes / 1e6
    print(f"weights {weights:.0f} MB; median of 3 processes each, taking turns")
    results: dict[str, list[dict[str, float]]] = {"fast": [], "low": []}
    for _ in range(3):
        for mode, runs in results.items():
            command = [sys.executable, "-c", CHILD, str(bundle.path), mode]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    bounds, met = {"fast": 2.2 * weights, "low": 1.25 * weights + 150}, True
    for mode, runs in results.items():
        m = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"  {mode:5} load {m['load']:.2f} s, 128 rows {m['run'] * 1e3:.0f} ms, step {m['step'] * 1e3:.1f} ms, "
            f"resident {m['VmRSS']:.0f} MB (anonymous {m['RssAnon']:.0f}, mapped {m['RssFile']:.0f}; "
            f"peak {m['VmHWM']:.0f}), bound {bounds[mode]:.0f} MB"
        )
        met = met and m["VmRSS"] <= bounds[mode]
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
