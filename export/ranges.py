"""What real numbers do inside of a graph: its largest residual, square and score of every layer, on the user's text.

The graph file of the bundle runs in ONNX Runtime without its optimisations, with one more output for every floating
value, its largest magnitude, and the residual stream itself. Held against what float16 and int16 can say. Knows no
target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper

from rollkv.models.config import FLOAT16_MAX
from rollkv.runtime.backend import Array, available_threads, import_onnxruntime
from rollkv.runtime.bundle import Bundle, GraphInfo
from rollkv.runtime.session import Session

INT16_STEPS = 32767
COARSE = 1 / 64  # of the median magnitude: an int16 step above it leaves a usual value less than six bits
KINDS = ("residual", "square", "score", "other")
_LAYER = re.compile(r"layers__(\d+)__")


@dataclass
class Reading:
    """The largest magnitude of a value over all runs; of the residual stream also the median, where it was largest."""

    value: str
    node: str
    op: str
    kind: str
    layer: int | None
    largest: float = 0.0
    median: float | None = None
    run: str = ""  # where it was largest

    @property
    def overflows(self) -> bool:
        """Whether float16 cannot hold it."""
        return not self.largest <= FLOAT16_MAX

    @property
    def int16_step(self) -> float:
        """What one step of a symmetric int16 scale over this range is."""
        return self.largest / INT16_STEPS


@dataclass
class Ranges:
    """All readings of a bundle in the order in which its first graph computes them."""

    readings: list[Reading] = field(default_factory=list)
    hidden_rows: int = 0  # rows of the runs that saw nothing: pads
    runs: list[str] = field(default_factory=list)

    def of(self, kind: str) -> dict[int, Reading]:
        """The largest reading of a kind in each layer."""
        best: dict[int, Reading] = {}
        for reading in self.readings:
            if reading.kind != kind or reading.layer is None:
                continue
            if reading.layer not in best or reading.largest > best[reading.layer].largest:
                best[reading.layer] = reading
        return dict(sorted(best.items()))

    @property
    def first_overflow(self) -> Reading | None:
        """The first value, in order of computation, that float16 cannot hold."""
        return next((reading for reading in self.readings if reading.overflows), None)


class WatchingBackend:
    """Runs the graphs of a bundle with the magnitudes of every value beside their outputs."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.ranges = bundle, Ranges()
        self._watched: dict[str, tuple[object, list[Reading]]] = {}
        self._by_value: dict[tuple[str, str], Reading] = {}

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run."""
        if graph.file not in self._watched:
            model, readings = watched(self.bundle, graph)
            self._watched[graph.file] = (plain_session(self.bundle, model), readings)
            self.ranges.readings += readings
        session, readings = self._watched[graph.file]
        names = [value.name for value in graph.outputs]
        streams = [reading.value for reading in readings if reading.kind == "residual"]
        more = [f"max/{i}" for i in range(len(readings))]
        outputs = session.run([*names, *streams, *more], dict(feeds))  # type: ignore[attr-defined]
        values = dict(zip(streams, outputs[len(names) :], strict=False))
        masks = [feeds[value.name] for value in graph.inputs if value.role.endswith("attention_mask")]
        if masks:
            self.ranges.hidden_rows += int((masks[0] < 0).all(-1).sum())
        where = f"{graph.file}, run {len(self.ranges.runs) + 1}"
        self.ranges.runs.append(where)
        for reading, largest in zip(readings, outputs[len(names) + len(streams) :], strict=True):
            if not float(largest) <= reading.largest:
                reading.largest, reading.run = float(largest), where
                if reading.kind == "residual":
                    reading.median = float(np.median(np.abs(values[reading.value])))
        return dict(zip(names, outputs, strict=False))


def watched(bundle: Bundle, info: GraphInfo) -> tuple[onnx.ModelProto, list[Reading]]:
    """The graph with an output `max/i` for each floating value that a node makes, and what each is."""
    model = onnx.load(bundle.path / info.file, load_external_data=False)
    graph = model.graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output)}
    kinds = _kinds(model, info)
    readings: list[Reading] = []
    more: list[onnx.NodeProto] = []
    for node in graph.node:
        for name in node.output:
            if types.get(name) not in (TensorProto.FLOAT, TensorProto.FLOAT16):
                continue
            i = len(readings)
            more += _magnitude(name, i)
            layer = _LAYER.match(node.name)
            readings.append(
                Reading(name, node.name, node.op_type, kinds.get(name, "other"), int(layer[1]) if layer else None)
            )
    graph.node.extend(more)
    for reading in readings:
        if reading.kind == "residual":
            graph.output.append(next(value for value in graph.value_info if value.name == reading.value))
    for i in range(len(readings)):
        graph.output.append(helper.make_tensor_value_info(f"max/{i}", TensorProto.FLOAT, []))
    return model, readings


def plain_session(bundle: Bundle, model: onnx.ModelProto) -> object:
    """A changed graph of a bundle in ONNX Runtime, unoptimised, with the bundle's weights."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = available_threads()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(bundle: Bundle, ids: Sequence[int], steps: int = 2) -> Ranges:
    """The ranges of a prompt's runs and of a few steps after it."""
    backend = WatchingBackend(bundle)
    session = Session(bundle, backend=backend)
    logits = session.prefill(ids)
    for _ in range(min(steps, session.room())):
        logits = session.decode(int(np.argmax(logits)))
    return backend.ranges


def _kinds(model: onnx.ModelProto, info: GraphInfo) -> dict[str, str]:
    """Which values are the residual stream after a layer, squares of a norm, and scores before the mask."""
    graph = model.graph
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    masks = {value.name for value in info.inputs if value.role.endswith("attention_mask")}
    kinds: dict[str, str] = {}
    for node in graph.node:
        if node.op_type == "Mul" and node.input[0] == node.input[1]:
            if any(reader.op_type == "ReduceMean" for reader in readers.get(node.output[0], [])):
                kinds[node.output[0]] = "square"
        elif node.op_type == "Add" and any(name in masks for name in node.input):
            for name in node.input:
                if name not in masks:
                    kinds[name] = "score"
        elif node.op_type in ("Reshape", "Concat") and any(name in masks for name in node.input):
            masks.update(node.output)
        for name in node.output:
            if re.fullmatch(r"layers__\d+__x", name):
                kinds[name] = "residual"
    return kinds


def _magnitude(name: str, i: int) -> list[onnx.NodeProto]:
    """The largest magnitude of a value, in float32."""
    return [
        helper.make_node("Cast", [name], [f"wide/{i}"], to=TensorProto.FLOAT),
        helper.make_node("Abs", [f"wide/{i}"], [f"abs/{i}"]),
        helper.make_node("ReduceMax", [f"abs/{i}"], [f"max/{i}"], keepdims=0),
    ]
