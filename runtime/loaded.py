"""A bundle in memory: its graphs, weights and tables, loaded once and shared by any number of sessions.

Has nothing of a sequence: tokens and caches are a `Session`'s. Threads may share it.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from rollkv.runtime.align import PromptError, check_word, whole_number
from rollkv.runtime.backend import Array, Backend, Binding, CopyingBinding, OrtBackend
from rollkv.runtime.bundle import Bundle, BundleError, GraphInfo, Manifest, open_bundle
from rollkv.runtime.embedding import EmbeddingTable
from rollkv.runtime.graph_head import GraphHead
from rollkv.runtime.head import HostHead, OuterHead
from rollkv.runtime.limits import MEMORIES


class LoadedBundle:
    """What N sessions have in common."""

    def __init__(
        self,
        bundle: str | Path | Bundle,
        *,
        backend: Backend | None = None,
        threads: int | None = None,
        memory: str = "fast",
        costs: Mapping[int, float] | None = None,
        chunk_sizes: Sequence[int] | None = None,
    ) -> None:
        """bundle: the folder, or one that is open. backend: what runs the graphs, by default ONNX Runtime.

        memory: "fast", where ONNX Runtime keeps a packed copy of the weights for each graph, or "low", without them.
        costs: rows of a graph -> what a run of it costs, in any unit; by them prompts are divided among chunk sizes.
        chunk_sizes: prefill graphs to load at once; the engine loads others when they are first used. None: all.
        Raises BundleError when the folder does not hold a bundle, PromptError for costs that do not fit the graphs.
        """
        if not isinstance(bundle, str | os.PathLike | Bundle):
            raise BundleError(f"bundle is {bundle!r}, allowed: the folder that `rollkv export` wrote")
        check_word("memory", memory, MEMORIES)
        self.bundle = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
        m = self.bundle.manifest
        graphs = sorted(m.driven, key=lambda graph: graph.kv_len)
        whole = [graph for graph in graphs if graph.kv_len == m.max_kvcache_len]
        prefill = sorted((graph for graph in whole if graph.role == "prefill"), key=lambda graph: graph.rows)
        self.prefill: dict[int, GraphInfo] = {graph.rows: graph for graph in prefill}  # those that see C slots
        self.decode: GraphInfo = next(graph for graph in whole if graph.role == "decode")
        self._lengths = {
            each.file: [graph for graph in graphs if (graph.role, graph.rows) == (each.role, each.rows)]
            for each in whole
        }
        self.costs = {} if costs is None else self._read_costs(costs)
        head = m.head_graph
        if backend is None:
            graphs = [g for g in graphs if g.role == "decode" or chunk_sizes is None or g.rows in chunk_sizes]
            backend = OrtBackend(self.bundle, threads, memory, graphs if head is None else [*graphs, head])
        self.backend: Backend = backend
        roles = {value.role for value in self.decode.inputs}
        self.tables = {
            role: EmbeddingTable(self.bundle.path / table.file, table)
            for role, table in (("embeds", m.embedding), ("per_layer_inputs", m.per_layer_embedding))
            if role in roles and table is not None
        }
        self._running = threading.Lock()
        self.head: OuterHead | None = None
        if head is not None:
            self.head = GraphHead(head, self.bind)
        elif m.head_table is not None:
            self.head = HostHead(self.bundle.path, m)

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    @cached_property
    def sha256(self) -> str:
        """Of the manifest, which holds the hashes of all other files: what a cache that was saved belongs to."""
        return hashlib.sha256(self.manifest.to_json().encode()).hexdigest()

    def chosen(self, sizes: Sequence[int] | None) -> list[int]:
        """Rows of the prefill graphs to use, ascending; None: all. Raises PromptError for one that is not there."""
        there = list(self.prefill)
        if sizes is None:
            return there
        for size in sizes:
            if size not in there:
                raise PromptError(f"chunk size {size} is not in this bundle; it has {', '.join(map(str, there))}")
        if not sizes:
            raise PromptError(f"no chunk size is given; this bundle has {', '.join(map(str, there))}")
        return sorted(set(sizes))

    def serving(self, graph: GraphInfo, past: int, least: int = 0) -> GraphInfo:
        """The graph of as many rows, and of the smallest visible length C' >= least with P + c <= C'.

        graph: one that sees C slots; it serves where none is smaller, and whenever tokens are forgotten.
        """
        needed = max(past + graph.rows, least)
        return next((each for each in self._lengths[graph.file] if each.kv_len >= needed), graph)

    @cached_property
    def verifier(self) -> GraphInfo | None:
        """The smallest prefill graph of two and more rows that gives the logits of every row."""
        graphs = (graph for rows, graph in self.prefill.items() if graph.head == "all" and rows > 1)
        return next(graphs, None)

    def prepare(self, graph: GraphInfo) -> None:
        """Load a graph and those of its smaller visible lengths, so that no run of them waits for it."""
        if isinstance(self.backend, OrtBackend):
            self.backend.load(self._lengths[graph.file])

    def bind(self, graph: GraphInfo, arrays: Mapping[str, Array]) -> Binding:
        """A graph with the arrays of a session, every input and output by name."""
        bind = getattr(self.backend, "bind", None)
        if bind is None:
            return CopyingBinding(self.backend, graph, arrays, self._running)
        binding: Binding = bind(graph, arrays)
        return binding

    def _read_costs(self, costs: Mapping[int, float]) -> dict[int, float]:
        sizes = sorted({1, *self.prefill})
        allowed = f"a positive number for each of {', '.join(map(str, sizes))}, the rows of the graphs"
        try:
            read = {size: float(costs[size]) for size in sizes}
        except (LookupError, TypeError, ValueError):
            raise PromptError(f"costs is {str(costs)[:80]}, allowed: {allowed}") from None
        if not all(math.isfinite(cost) and cost > 0 for cost in read.values()):
            raise PromptError(f"costs is {str(costs)[:80]}, allowed: {allowed}")
        return read

    def measure(self, repeats: int = 3) -> dict[int, float]:
        """Time every graph and set `costs`: rows -> seconds, the median of `repeats` runs after one to warm up.

        Every slot is visible, as at the end of a full cache. Raises PromptError for fewer than one repeat.
        """
        if whole_number("repeats", repeats) < 1:
            raise PromptError(f"repeats is {repeats}, must be at least 1")
        costs = {}
        for graph in (self.decode, *self.prefill.values()):
            arrays = {value.name: np.zeros(value.shape, value.dtype) for value in (*graph.inputs, *graph.outputs)}
            binding, times = self.bind(graph, arrays), []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                binding.run()
                times.append(time.perf_counter() - start)
            costs[graph.rows] = statistics.median(times[1:])
        self.costs = costs
        return dict(costs)


def read_sizes(sizes: Sequence[int] | None) -> list[int] | None:
    """Chunk sizes that were asked for, as whole numbers."""
    if sizes is None:
        return None
    if isinstance(sizes, str | bytes) or not isinstance(sizes, Iterable):
        raise PromptError(f"chunk_sizes is {sizes!r}, allowed: several whole numbers, such as [128]")
    return [whole_number("chunk size", size) for size in sizes]
