"""Start-up: `rollkv --help`, and what importing the runtime pulls in.

python -m benchmarks.startup
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    command = Path(sys.executable).with_name("rollkv")
    times = []
    for _ in range(15):
        start = time.perf_counter()
        subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    print(f"rollkv --help: median {median:.3f} s of {len(times)} (bound 0.15 s)")
    heavy = ("torch", "onnx", "onnxruntime", "transformers", "numpy")
    code = f"import sys, rollkv.runtime; print([m for m in {heavy!r} if m in sys.modules])"
    code += "\nfrom rollkv.runtime import Session, Chat"
    code += f"\nprint([m for m in {heavy!r} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split("\n")
    print(f"import rollkv.runtime loads of {', '.join(heavy)}: {loaded[0]}; with Session and Chat: {loaded[1]}")
    return 0 if median < 0.15 and loaded[0] == "[]" and loaded[1] == "['numpy']" else 1


if __name__ == "__main__":
    sys.exit(main())
