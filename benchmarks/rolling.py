"""Thousands of decode steps past the end of the cache: memory at the end, and bytes copied per step.

    python -m benchmarks.rolling

SmolLM2-135M, c = 128, C = 1280, 4,000 steps under `roll`, 2 threads. Resident memory is read after 100 steps and at
the end; copied bytes are counted by the cache itself, as it moves its windows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.bundles import preset_bundle
from rollkv.runtime import Session

STEPS, SLOTS, CHUNK = 4000, 1280, 128


def resident() -> float:
    """MB of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1e3


def main() -> int:
    session = Session(preset_bundle("smollm2-135m", SLOTS - 256, CHUNK, SLOTS), threads=2)
    cache = session.sequence.cache
    generation = session.generate(range(1, 1001), max_new_tokens=STEPS, ignore_eos=True, on_limit="roll")
    early = copied = 0.0
    for step, _ in enumerate(generation, 1):
        if step == 100:
            early, copied = resident(), cache.copied_bytes
    late, copied = resident(), (cache.copied_bytes - copied) / (STEPS - 100)
    slack = cache.groups[0].buffer.slack
    bound = 2 * cache.nbytes / slack
    print(f"{len(generation.generated)} steps, P = {session.position}, C = {SLOTS}, slack {slack} slots")
    grown = 100 * (late / early - 1)
    print(f"resident after 100 steps {early:.1f} MB, at the end {late:.1f} MB: {grown:+.2f} % (bound 2 %)")
    print(
        f"copied per step {copied / 1e3:.1f} kB of a cache of {cache.nbytes / 1e6:.1f} MB (bound {bound / 1e3:.1f} kB)"
    )
    return 0 if late <= 1.02 * early and copied <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
