"""What runs a graph: the `Backend` protocol, and ONNX Runtime behind it.

A backend knows names, shapes and types of a graph's values, and nothing of tokens, masks or caches.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.bundle import Bundle, BundleError, GraphInfo

Array = NDArray[Any]


class BackendError(RuntimeError):
    """A graph that the engine rejects or fails to run."""

    exit_code = 1


class FeedError(ValueError):
    """An array whose name, shape, type or memory layout is not what the graph takes."""

    exit_code = 2


class Backend(Protocol):
    """Runs the graphs of one bundle."""

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """One run: every input by name, C-contiguous, in the graph's type; it may not change while the run lasts.

        Returns every output by name. The arrays belong to the backend and hold until the next run of the same graph.
        """
        ...


def available_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def import_onnxruntime() -> Any:
    """The onnxruntime module, imported with its telemetry off.

    From 1.29 on its Linux builds report each session (file name, graph and weight hashes) to their maker and keep an
    id on the disk, unless ORT_DISABLE_TELEMETRY is set before the import (its pull request 27379). A value that the
    user has set stays.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


class OrtBackend:
    """ONNX Runtime on the CPU, inputs and outputs bound to NumPy memory.

    Both graphs map the one weight file, whose pages the system shares. By default each also keeps its own packed copy
    of the weights, as ONNX Runtime does unless told otherwise; `low_memory` leaves the copies out and computes from
    the mapped file. What either costs is in docs/runtime.md.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None, low_memory: bool = False) -> None:
        """Load every graph. Raises BackendError when ONNX Runtime refuses one, BundleError when it is not as listed."""
        if bundle.manifest.dtype == "float16":
            warnings.warn(
                "this bundle is float16: the CPU computes it slowly, and not with an NPU's rounding", stacklevel=2
            )
        threads = threads or available_threads()
        self._engines = {
            graph.file: _Engine(bundle, graph, threads, prepack=not low_memory) for graph in bundle.manifest.graphs
        }

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run. Raises FeedError for a wrong feed, BackendError when ONNX Runtime fails."""
        return self._engines[graph.file].run(feeds)


class _Engine:
    """One loaded graph with its output arrays."""

    def __init__(self, bundle: Bundle, graph: GraphInfo, threads: int, prepack: bool) -> None:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if not prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            self._session = onnxruntime.InferenceSession(
                str(bundle.path / graph.file), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises many kinds
            raise BackendError(
                f"{bundle.path / graph.file}: ONNX Runtime cannot load it: {_first_line(error)}"
            ) from None
        self._graph = graph
        self._inputs = [(value.name, np.dtype(value.dtype), tuple(value.shape)) for value in graph.inputs]
        self._compare(bundle)
        self._binding = self._session.io_binding()
        self._outputs: dict[str, Array] = {}
        for value in graph.outputs:
            array = self._outputs[value.name] = np.zeros(value.shape, value.dtype)
            address = array.__array_interface__["data"][0]
            self._binding.bind_output(value.name, "cpu", 0, array.dtype, value.shape, address)

    def run(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Bind, run, and give the output arrays out."""
        bind = self._binding.bind_cpu_input  # takes the array's own memory, and costs a third of bind_input
        for name, dtype, shape in self._inputs:
            array = feeds.get(name)
            if array is None or array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
                raise FeedError(f"graph {self._graph.file}: input {name} {_fault(array, dtype, shape)}")
            bind(name, array)
        if len(feeds) != len(self._inputs):
            extra = sorted(set(feeds) - {name for name, _, _ in self._inputs})
            raise FeedError(f"graph {self._graph.file}: {extra[0]!r} is no input of it")
        self._execute()
        return self._outputs

    def _execute(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises many kinds
            raise BackendError(f"graph {self._graph.file}: ONNX Runtime failed: {_first_line(error)}") from None

    def _compare(self, bundle: Bundle) -> None:
        """The manifest and the graph must name the same values with the same shapes and types."""
        for listed, loaded in (
            (self._graph.inputs, self._session.get_inputs()),
            (self._graph.outputs, self._session.get_outputs()),
        ):
            says = [(v.name, v.shape, _ORT_TYPES[v.dtype]) for v in listed]
            has = [(v.name, v.shape, v.type) for v in loaded]
            if says != has:
                odd = next((pair for pair in zip(says, has, strict=False) if pair[0] != pair[1]), (len(says), len(has)))
                file = bundle.path / self._graph.file
                raise BundleError(f"{file}: the manifest says {odd[0]}, the graph has {odd[1]}; export again")


_ORT_TYPES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int32": "tensor(int32)",
    "int64": "tensor(int64)",
}


def _fault(array: Array | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    if array is None:
        return "is not fed"
    if array.dtype != dtype:
        return f"got {array.dtype.name}, want {dtype.name}"
    if array.shape != shape:
        return f"got shape {array.shape}, want {shape}"
    return "is not C-contiguous"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
