"""A finished graph held against a target profile: ops, ranks, types, constants, masks, names - all findings at once.

Looks at the graph file and the manifest alone and runs nothing; what real numbers do in it is `ranges.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rollkv.export.audit import mask_operand_bytes
from rollkv.export.targets import NORM_OPS, Target, differences
from rollkv.models.config import FLOAT16_MAX
from rollkv.runtime.bundle import GraphInfo, Manifest

INLINE_LIMIT = 2**31 - 1  # bytes of one protobuf file
SMALLEST_ADDED = 9e-7  # an added constant below 1e-6, which float32 holds as a little less, vanishes in some converters
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
_SHAPE_OPS = frozenset({"Cast", "Concat", "Expand", "Identity", "Reshape", "Slice", "Transpose", "Unsqueeze"})


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a target refuses ("refused"), or that may give wrong or slow results there ("warning")."""

    graph: str  # its file; "" for the whole bundle
    rule: str  # one word: what is looked at
    level: str
    text: str
    cure: str | None = None  # the flag of `rollkv export` that avoids it

    def __str__(self) -> str:
        where = f"{self.graph}: " if self.graph else ""
        return f"{where}{self.text}" + (f"; cure: {self.cure}" if self.cure else "")


def target_findings(model: onnx.ModelProto, info: GraphInfo, target: Target) -> list[Finding]:
    """Every finding of one graph. model: without its external data is enough."""
    found = [
        *_versions(model, target),
        *_ops(model, target),
        *_ranks(model, target),
        *_types(model, info),
        *_constants(model),
        *_masks(model, info),
        *_names(model),
        *_operand(model, info, target),
    ]
    return [Finding(graph=info.file, rule=rule, level=level, text=text, cure=cure) for rule, level, text, cure in found]


def form_findings(form: Mapping[str, object], target: Target) -> list[Finding]:
    """Fields of the bundle's form that differ from what suits the target. form: the bundle's, by field."""
    return [
        Finding(
            graph="",
            rule="form",
            level="refused" if (name, has) in target.refused else "warning",
            text=f"{name} is {has}, the profile {target.name} has {wanted}",
            cure=f"--{name.replace('_', '-')}{'=' if name == 'mask_value' else ' '}{wanted}",
        )
        for name, has, wanted in differences(form, target)
        if name != "opset"  # what is out of range is a finding of each graph
    ]


def size_findings(manifest: Manifest, target: Target) -> list[Finding]:
    """A file form that the weights do not fit."""
    size = manifest.weights.unique_bytes
    if target.weights == "external" or size <= INLINE_LIMIT:
        return []
    text = f"{target.name} wants one file of at most 2 GB, the weights are {size / 2**30:.1f} GiB"
    return [Finding(graph="", rule="file", level="refused", text=text, cure="--dtype float16")]


_Found = tuple[str, str, str, str | None]  # rule, level, text, cure


def _versions(model: onnx.ModelProto, target: Target) -> Iterator[_Found]:
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    low, high = target.opsets
    if not low <= opset <= high:
        cure = f"--opset {target.opset}"
        yield "opset", "refused", f"opset is {opset}, {target.name} takes {low} .. {high}", cure
    if model.ir_version > target.ir_version:
        cure = f"--opset {target.opset}, which needs no newer one"
        yield "ir", "refused", f"IR version is {model.ir_version}, {target.name} takes up to {target.ir_version}", cure


def _ops(model: onnx.ModelProto, target: Target) -> Iterator[_Found]:
    counts = Counter(node.op_type for node in model.graph.node)
    of_norm = {op: norm for norm, ops in NORM_OPS.items() for op in ops}
    for op in sorted(counts.keys() - target.ops):
        cure = f"--norm {target.norm}" if op in of_norm else None
        yield "op", "refused", f"{counts[op]} x {op}, which {target.name} does not take", cure


def _ranks(model: onnx.ModelProto, target: Target) -> Iterator[_Found]:
    graph = model.graph
    worst: dict[int, str] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        rank = len(value.type.tensor_type.shape.dim)
        if rank > target.max_rank:
            worst.setdefault(rank, value.name)
    for rank, name in sorted(worst.items()):
        yield "rank", "refused", f"value {name} has rank {rank}, {target.name} takes up to {target.max_rank}", None


def _types(model: onnx.ModelProto, info: GraphInfo) -> Iterator[_Found]:
    """int64 for ids only, and no type but float32, float16 and integers on values that are computed."""
    graph = model.graph
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    inputs = {value.name for value in graph.input}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type.elem_type
        if kind in (*_FLOATS, TensorProto.INT32) or (kind == TensorProto.INT64 and value.name in inputs):
            continue
        name = helper.tensor_dtype_to_np_dtype(kind).name
        counts[name] += 1
        first.setdefault(name, value.name)
    for name, count in sorted(counts.items()):
        yield "type", "warning", f"{count} values of type {name}, the first is {first[name]}", None


def _constants(model: onnx.ModelProto) -> Iterator[_Found]:
    values = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.data_location != TensorProto.EXTERNAL
    }
    for name, value in values.items():
        if value.dtype.kind == "f" and value.size and not np.abs(value).max() <= FLOAT16_MAX:
            yield "constant", "refused", f"constant {name} reaches {np.abs(value).max():.6g}, no float16 holds it", None
    small: Counter[float] = Counter()
    for node in model.graph.node:
        for name in node.input if node.op_type == "Add" else ():
            value = values.get(name, np.zeros(0))
            if value.dtype.kind == "f" and value.size == 1 and 0 < abs(float(value.flat[0])) < SMALLEST_ADDED:
                small[abs(float(value.flat[0]))] += 1
    for added, count in sorted(small.items()):
        text = f"{count} x {added:.3g} is added, which some converters drop (below 1e-6)"
        yield "constant", "warning", text, "--norm rowmax, where the square root of it is used"


def _masks(model: onnx.ModelProto, info: GraphInfo) -> Iterator[_Found]:
    """Each mask is added once, directly in front of a softmax over the last axis."""
    graph = model.graph
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    masks = {value.name for value in info.inputs if value.role.endswith("attention_mask")}
    added: set[str] = set()  # what has a mask in it
    for node in graph.node:
        holds = [name in masks for name in node.input]
        if node.op_type in _SHAPE_OPS and any(holds):
            masks.update(node.output)
        elif node.op_type == "Add" and any(holds):
            if all(holds) or any(name in added for name in node.input):
                text = f"node {node.name} adds a mask to a sum that has one: twice the mask overflows float16"
                yield "mask", "refused", text, None
            added.update(node.output)
            if not _reaches_softmax(node.output[0], readers):
                yield "mask", "warning", f"node {node.name} adds a mask, and no softmax follows directly", None
        elif any(holds):
            yield "mask", "warning", f"node {node.name} ({node.op_type}) reads a mask and is no Add", None
        elif node.op_type != "Softmax" and any(name in added for name in node.input):
            added.update(node.output)
    for node in graph.node:
        if node.op_type == "Softmax":
            axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
            shapes = {v.name: v for v in (*graph.value_info, *graph.output)}
            rank = len(shapes[node.input[0]].type.tensor_type.shape.dim) if node.input[0] in shapes else 0
            if axis not in (-1, rank - 1):
                yield "softmax", "warning", f"node {node.name} has axis {axis} of rank {rank}, not the last", None


def _reaches_softmax(name: str, readers: dict[str, list[onnx.NodeProto]]) -> bool:
    nodes = readers.get(name, [])
    if len(nodes) == 1 and nodes[0].op_type in ("Reshape", "Identity", "Cast"):
        return _reaches_softmax(nodes[0].output[0], readers)
    return bool(nodes) and all(node.op_type == "Softmax" for node in nodes)


def _names(model: onnx.ModelProto) -> Iterator[_Found]:
    graph = model.graph
    names = [*(v.name for v in (*graph.input, *graph.output, *graph.initializer)), *(n.name for n in graph.node)]
    names += [name for node in graph.node for name in node.output]
    odd = [name for name in names if "." in name or "/" in name or ":" in name]
    if odd:
        yield "name", "warning", f"{len(odd)} names have dots or slashes, the first is {odd[0]}", None


def _operand(model: onnx.ModelProto, info: GraphInfo, target: Target) -> Iterator[_Found]:
    """The mask once it is broadcast to every head, in float16: heads x c x C."""
    slots = [value.shape[-1] for value in info.inputs if value.role.endswith("attention_mask")]
    if target.mask_operand_limit is None or not slots:
        return
    softmax = [node.input[0] for node in model.graph.node if node.op_type == "Softmax"]
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    sizes = [int(np.prod(shapes[name])) for name in softmax if name in shapes and shapes[name][-1] in slots]
    heads = max(sizes, default=0) // (info.rows * max(slots))
    size = mask_operand_bytes(heads, info.rows, max(slots))
    if size > target.mask_operand_limit:
        limit = target.mask_operand_limit
        most = int(info.rows * limit / size)
        text = (
            f"the mask operand is {size / 2**20:.2f} MiB, above {limit / 2**20:g} MiB a known compiler pairs rows "
            "wrongly"
        )
        yield "mask", "warning", text, f"-c {most}" if most else None
