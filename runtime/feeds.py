"""What one graph reads and writes in one session: arrays made once, filled anew for every run, and bound to the engine.

Positions, masks and rotations come from `align.py`, `mask.py` and `rope.py`, the logits of graphs that give hidden
states from `head.py` or `graph_head.py`. P, p and c as in the contract.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.align import run_positions
from rollkv.runtime.backend import Array, Binding
from rollkv.runtime.cover import Run
from rollkv.runtime.embedding import EmbeddingTable
from rollkv.runtime.kv import KvCache
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.manifest import HEAD_ROLES, ROTATION_ROLES, GraphInfo
from rollkv.runtime.mask import fill_mask
from rollkv.runtime.prompt import Prompt
from rollkv.runtime.rope import Rotation, query_scale

_ALIGNMENT = 64  # bytes


class GraphArrays:
    """The arrays of one graph in one session. Inputs keep their addresses, but for caches that move."""

    def __init__(self, loaded: LoadedBundle, graph: GraphInfo, cache: KvCache) -> None:
        self.graph = graph
        self._m, self._tables, self._cache = loaded.manifest, loaded.tables, cache
        self._window = next((layer.window for layer in self._m.layers if layer.window is not None), None)
        self._inputs: dict[str, Array] = {
            value.name: np.zeros(value.shape, value.dtype)
            for value in graph.inputs
            if value.role not in ("past_key", "past_value")
        }
        self._filled = [(v.role, self._inputs[v.name]) for v in graph.inputs if v.name in self._inputs]
        fed = {(v.role, v.rope): self._inputs[v.name] for v in graph.inputs if v.rope is not None}
        self._turned = [
            (Rotation(info, graph.rows), fed["rope_cos", name][0], fed["rope_sin", name][0])
            for name, info in self._m.rope.items()
            if ("rope_cos", name) in fed
        ]
        self._scaled = [
            (info, fed["rope_query_scale", name][0])
            for name, info in self._m.rope.items()
            if ("rope_query_scale", name) in fed
        ]
        self._positions = np.zeros((3 if self._m.three_part else 1, graph.rows), np.int64)
        end = next(value for value in graph.outputs if value.role in HEAD_ROLES)
        # What comes out lies in one stretch, so that one look finds a number that is not finite.
        shapes = [group.shape_of(graph.rows) for group in cache.groups]
        self._out, (first, *self.new) = _stretch([tuple(end.shape), *shapes], end.dtype)
        self._more: list[Array] = []
        if end.dtype != self._m.dtype:
            stretch, self.new = _stretch(shapes, self._m.dtype)
            self._more = [stretch]
        self._ends: Array = first[0]  # (1, V), (rows, V) or (1, H)
        self._head = loaded.head
        self._logits: Array = self._ends
        if self._head is not None:
            self._logits, self._scratch = np.zeros((1, self._m.vocab_size), np.float32), self._head.scratch()
            self._flags = np.empty(self._m.vocab_size, np.bool_)
        # each with room for a flag for every number
        self._parts = [(part, np.empty(len(part), np.bool_)) for part in (self._out, *self._more)]
        outputs = {end.name: first}
        for group, new in zip(cache.groups, self.new, strict=True):
            outputs |= dict(zip(group.news, new, strict=True))
        self._outputs = outputs
        self._starts: list[int] = []  # of each buffer, as bound
        self._binding: Binding | None = None
        self._loaded = loaded

    @property
    def logits(self) -> Array:
        """Of the last row, (V,); until the next run."""
        last: Array = self._logits[-1]
        return last

    @property
    def row_logits(self) -> Array:
        """Of every row of a graph with head "all", (rows, V); until the next run."""
        return self._logits

    def ends(self) -> list[tuple[str, str, Array]]:
        """What the last run gave beside keys and values: what to call it, the graph that it is of, the numbers."""
        if self._head is None:
            return [("logits", self.graph.file, self._logits)]
        head = self._m.head_graph or self.graph
        return [("hidden values", self.graph.file, self._ends), ("logits", head.file, self._logits)]

    def feeds(self) -> dict[str, Array]:
        """Every input by name, as the next run reads it."""
        return {**self._inputs, **self._pasts()}

    def fill(self, run: Run, past: int, rotary: int, prompt: Prompt) -> None:
        """Make the inputs of a run after `past` tokens, the first of which has the rotary position `rotary`."""
        pads, positions = run.pads, self._positions  # (1, rows) or (3, rows)
        if prompt.positions is not None:
            positions[:, :pads] = 0
            positions[:, pads:] = prompt.positions
        else:
            positions[...] = run_positions(rotary, pads, run.rows)
        for rotation, cos, sin in self._turned:
            rotation.fill(positions, cos, sin)
        for info, scale in self._scaled:
            scale[...] = query_scale(info, positions)
        for role, array in self._filled:
            if role == "ids":
                array[0, :pads] = 0
                array[0, pads:] = prompt.ids
            elif role == "attention_mask":
                fill_mask(array[0, 0], past, pads, self._m.mask_value)
            elif role == "sliding_attention_mask":
                fill_mask(array[0, 0], past, pads, self._m.mask_value, self._window)
            elif role == "position_ids":  # (1, rows) or (3, 1, rows)
                array[...] = positions.reshape(array.shape)
            elif role in ("embeds", "per_layer_inputs"):
                array[0, :pads] = 0
                given = prompt.embeds if role == "embeds" else None
                array[0, pads:] = _rows(self._tables, role, prompt) if given is None else given
            else:
                assert role in ROTATION_ROLES, role  # filled above

    def run(self, wanted: bool = True) -> bool:
        """Run the graph on what `fill` made and the caches as they are; whether all that came out is finite.

        wanted: whether a head of its own, on the host or in a graph, is to give the logits.
        """
        starts = [group.buffer.start for group in self._cache.groups]
        if self._binding is None:
            self._binding = self._loaded.bind(self.graph, {**self.feeds(), **self._outputs})
        elif starts != self._starts:
            self._starts = []  # should one fail, the next run binds them all again
            for group in self._cache.groups:
                self._binding.rebind(group.names, group.visible(self.graph.kv_len))
        self._starts = starts
        self._binding.run()
        if not all(_all_finite(part, flags) for part, flags in self._parts):
            return False
        if self._head is None or not wanted:
            return True
        self._head.logits(self._ends[0], self._logits[0], self._scratch)
        return _all_finite(self._logits[0], self._flags)

    def clear(self) -> None:
        """Zero what came out."""
        self._logits.fill(0)
        for part, _ in self._parts:
            part.fill(0)

    def _pasts(self) -> dict[str, Array]:
        return {
            value.name: window
            for group in self._cache.groups
            for value, window in zip(group.pasts, group.visible(self.graph.kv_len), strict=True)
        }


def _rows(tables: Mapping[str, EmbeddingTable], role: str, prompt: Prompt) -> NDArray[np.float32]:
    return tables[role].rows(prompt.ids)


def _all_finite(part: Array, flags: NDArray[np.bool_]) -> bool:
    """Whether every number is finite. flags: as long as part.

    The sum is looked at first: it is finite only if all are. `einsum` adds up in half the time that `sum` or a flag
    for each number takes.
    """
    if part.dtype == np.float32 and math.isfinite(np.einsum("i->", part)):
        return True
    return bool(np.count_nonzero(np.isfinite(part, out=flags)) == len(part))


def _stretch(shapes: list[tuple[int, ...]], dtype: str) -> tuple[Array, list[Array]]:
    """One flat array, and views of it in these shapes, each on an address that is a multiple of _ALIGNMENT."""
    step = _ALIGNMENT // np.dtype(dtype).itemsize
    sizes = [-(-int(np.prod(shape)) // step) * step for shape in shapes]
    memory = np.zeros(sum(sizes) + step, dtype)
    skip = -memory.__array_interface__["data"][0] % _ALIGNMENT // memory.itemsize
    flat = memory[skip : skip + sum(sizes)]
    ends = np.cumsum(sizes).tolist()
    return flat, [
        flat[end - size : end - size + int(np.prod(shape))].reshape(shape)
        for end, size, shape in zip(ends, sizes, shapes, strict=True)
    ]
