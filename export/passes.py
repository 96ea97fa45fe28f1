"""Rewrites of a weightless graph, as small functions in one tuple.

Each pass takes a model and returns it with whether anything changed; it keeps the graph's inputs and outputs and its
numbers. `verify` proves the whole on the model at hand: the graph before the passes and after them, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from rollkv.export.float16 import halve_floats
from rollkv.export.norms import norm_form
from rollkv.runtime.backend import import_onnxruntime

Pass = Callable[[onnx.ModelProto], tuple[onnx.ModelProto, bool]]
SMALL = 1024  # elements; a larger constant is not computed ahead


class PassError(RuntimeError):
    """A pass that failed; the message names it and those before it."""

    exit_code = 1


def passes_for(opset: int, simplify: bool, norm: str = "plain", dtype: str = "float32") -> tuple[Pass, ...]:
    """The passes of an export, in order.

    onnxsim sees the graph at the opset of the trace: from 23 on it would make norms to RMSNormalization by itself.
    Norms are rewritten at the opset of the file, and float16 comes last, so that each of them sees float32 constants.
    """
    simplifier: tuple[Pass, ...] = (simplify_graph,) if simplify else ()
    form: tuple[Pass, ...] = () if norm == "plain" else (norm_form(norm),)
    half: tuple[Pass, ...] = (halve_floats,) if dtype == "float16" else ()
    return (
        fold_constants,
        gemm_with_transposed,
        *simplifier,
        share_constants,
        opset_conversion(opset),
        *form,
        *half,
        infer_shapes,
        strip_remarks,
    )


def run_passes(model: onnx.ModelProto, passes: Sequence[Pass]) -> onnx.ModelProto:
    """Every pass once, in order. Raises PassError."""
    done: list[str] = []
    for step in passes:
        try:
            model, _ = step(model)
        except ModuleNotFoundError:
            raise  # an extra that is not installed is no fault of the pass
        except Exception as error:
            before = f" after {', '.join(done)}" if done else ""
            raise PassError(f"pass {step.__name__} failed{before}: {type(error).__name__}: {error}") from error
        done.append(step.__name__)
    return model


def fold_constants(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """Compute what depends on constants alone, and keep it as an initializer; drop Identity nodes.

    The values come from ONNX's reference evaluator. Weights are inputs here, so they are never touched.
    """
    constants: dict[str, NDArray[Any]] = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    outputs = {value.name for value in model.graph.output}
    computed: dict[bytes, list[NDArray[Any]]] = {}  # the same node in every layer is computed once
    renamed: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            node.input[k] = renamed.get(name, name)
        if node.op_type == "Identity" and node.output[0] not in outputs:
            renamed[node.output[0]] = node.input[0]
        elif all(name in constants for name in node.input) and not outputs & set(node.output):
            key = _key(node, constants)
            if key not in computed:
                computed[key] = _evaluate(node, constants, model.opset_import)
            if all(value.size <= SMALL for value in computed[key]):
                constants.update(zip(node.output, computed[key], strict=True))
            else:
                kept.append(node)
        else:
            kept.append(node)
    changed = len(kept) < len(model.graph.node)
    _replace_nodes(model, kept)
    _set_constants(model, constants)
    return model, changed


def gemm_with_transposed(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """MatMul with a transposed matrix becomes Gemm with transB = 1: no transposed copy is made.

    A tied head has one, whose table is stored once, as the embedding reads it; and a decode step that takes past and
    new keys apart. Gemm takes rank 2, so the rows are reshaped around it.
    """
    shapes = _shapes(model)
    turned = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Transpose" and len(shapes[node.input[0]]) == 2
    }
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in turned:
            x, y = node.input[0], node.output[0]
            if len(shapes[x]) == 2:
                gemm = helper.make_node("Gemm", [x, turned[node.input[1]]], [y], f"{node.name}/gemm", transB=1)
                nodes.append(gemm)
                changed = True
                continue
            flat, back = f"{y}/rows", f"{y}/shape"
            width, shape = shapes[x][-1], [*shapes[x][:-1], shapes[turned[node.input[1]]][0]]
            for name, dims in ((flat, [int(np.prod(shape[:-1])), width]), (back, shape)):
                model.graph.initializer.append(numpy_helper.from_array(np.array(dims, np.int64), name))
            nodes += [
                helper.make_node("Reshape", [x, flat], [f"{y}/in"], f"{node.name}/flatten"),
                helper.make_node(
                    "Gemm", [f"{y}/in", turned[node.input[1]]], [f"{y}/out"], f"{node.name}/gemm", transB=1
                ),
                helper.make_node("Reshape", [f"{y}/out", back], [y], f"{node.name}/unflatten"),
            ]
            changed = True
        else:
            nodes.append(node)
    _replace_nodes(model, nodes)
    return model, changed


def simplify_graph(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """onnxsim, on a graph whose weights are inputs: it sees shapes only."""
    import_onnxruntime()  # before onnxsim does, see there
    import onnxsim

    before = len(model.graph.node)
    simple, _ = onnxsim.simplify(model)
    return simple, len(simple.graph.node) != before


def share_constants(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """One initializer for each distinct constant, no Constant nodes, nothing that has no reader."""
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Constant":
            constants[node.output[0]] = _evaluate(node, {}, model.opset_import)[0]
        else:
            nodes.append(node)
    needed = {value.name for value in model.graph.output}
    live = []
    for node in reversed(nodes):
        if needed & set(node.output):
            needed |= set(node.input)
            live.append(node)
    first: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    shared: dict[str, NDArray[Any]] = {}
    names: dict[str, str] = {}
    for name, value in constants.items():
        if name in needed:
            names[name] = first.setdefault((value.dtype.str, value.shape, value.tobytes()), f"constant_{len(first)}")
            shared[names[name]] = value
    for node in live:
        for k, name in enumerate(node.input):
            node.input[k] = names.get(name, name)
    changed = len(shared) < len(model.graph.initializer) or len(live) < len(model.graph.node)
    _replace_nodes(model, live[::-1])
    _set_constants(model, shared)
    return model, changed


def opset_conversion(opset: int) -> Pass:
    """A pass that brings the graph up or down to `opset`, node by node.

    A node stays as it is where its schema is the same at both, or where the versions between differ in what no graph
    here contains; a rule below rewrites it; anything else is refused.
    """

    def convert_opset(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
        """Axes of ReduceMean become an attribute below 18; attributes newer than the opset go when at their default."""
        now = model.opset_import[0].version
        constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "ReduceMean" and opset < 18 <= now:
                axes = constants[node.input[1]].tolist()
                del node.input[1]
                _drop_attributes(node, {"noop_with_empty_axes": 0})
                node.attribute.append(helper.make_attribute("axes", axes))
            if node.op_type == "Reshape" and opset < 14:
                _drop_attributes(node, {"allowzero": None})  # no shape here has a zero
            _check_schema(node, now, opset)
        model.opset_import[0].version = opset
        return model, now != opset

    return convert_opset


def infer_shapes(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """Write the shape of every value into the graph, and drop constants that lost their reader."""
    used = {name for node in model.graph.node for name in node.input}
    for tensor in [t for t in model.graph.initializer if t.name not in used]:
        model.graph.initializer.remove(tensor)
    del model.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True), True


def strip_remarks(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """Drop what says nothing about the numbers: metadata_props and doc_string, which carry paths and tool versions."""
    graph = model.graph
    changed = False
    for item in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        for name in ("metadata_props", "doc_string"):
            changed = changed or bool(getattr(item, name))
            item.ClearField(name)
    return model, changed


def _check_schema(node: onnx.NodeProto, now: int, opset: int) -> None:
    """Refuse a node that has no form at the opset, or another meaning there."""
    new = onnx.defs.get_schema(node.op_type, opset, node.domain)
    unknown = [a.name for a in node.attribute if a.name not in new.attributes]
    if unknown or len(node.input) > new.max_input:
        raise ValueError(
            f"{node.op_type} {node.name} has no form at opset {opset} (written at {now}): {unknown or 'inputs'}"
        )
    changed = new.since_version != onnx.defs.get_schema(node.op_type, now, node.domain).since_version
    if changed and node.op_type not in SAME_MEANING:
        raise ValueError(f"{node.op_type} {node.name} changed between opset {now} and {opset}; there is no rule for it")


# Ops whose versions from 13 to 23 differ in nothing that a graph here contains; read from ONNX's Changelog.md:
# more element types (Add, Div, Mul, Relu, Sub at 14; Cast, Equal, Identity, Reshape, Transpose, Unsqueeze later on),
# allowzero of Reshape (14; no shape here has a zero), saturate of Cast (19; of 8-bit floats alone), and the axes of
# ReduceMean (18), for which `opset_conversion` has a rule.
SAME_MEANING = frozenset(
    ["Add", "Cast", "Div", "Equal", "Identity", "Mul", "ReduceMean", "Relu", "Reshape", "Sub", "Transpose", "Unsqueeze"]
)


def _drop_attributes(node: onnx.NodeProto, allowed: dict[str, int | None]) -> None:
    """Remove attributes; one that must have a value (not None) is refused with any other."""
    for attribute in list(node.attribute):
        if attribute.name in allowed:
            expected = allowed[attribute.name]
            if expected is not None and attribute.i != expected:
                raise ValueError(f"{node.op_type} {node.name}: {attribute.name} is {attribute.i}, must be {expected}")
            node.attribute.remove(attribute)


def _shapes(model: onnx.ModelProto) -> dict[str, list[int]]:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    values = [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]
    return {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}


def _key(node: onnx.NodeProto, constants: dict[str, NDArray[Any]]) -> bytes:
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.input[:], bare.output[:]
    bare.name = ""
    parts = [bare.SerializeToString(deterministic=True)]
    for name in node.input:
        parts += [str((constants[name].dtype, constants[name].shape)).encode(), constants[name].tobytes()]
    return b"|".join(parts)


def _evaluate(node: onnx.NodeProto, constants: dict[str, NDArray[Any]], opsets: Any) -> list[NDArray[Any]]:
    inputs = [onnx.ValueInfoProto(name=name) for name in node.input]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    model = helper.make_model(helper.make_graph([node], "constant", inputs, outputs), opset_imports=opsets)
    values = ReferenceEvaluator(model).run(None, {name: constants[name] for name in node.input})
    return [np.asarray(value) for value in values]


def _replace_nodes(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> None:
    copies = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _set_constants(model: onnx.ModelProto, constants: dict[str, NDArray[Any]]) -> None:
    used = {name for node in model.graph.node for name in node.input}
    del model.graph.initializer[:]
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in constants.items() if name in used)
