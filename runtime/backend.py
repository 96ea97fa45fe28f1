"""What runs a graph: the `Backend` protocol, and ONNX Runtime behind it.

A backend knows names, shapes and types of a graph's values, and nothing of tokens, masks or caches.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.bundle import Bundle, BundleError, GraphInfo, ValueInfo
from rollkv.runtime.weights import MappedWeights

Array = NDArray[Any]


class BackendError(RuntimeError):
    """A graph that the engine rejects or fails to run."""

    exit_code = 1


class FeedError(ValueError):
    """An array whose name, shape, type or memory layout is not what the graph takes."""

    exit_code = 2


class Backend(Protocol):
    """Runs the graphs of one bundle. This is all that a port to a board must have."""

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """One run: every input by name, C-contiguous, in the graph's type; it may not change while the run lasts.

        Returns every output by name. The arrays belong to the backend and hold until the next run of the same graph.
        """
        ...


class Binding(Protocol):
    """A graph together with the arrays that it reads and writes; whoever made it owns the arrays."""

    def rebind(self, names: Sequence[str], arrays: Array) -> None:
        """Read N inputs of one shape from one array (N, *shape), C-contiguous, of their type: not checked again."""
        ...

    def run(self) -> None:
        """One run, from and into the bound arrays."""
        ...


class BindingBackend(Backend, Protocol):
    """A backend that reads and writes a caller's own memory, and that several threads may use at once."""

    def bind(self, graph: GraphInfo, arrays: Mapping[str, Array]) -> Binding:
        """Bind every input and output of a graph, by name."""
        ...


class CopyingBinding:
    """A binding for a backend that has none: outputs are copied out of its arrays, one run at a time."""

    def __init__(self, backend: Backend, graph: GraphInfo, arrays: Mapping[str, Array], lock: threading.Lock) -> None:
        """lock: of the backend, held during a run and until its outputs are copied."""
        self._backend, self._graph, self._lock = backend, graph, lock
        self._feeds = {value.name: arrays[value.name] for value in graph.inputs}
        self._outputs = {value.name: arrays[value.name] for value in graph.outputs}

    def rebind(self, names: Sequence[str], arrays: Array) -> None:
        """See Binding."""
        self._feeds.update(zip(names, arrays, strict=True))

    def run(self) -> None:
        """See Binding."""
        with self._lock:
            outputs = self._backend.run(self._graph, dict(self._feeds))
            for name, array in self._outputs.items():
                made = outputs.get(name) if isinstance(outputs, Mapping) else None
                if made is None or made.dtype != array.dtype or made.shape != array.shape:
                    fault = "is not given" if made is None else _fault(made, array.dtype, array.shape)
                    raise BackendError(f"graph {self._graph.file}: output {name} {fault}; the backend must give it so")
                array[...] = made


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

    The weight file is mapped once for all graphs. With memory="fast" each keeps its own packed copy of the weights, as
    ONNX Runtime does unless told otherwise, and the mapped pages are let go; "low" leaves the copies out and computes
    from the mapped file. What either costs is in docs/runtime.md.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        memory: str = "fast",
        graphs: Sequence[GraphInfo] | None = None,
    ) -> None:
        """graphs: to load now, all by default; others are loaded when they are first used.

        Raises BackendError when ONNX Runtime refuses one, BundleError when it is not as listed.
        """
        if bundle.manifest.dtype == "float16":
            warnings.warn(
                "this bundle is float16: the CPU computes it in float32 with casts around (about a tenth slower than a "
                "float32 bundle, docs/performance.md), so not with an NPU's rounding",
                stacklevel=2,
            )
        self._bundle, self._threads, self._memory = bundle, threads or available_threads(), memory
        self._weights = MappedWeights(bundle.path / bundle.manifest.weights.file)
        self._engines: dict[str, _Engine] = {}
        self._loading = threading.Lock()
        self.load(bundle.manifest.graphs if graphs is None else graphs)

    def load(self, graphs: Sequence[GraphInfo]) -> None:
        """Load graphs that are not loaded yet, which their first run would do. Raises as the constructor."""
        for graph in graphs:
            self._engine(graph)

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run. Raises FeedError for a wrong feed, BackendError when ONNX Runtime fails."""
        return self._engine(graph).run(feeds)

    def bind(self, graph: GraphInfo, arrays: Mapping[str, Array]) -> Binding:
        """See BindingBackend.bind. Raises FeedError for an array that does not fit."""
        return self._engine(graph).bind(arrays)

    def _engine(self, graph: GraphInfo) -> _Engine:
        with self._loading:
            if graph.file not in self._engines:
                packed = self._memory == "fast"
                self._engines[graph.file] = _Engine(self._bundle, graph, self._weights, self._threads, packed)
                if packed:
                    self._weights.release()
            return self._engines[graph.file]


class _Engine:
    """One loaded graph."""

    def __init__(self, bundle: Bundle, graph: GraphInfo, weights: MappedWeights, threads: int, prepack: bool) -> None:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if not prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")
        self._weights = []  # ONNX Runtime has their addresses only
        for name, array in weights.of(bundle.path / graph.file).items():
            self._weights.append(onnxruntime.OrtValue.ortvalue_from_numpy(array))
            options.add_initializer(name, self._weights[-1])
        try:
            self._session = onnxruntime.InferenceSession(
                str(bundle.path / graph.file), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises many kinds
            raise BackendError(
                f"{bundle.path / graph.file}: ONNX Runtime cannot load it: {_first_line(error)}"
            ) from None
        self._graph = graph
        self._compare(bundle)
        self._own: tuple[dict[str, Array], _OrtBinding] | None = None  # of `run`

    def run(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run on the feeds, into arrays of its own."""
        self._check(self._graph.inputs, feeds, "input")
        if self._own is None:
            outputs = {value.name: np.zeros(value.shape, value.dtype) for value in self._graph.outputs}
            self._own = outputs, _OrtBinding(self._session, self._graph, {**feeds, **outputs})
        outputs, binding = self._own
        for name, array in feeds.items():
            binding.rebind([name], array[None])
        binding.run()
        return outputs

    def bind(self, arrays: Mapping[str, Array]) -> _OrtBinding:
        """A binding of every input and output."""
        self._check([*self._graph.inputs, *self._graph.outputs], arrays, "value")
        return _OrtBinding(self._session, self._graph, arrays)

    def _check(self, values: Sequence[ValueInfo], arrays: Mapping[str, Array], kind: str) -> None:
        for value in values:
            array, dtype, shape = arrays.get(value.name), np.dtype(value.dtype), tuple(value.shape)
            if array is None or array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
                raise FeedError(f"graph {self._graph.file}: {kind} {value.name} {_fault(array, dtype, shape)}")
        if len(arrays) != len(values):
            extra = sorted(set(arrays) - {value.name for value in values})
            raise FeedError(f"graph {self._graph.file}: {extra[0]!r} is no {kind} of it")

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


class _OrtBinding:
    """A graph of ONNX Runtime with its inputs and outputs in NumPy memory.

    Rebinding is most of what a decode step costs on the host. ONNX Runtime's own methods take an array for each input,
    or wrap an address in a device that is made anew; what they call takes the address as it is, in half the time.
    """

    def __init__(self, session: Any, graph: GraphInfo, arrays: Mapping[str, Array]) -> None:
        from onnxruntime.capi.onnxruntime_pybind11_state import OrtDevice

        self._graph, self._session = graph, session
        self._binding = session.io_binding()
        self._bind = self._binding._iobinding.bind_input
        self._device = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
        self._arrays = dict(arrays)  # ONNX Runtime has their addresses only
        for value in graph.inputs:
            self.rebind([value.name], arrays[value.name][None])
        for value in graph.outputs:
            array = arrays[value.name]
            self._binding.bind_output(value.name, "cpu", 0, array.dtype, value.shape, _address(array))

    def rebind(self, names: Sequence[str], arrays: Array) -> None:
        """See Binding."""
        bind, device, kind, shape = self._bind, self._device, arrays.dtype.type, arrays.shape[1:]
        address, step = _address(arrays), arrays.strides[0]
        self._arrays[names[0]] = arrays
        for name in names:
            bind(name, device, kind, shape, address)
            address += step

    def run(self) -> None:
        """See Binding.run. Raises BackendError when ONNX Runtime fails."""
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises many kinds
            raise BackendError(f"graph {self._graph.file}: ONNX Runtime failed: {_first_line(error)}") from None


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


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
