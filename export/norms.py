"""The RMS norms of a graph in another form with the same numbers, for compilers that want another one.

The canonical graph has x x -> ReduceMean over the last axis -> + eps -> Sqrt -> x / it. `norm_form` writes each of them
anew, after the graph has its opset, and refuses a graph in which one of the old form is left. Knows no weights' values
and no model: a norm is known by its nodes. Which compiler wants which form is said in `targets.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

FLOOR, REACH = 1e-4, 64.0  # of the rowmax form: m = max|x| / REACH + FLOOR, so no number of y = x / m is above 64
_AXES_ARE_AN_INPUT = 18  # the opset from which ReduceMean and ReduceMax take them so

Pass = Callable[[onnx.ModelProto], tuple[onnx.ModelProto, bool]]


@dataclass(frozen=True)
class Norm:
    """The nodes of one norm x / sqrt(mean(x x) + eps), by their place in the graph."""

    square: int
    mean: int
    add: int
    root: int
    quotient: int
    x: str
    eps: float

    @property
    def nodes(self) -> tuple[int, ...]:
        """All of them."""
        return self.square, self.mean, self.add, self.root, self.quotient


def norm_form(form: str) -> Pass:
    """The pass that gives every norm the form `form`, one of `targets.NORM_OPS`; "plain" is the one they have.

    rowmax: m = max|x| / 64 + 1e-4, y = x / m, t = sqrt(eps) / m, then y / sqrt(mean(y y) + t t), which is the same
    number: numerator and denominator are divided by m. y y never exceeds 4096, whatever x is; no constant that is added
    is below 1e-4. rsqrt: x times Reciprocal(Sqrt(mean + eps)). native: RMSNormalization, with the weight as its scale
    where one is multiplied, ones where none is. A layer norm has its mean taken off first, and that stays: with
    x' = x - mean(x), x' / sqrt(mean(x' x') + eps) is an RMS norm of x'.
    """

    def rewrite_norms(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
        """Raises ValueError when a norm of the old form is left."""
        if form == "plain":
            return model, False
        graph = _Graph(model)
        found = list(graph.norms())
        new: dict[int, list[onnx.NodeProto]] = {}  # in the place of the node with that number
        for norm in found:
            made, last = _WRITERS[form](graph, norm)
            new |= {node: [] for node in norm.nodes}
            new[last] = made
        nodes = [node for i, old in enumerate(graph.nodes) for node in new.get(i, [old])]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        read = {name for node in nodes for name in node.input}
        kept = [t for t in model.graph.initializer if t.name in read]
        kept += [numpy_helper.from_array(value, name) for name, value in graph.constants.items()]
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)
        left = old_norms(model)
        if left:
            raise ValueError(f"{len(left)} norms were not rewritten as {form}: {', '.join(left[:5])}")
        return model, bool(found)

    return rewrite_norms


def old_norms(model: onnx.ModelProto) -> list[str]:
    """Means of squares, by the node's name, that do not belong to a norm of the forms rowmax or rsqrt."""
    graph = _Graph(model)
    return [node.name or node.output[0] for node in graph.nodes if graph.averages_square(node) and graph.is_old(node)]


class _Graph:
    """Lookups in a graph: who makes a value, who reads it, what is constant."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.nodes = model, list(model.graph.node)
        self.opset = model.opset_import[0].version
        self.constants: dict[str, NDArray[Any]] = {}  # new ones
        self._values = {t.name: t for t in model.graph.initializer}
        self._maker = {name: i for i, node in enumerate(self.nodes) for name in node.output}
        self._readers: dict[str, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for name in node.input:
                self._readers.setdefault(name, []).append(i)
        self._outputs = {value.name for value in model.graph.output}
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        self._shapes = {
            value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]
            for value in (*inferred.value_info, *inferred.input, *inferred.output)
        }
        self._given = {value.name for value in model.graph.input} | set(self._values)

    def shape(self, name: str) -> list[int]:
        """Of a value."""
        return list(self._values[name].dims) if name in self._values else self._shapes[name]

    def made_by(self, name: str, op: str) -> onnx.NodeProto | None:
        """The node that makes a value, if it is of that op."""
        i = self._maker.get(name)
        return self.nodes[i] if i is not None and self.nodes[i].op_type == op else None

    def only_reader(self, name: str, op: str) -> int | None:
        """The one node that reads a value, if it is one of that op."""
        readers = self._readers.get(name, [])
        alone = len(readers) == 1 and name not in self._outputs
        return readers[0] if alone and self.nodes[readers[0]].op_type == op else None

    def number(self, name: str) -> float | None:
        """The value of a constant of one element."""
        tensor = self._values.get(name)
        value = None if tensor is None else numpy_helper.to_array(tensor)
        return None if value is None or value.size != 1 else float(value.item())

    def norms(self) -> Iterator[Norm]:
        """Every norm whose nodes follow each other and are read by nothing else."""
        for square, node in enumerate(self.nodes):
            if node.op_type != "Mul" or node.input[0] != node.input[1]:
                continue
            x = node.input[0]
            mean = self.only_reader(node.output[0], "ReduceMean")
            if mean is None or not self._over_last_axis(self.nodes[mean]):
                continue
            add = self.only_reader(self.nodes[mean].output[0], "Add")
            root = None if add is None else self.only_reader(self.nodes[add].output[0], "Sqrt")
            quotient = None if root is None else self.only_reader(self.nodes[root].output[0], "Div")
            if add is None or root is None or quotient is None:
                continue
            others = [name for name in self.nodes[add].input if name != self.nodes[mean].output[0]]
            eps = self.number(others[0]) if len(others) == 1 else None
            if eps is not None and eps > 0 and list(self.nodes[quotient].input) == [x, self.nodes[root].output[0]]:
                yield Norm(square, mean, add, root, quotient, x, eps)

    def averages_square(self, node: onnx.NodeProto) -> bool:
        """Whether it is a ReduceMean of x x, or of x to the power of 2."""
        if node.op_type != "ReduceMean":
            return False
        square, power = (self.made_by(node.input[0], op) for op in ("Mul", "Pow"))
        return (square is not None and square.input[0] == square.input[1]) or power is not None

    def is_old(self, mean: onnx.NodeProto) -> bool:
        """Whether a mean of squares belongs to no norm that this module writes."""
        add = self.only_reader(mean.output[0], "Add")
        root = None if add is None else self.only_reader(self.nodes[add].output[0], "Sqrt")
        if add is None or root is None:
            return True
        if self.only_reader(self.nodes[root].output[0], "Reciprocal") is not None:
            return False
        scaled = [self.made_by(name, "Mul") for name in self.nodes[add].input]
        return not any(t is not None and self.made_by(t.input[0], "Div") for t in scaled)

    def constant(self, name: str, value: NDArray[Any] | float) -> str:
        """A new float32 constant, once for each name."""
        self.constants[name] = np.asarray(value, np.float32)
        return name

    def is_scale(self, name: str, shape: list[int]) -> bool:
        """Whether a value is the weight of a norm of values of that shape, and not something that a run is fed.

        A weight has one axis, or two where each head has its own; both broadcast to x as RMSNormalization asks, and
        ONNX Runtime's kernel takes both.
        """
        if name not in self._given:
            return False
        dims = self.shape(name)
        return 1 <= len(dims) <= 2 and dims == shape[-len(dims) :]

    def reduce(self, op: str, x: str, y: str, axes: str) -> onnx.NodeProto:
        """ReduceMean or ReduceMax over the last axis, as the opset has it. axes: name of a constant that says -1."""
        if self.opset >= _AXES_ARE_AN_INPUT:
            return helper.make_node(op, [x, axes], [y], y, keepdims=1)
        return helper.make_node(op, [x], [y], y, axes=[-1], keepdims=1)

    def last_axis(self) -> str:
        """A constant that says -1, where the opset takes axes as an input."""
        if self.opset >= _AXES_ARE_AN_INPUT:
            self.constants["norm/axes"] = np.array([-1], np.int64)
        return "norm/axes"

    def _over_last_axis(self, node: onnx.NodeProto) -> bool:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        axes = attributes.get("axes")
        if axes is None and len(node.input) == 2 and node.input[1] in self._values:
            axes = numpy_helper.to_array(self._values[node.input[1]]).tolist()
        last = len(self.shape(node.input[0])) - 1
        return axes in ([-1], [last]) and attributes.get("keepdims", 1) == 1


def _rowmax(graph: _Graph, norm: Norm) -> tuple[list[onnx.NodeProto], int]:
    x, out = norm.x, graph.nodes[norm.quotient].output[0]
    axes, node = graph.last_axis(), helper.make_node
    reach, floor = graph.constant("norm/reach", 1 / REACH), graph.constant("norm/floor", FLOOR)
    root = graph.constant(f"norm/root_{norm.eps:.6g}", np.sqrt(norm.eps))
    (size, largest, part, m, y, t, tt, yy, mean, total, length) = (
        f"{out}/{name}" for name in ("abs", "max", "part", "m", "y", "t", "tt", "yy", "mean", "sum", "root")
    )
    nodes = [
        node("Abs", [x], [size], size),
        graph.reduce("ReduceMax", size, largest, axes),
        node("Mul", [largest, reach], [part], part),
        node("Add", [part, floor], [m], m),
        node("Div", [x, m], [y], y),
        node("Div", [root, m], [t], t),
        node("Mul", [t, t], [tt], tt),
        node("Mul", [y, y], [yy], yy),
        graph.reduce("ReduceMean", yy, mean, axes),
        node("Add", [mean, tt], [total], total),
        node("Sqrt", [total], [length], length),
        node("Div", [y, length], [out], f"{out}/rowmax"),
    ]
    return nodes, norm.quotient


def _rsqrt(graph: _Graph, norm: Norm) -> tuple[list[onnx.NodeProto], int]:
    kept = [graph.nodes[i] for i in norm.nodes[:-1]]
    out = graph.nodes[norm.quotient].output[0]
    inverse = helper.make_node("Reciprocal", list(kept[-1].output), [f"{out}/inverse"], f"{out}/inverse")
    product = helper.make_node("Mul", [norm.x, f"{out}/inverse"], [out], f"{out}/rsqrt")
    return [*kept, inverse, product], norm.quotient


def _native(graph: _Graph, norm: Norm) -> tuple[list[onnx.NodeProto], int]:
    out, last = graph.nodes[norm.quotient].output[0], norm.quotient
    shape = graph.shape(norm.x)
    product = graph.only_reader(out, "Mul")
    weights = [] if product is None else [name for name in graph.nodes[product].input if graph.is_scale(name, shape)]
    if product is not None and weights:
        scale, out, last = weights[0], graph.nodes[product].output[0], product
    else:
        scale = graph.constant(f"norm/ones_{shape[-1]}", np.ones(shape[-1]))
    node = helper.make_node(
        "RMSNormalization", [norm.x, scale], [out], f"{out}/norm", axis=-1, epsilon=norm.eps,
        stash_type=TensorProto.FLOAT,
    )  # fmt: skip
    return [node], last


_WRITERS = {"rowmax": _rowmax, "rsqrt": _rsqrt, "native": _native}
