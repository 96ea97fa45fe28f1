"""What every feed of the toy model must be, by section 2 of the contract; the arrays are looked at while they run."""

from __future__ import annotations

from typing import Any

import numpy as np
from toy_model import M, ToyBackend
from toy_reference import pads_of


class Watching(ToyBackend):
    """Keeps copies of what it is fed; asserts what only the arrays themselves can show."""

    def __init__(self, bundle):
        super().__init__(bundle)
        self.runs = []

    def run(self, graph, feeds):
        assert sorted(feeds) == sorted(value.name for value in graph.inputs)
        for value in graph.inputs:
            array = feeds[value.name]
            assert array.dtype == value.dtype, value.name
            assert list(array.shape) == value.shape, value.name
            assert array.flags.c_contiguous, value.name
            assert np.isfinite(array).all(), value.name
        self.runs.append((graph, {name: array.copy() for name, array in feeds.items()}))
        return super().run(graph, feeds)


def visible(slots: int, rows: int, pads: int, past: int, window: int | None) -> np.ndarray:
    """The mask (rows, slots) of a run after `past` tokens: section 2 of the contract, "One run"."""
    position = np.full(slots, -1)
    position[: slots - rows] = past - (slots - rows) + np.arange(slots - rows)
    position[slots - rows + pads :] = past + np.arange(rows - pads)
    query = past + np.arange(-pads, rows - pads)
    seen = (position >= 0) & (position <= query[:, None])
    if window is not None:
        seen &= query[:, None] - position < window
    seen[:pads] = False
    return np.where(seen, 0.0, M)


def check_run(bundle: Any, graph: Any, feeds: dict[str, np.ndarray], past: int) -> None:
    m, pads = bundle.manifest, pads_of(feeds)
    assert pads < graph.rows
    assert pads == 0 or past + graph.rows <= m.max_kvcache_len
    able = [g.kv_len for g in m.graphs if (g.role, g.rows) == (graph.role, graph.rows) and past + g.rows <= g.kv_len]
    if m.kv_layout == "bskd":  # the last slots are one stretch: every run takes the smallest graph that it can
        assert graph.kv_len == min(able, default=m.max_kvcache_len)
    else:
        assert graph.kv_len in (*able, m.max_kvcache_len)
    assert not feeds["input_ids"][0, :pads].any()
    assert not feeds["position_ids"][0, :pads].any()
    assert feeds["position_ids"][0, pads:].tolist() == list(range(past, past + graph.rows - pads))
    for name, window in (("attention_mask", None), ("sliding_attention_mask", m.layers[1].window)):
        if name in feeds:
            mask = feeds[name][0, 0]
            np.testing.assert_array_equal(mask, visible(mask.shape[1], graph.rows, pads, past, window), name)
