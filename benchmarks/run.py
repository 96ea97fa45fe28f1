"""All figures, one script after the other: `make bench`. Run it alone on the machine; it takes about 50 minutes."""

from __future__ import annotations

import subprocess
import sys

SCRIPTS = (
    "startup",
    "export_cost",
    "host_step",
    "decode_attention",
    "context_buckets",
    "rolling",
    "speculation",
    "experts",
    "memory",
    "float16",
    "greedy",
)


def main() -> int:
    failed = []
    for name in SCRIPTS:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    print(f"\noutside of their bounds: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
