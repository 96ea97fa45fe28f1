"""What the host costs beside the engine: shares of a decode step and of a prefill run, in every layout, over C.

    python -m benchmarks.host_step [SLOTS ...]

SmolLM2-135M (30 layers, 60 cached tensors), float32, c = 128, 2 threads. A step is one token of a greedy generation:
ids, position and mask made, 60 inputs bound to where the window has moved, the graph run, what came out looked at for
numbers that are not finite, 60 caches rolled, the token chosen. A prefill run is a quarter of a prompt of 512 tokens.
The host's time is what passes outside of the engine's own call; its share is taken run by run, and the median is
printed. Above the model's 8192 positions its config is changed to have more: the host's work is the same.

Against: the same step with the caches rolled by `concatenate((past, new))[1:]`, as most drivers do, and with fixed
addresses, where the window's content moves at every step.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bundles import FOLDER, preset
from rollkv.export.pipeline import export_bundle
from rollkv.export.signature import resolve
from rollkv.runtime import Session, backend, kv
from rollkv.runtime.bundle import Bundle, open_bundle
from rollkv.runtime.cache import RollingBuffer

SIZES, LAYOUTS = (512, 1280, 4096, 16384), ("bskd", "bksd", "bksd-kt")
STEPS, PROMPTS = 40, 4
PROMPT = 512


class ConcatenatingBuffer(RollingBuffer):
    """The rolling cache as most drivers have it."""

    def roll(self, new: Any, skip: int = 0, stop: int | None = None) -> None:
        rows = np.take(new, range(skip, new.shape[2] if stop is None else stop), 2)
        for window, kept in zip(self.window(), rows, strict=True):
            window[...] = np.concatenate((window, kept), 1)[:, kept.shape[1] :]


class Clock:
    """Time of each run, and how much of it was the engine's."""

    def __init__(self) -> None:
        self.engine = 0.0
        run = backend._OrtBinding.run

        def timed(binding: Any) -> None:
            start = time.perf_counter()
            run(binding)
            self.engine += time.perf_counter() - start

        backend._OrtBinding.run = timed  # type: ignore[method-assign]

    def of(self, work: Any) -> tuple[float, float]:
        """Host's and engine's seconds of a piece of work."""
        self.engine, start = 0.0, time.perf_counter()
        work()
        return time.perf_counter() - start - self.engine, self.engine


def made_bundle(slots: int, layout: str, folder: Path) -> Bundle:
    """SmolLM2 with C slots, and at least as many positions."""
    checkpoint = preset("smollm2-135m")
    most = max(slots, checkpoint.config.max_position)
    checkpoint = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, max_position=most))
    lengths = {"max_lm_input_len": min(slots - 1, 1024), "chunk_size": 128, "max_kvcache_len": slots}
    export_bundle(
        checkpoint, resolve(checkpoint.config, **lengths, kv_layout=layout), folder / "bundle", lambda *_: None
    )
    return open_bundle(folder / "bundle")


def measure(clock: Clock, session: Session, steps: int = STEPS) -> list[tuple[float, float]]:
    generation = session.generate(range(1, 129), max_new_tokens=steps + 6, ignore_eos=True, on_limit="roll")
    for _ in range(6):
        next(generation)
    return [clock.of(lambda: next(generation)) for _ in range(steps)]


def shown(times: list[tuple[float, float]]) -> str:
    host, engine = (statistics.median(part) * 1e3 for part in zip(*times, strict=True))
    share = statistics.median(h / (h + e) for h, e in times)
    return f"{host:8.3f} {engine:8.1f} {100 * share:6.2f} %"


def main(arguments: list[str]) -> int:
    clock, worst, prefill_worst = Clock(), 0.0, 0.0
    hosts: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(
        f"layout       C |     host   engine    share | prefill run: host   engine    share   (ms, medians of {STEPS})"
    )
    for slots in map(int, arguments) if arguments else SIZES:
        for layout in LAYOUTS:
            folder = Path(tempfile.mkdtemp(dir=FOLDER))
            try:
                session = Session(made_bundle(slots, layout, folder), threads=2)
                times = measure(clock, session)
                runs, prompt = [], min(PROMPT, (slots - 1) // 128 * 128)
                for _ in range(PROMPTS):
                    session.reset()
                    host, engine = clock.of(functools.partial(session.prefill, [7] * prompt))
                    runs.append((host / (prompt // 128), engine / (prompt // 128)))
                print(f"{layout:8} {slots:5} | {shown(times)} | {shown(runs):>40}", flush=True)
                worst = max(worst, statistics.median(h / (h + e) for h, e in times))
                prefill_worst = max(prefill_worst, statistics.median(h / (h + e) for h, e in runs))
                hosts[layout].append(statistics.median(h for h, _ in times))
                if layout == "bskd":
                    fixed = Session(session.loaded, addresses="fixed")
                    print(f"  fixed  {slots:5} | {shown(measure(clock, fixed))}", flush=True)
                    if slots == 1280:
                        kv.RollingBuffer = ConcatenatingBuffer  # type: ignore[misc]
                        slow = Session(session.loaded)
                        kv.RollingBuffer = RollingBuffer  # type: ignore[misc]
                        print(f"  concat {slots:5} | {shown(measure(clock, slow))}", flush=True)
                del session
            finally:
                shutil.rmtree(folder)
    print(f"host share of a decode step, worst: {100 * worst:.2f} % (bound 1.5 %)")
    print(f"host share of a prefill run, worst: {100 * prefill_worst:.2f} % (bound 0.5 %)")
    flat = max(max(times) / min(times) for times in hosts.values())
    print(f"host time of a decode step over C, largest / smallest of a layout: {flat:.2f} (bound 1.5)")
    return 0 if worst <= 0.015 and prefill_worst <= 0.005 and flat <= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
