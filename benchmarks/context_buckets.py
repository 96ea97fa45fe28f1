"""What a large cache costs while it is nearly empty: C = 4096 with context buckets and without, against C = 640.

    python -m benchmarks.context_buckets [LAYOUT ...]

SmolLM2-135M float32, c = 128, 2 threads: a prompt of 512 tokens, then 64 decode steps, in every layout. The bundles
take turns in one process; medians of ROUNDS rounds, and ratios to the bundle of C = 640.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.bundles import FOLDER, preset
from rollkv.export.pipeline import export_bundle
from rollkv.export.signature import resolve
from rollkv.runtime import Session

LAYOUTS = ("bskd", "bksd", "bksd-kt")
BUNDLES = {
    "C = 640": {"max_kvcache_len": 640},
    "C = 4096": {"max_kvcache_len": 4096},
    "C = 4096, C' = 640": {"max_kvcache_len": 4096, "context_buckets": (640,)},
    "C = 4096, C' = 256, 640": {"max_kvcache_len": 4096, "context_buckets": (256, 640)},
}
PROMPT, STEPS, ROUNDS = 512, 64, 5
BOUND = 1.1  # of the time with C = 640, with buckets


def measure(session: Session) -> tuple[float, float]:
    """Seconds of the prompt, and of a decode step after it (median)."""
    session.reset()
    start = time.perf_counter()
    session.prefill(range(100, 100 + PROMPT))
    prompt, steps = time.perf_counter() - start, []
    for _ in range(STEPS):
        start = time.perf_counter()
        session.decode(7)
        steps.append(time.perf_counter() - start)
    return prompt, statistics.median(steps)


def main(arguments: list[str]) -> int:
    checkpoint, worst = preset("smollm2-135m"), 0.0
    FOLDER.mkdir(parents=True, exist_ok=True)
    print("layout   bundle                    prompt of 512   ratio    step     ratio")
    for layout in arguments or LAYOUTS:
        folder = Path(tempfile.mkdtemp(dir=FOLDER))
        try:
            sessions = {}
            for number, (name, settings) in enumerate(BUNDLES.items()):
                lengths = {"max_lm_input_len": 512, "chunk_size": 128, **settings}
                options = resolve(checkpoint.config, kv_layout=layout, **lengths)  # type: ignore[arg-type]
                export_bundle(checkpoint, options, folder / str(number), lambda *_: None)
                sessions[name] = Session(folder / str(number), threads=2)
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
            for _ in range(ROUNDS + 1):
                for name, session in sessions.items():
                    times[name].append(measure(session))
            # The first round warms up.
            medians = {
                name: tuple(map(statistics.median, zip(*rounds[1:], strict=True))) for name, rounds in times.items()
            }
            base = medians["C = 640"]
            for name, (prompt, step) in medians.items():
                ratios = prompt / base[0], step / base[1]
                if "context_buckets" in BUNDLES[name]:
                    worst = max(worst, *ratios)
                times_of = f"{prompt * 1e3:8.0f} ms {ratios[0]:9.2f} {step * 1e3:8.1f} ms {ratios[1]:5.2f}"
                print(f"{layout:8} {name:25} {times_of}", flush=True)
        finally:
            shutil.rmtree(folder)
    print(f"with buckets, worst ratio to C = 640: {worst:.2f} (bound {BOUND})")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
