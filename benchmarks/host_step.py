"""Host time of a decode step: the step without ONNX Runtime's own time, at several C, against a concatenating driver.

    python -m benchmarks.host_step

SmolLM2-135M, 30 layers, 60 cached tensors, c = 128, bskd. A step is `Session.decode`: ids, position and mask made, 63
inputs bound, the graph run, 60 caches rolled, the logits copied out. ONNX Runtime's own time is that of its one call,
run_with_iobinding. The concatenating driver differs in the cache only: `concatenate((past, new))[1:]` for each of the
60 tensors. The drivers take turns, block by block, in one process; medians over all steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

from benchmarks.bundles import preset_bundle
from rollkv.runtime import Session, backend
from rollkv.runtime.bundle import Bundle

SIZES = (512, 2048, 8192)
BLOCKS, STEPS = 6, 20


class ConcatenatingCache:
    """The rolling cache as most drivers have it."""

    def __init__(self, shape: tuple[int, ...], axis: int, dtype: Any) -> None:
        self._array, self._axis = np.zeros(shape, dtype), axis

    def reset(self) -> None:
        self._array.fill(0)

    def window(self) -> np.ndarray:
        return self._array

    def roll(self, new: np.ndarray, skip: int = 0) -> None:
        kept = new[:, skip:]
        self._array = np.concatenate((self._array, kept), self._axis)[:, kept.shape[self._axis] :]


class Timed:
    """A session whose steps are timed with and without the engine's own call."""

    def __init__(self, bundle: Bundle, concatenating: bool) -> None:
        self.session = Session(bundle, threads=2)
        if concatenating:
            caches = self.session._caches
            for name, cache in caches.items():
                caches[name] = ConcatenatingCache(cache.shape, 1, np.float32)  # type: ignore[assignment]
        self.session.prefill(list(range(1, 129)))
        self.host: list[float] = []
        self.engine: list[float] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            spent.clear()
            start = time.perf_counter()
            self.session.decode(7)
            total = time.perf_counter() - start
            self.engine.append(sum(spent))
            self.host.append(total - sum(spent))


spent: list[float] = []


def main() -> int:
    execute = backend._Engine._execute

    def timed(engine: Any) -> None:
        start = time.perf_counter()
        execute(engine)
        spent.append(time.perf_counter() - start)

    backend._Engine._execute = timed  # type: ignore[method-assign]
    moving = {slots: Timed(preset_bundle("smollm2-135m", slots - 256, 128, slots), False) for slots in SIZES}
    concatenating = Timed(preset_bundle("smollm2-135m", 2048 - 256, 128, 2048), True)
    everyone = [*moving.values(), concatenating]
    for driver in everyone:
        driver.steps(3)
        driver.host.clear(), driver.engine.clear()
    for _ in range(BLOCKS):
        for driver in everyone:
            driver.steps(STEPS)
    medians = {slots: statistics.median(driver.host) * 1e3 for slots, driver in moving.items()}
    print(f"host time of a decode step, SmolLM2-135M, 2 threads, median of {BLOCKS * STEPS} steps")
    for slots, driver in moving.items():
        engine = statistics.median(driver.engine) * 1e3
        print(f"  moving window, C = {slots:5}  {medians[slots]:7.3f} ms   (ONNX Runtime {engine:6.1f} ms)")
    slow = statistics.median(concatenating.host) * 1e3
    print(f"  concatenating, C =  2048  {slow:7.3f} ms")
    flat, gain = max(medians.values()) / min(medians.values()), slow / medians[2048]
    print(f"  largest / smallest over C {flat:.2f} (bound 1.5); largest {max(medians.values()):.2f} ms (bound 1 ms)")
    print(f"  concatenating / moving at C = 2048: {gain:.0f}x (bound 20x)")
    return 0 if flat <= 1.5 and max(medians.values()) < 1.0 and gain >= 20 else 1


if __name__ == "__main__":
    sys.exit(main())
