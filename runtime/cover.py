"""Which runs take n new tokens: the cheapest cover by graphs of several sizes.

Pure functions of counts. n new tokens, P tokens that went through before, c rows of a run, C key slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RUN_OVERHEAD = 16.0  # rows: what a run costs besides its rows, where nothing was measured; see docs/runtime.md


@dataclass(frozen=True)
class Run:
    """One run of a graph: `rows` rows, of which the first `pads` are pads."""

    rows: int
    pads: int


def plan_runs(
    n: int, past: int, sizes: int | Sequence[int], kv_len: int, costs: Mapping[int, float] | None = None
) -> list[Run]:
    """The cheapest runs that take n new tokens after `past` others: the padded one first, then largest to smallest.

    sizes: rows of the prefill graphs, an int for one; a run of one row is the decode graph's, which is always there.
    costs: rows -> cost of a run in any unit; taken where it has all sizes and 1. Otherwise a run costs its rows and
    RUN_OVERHEAD more, and one size alone takes a remainder in one padded run wherever it may.
    A run of c rows drops c slots whatever its pads, so a padded run is used only while P + c <= C; a remainder after
    that goes through smaller graphs, down to decode. A full run with P + c > C forgets tokens: the caller asks for it
    only when it may.
    """
    chunks = sorted({sizes} if isinstance(sizes, int) else set(sizes), reverse=True)
    every = sorted({*chunks, 1}, reverse=True)
    if costs is None or not all(size in costs for size in every):
        if len(chunks) == 1:
            return _one_size(n, past, chunks[0], kv_len)
        costs = {size: size + RUN_OVERHEAD for size in every}
    full = _full_covers(n, every, costs)  # [m]: cost of m tokens in full runs, and the first of them
    best, first = full[n][0], Run(0, 0)
    for size in reversed(chunks):  # of equal covers the one whose padded run drops least
        if past + size > kv_len:
            continue
        for real in range(min(size - 1, n), 0, -1):
            cost = costs[size] + full[n - real][0]
            if cost < best:
                best, first = cost, Run(size, size - real)
    runs = [first] if first.rows else []
    rest = n - (first.rows - first.pads)
    sized = []
    while rest:
        size = full[rest][1]
        sized.append(size)
        rest -= size
    return runs + [Run(size, 0) for size in sorted(sized, reverse=True)]


def _one_size(n: int, past: int, c: int, kv_len: int) -> list[Run]:
    rest = n % c
    if rest == 0:
        first = []
    elif past + c <= kv_len:
        first = [Run(c, c - rest)]
    else:
        first = [Run(1, 0)] * rest
    return first + [Run(c, 0)] * (n // c)


def _full_covers(n: int, sizes: Sequence[int], costs: Mapping[int, float]) -> list[tuple[float, int]]:
    covers = [(0.0, 0)]
    for m in range(1, n + 1):
        covers.append(min((covers[m - size][0] + costs[size], size) for size in sizes if size <= m))
    return covers
