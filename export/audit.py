"""The contract, checked on the finished graph file: every finding at once.

Looks at the graph alone, not at how it came about. Weights are checked as they are written, see `write.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rollkv.export.targets import BASE_OPS, NORM_OPS, ROUTING_OPS
from rollkv.models.config import FLOAT16_MAX
from rollkv.runtime.bundle import GraphInfo, ValueInfo

MAX_RANK = 4
# Above this many bytes of a float16 mask operand (heads x c x C) a known HTP compiler pairs rows wrongly.
MASK_OPERAND_LIMIT = 1 << 20


class AuditError(RuntimeError):
    """A graph that breaks the contract."""

    exit_code = 1

    def __init__(self, file: str, findings: Sequence[str]) -> None:
        super().__init__(f"{file}: {len(findings)} findings: " + "; ".join(findings[:20]))
        self.findings = list(findings)


def audit_graph(model: onnx.ModelProto, info: GraphInfo, norm: str = "plain") -> list[str]:
    """Everything in which the graph differs from the contract and from what the manifest says; empty if nothing.

    norm: the form of its norms, which allows the ops that this form has. Routing ops are allowed where TopK shows a
    mixture of experts.
    """
    return [
        *_versions(model, info),
        *_signature(model.graph.input, info.inputs, "input"),
        *_signature(model.graph.output, info.outputs, "output"),
        *_nodes(model, BASE_OPS | NORM_OPS[norm]),
        *_shapes(model),
        *_constants(model),
        *_leftovers(model),
    ]


def mask_operand_bytes(heads: int, rows: int, kv_len: int) -> int:
    """Bytes of the mask once it is broadcast to every head, in float16."""
    return 2 * heads * rows * kv_len


def _versions(model: onnx.ModelProto, info: GraphInfo) -> Iterator[str]:
    opsets = [(o.domain, o.version) for o in model.opset_import]
    if opsets != [("", info.opset)]:
        yield f"opset imports are {opsets}, asked for {info.opset}"
    if model.ir_version != info.ir_version:
        yield f"IR version is {model.ir_version}, asked for {info.ir_version}"
    if model.functions:
        yield f"{len(model.functions)} local functions"


def _signature(values: Sequence[onnx.ValueInfoProto], listed: Sequence[ValueInfo], what: str) -> Iterator[str]:
    has = [f"{v.name} {_type(v)} {_dims(v)}" for v in values]
    says = [f"{v.name} {v.dtype} {v.shape}" for v in listed]
    if has != says:
        odd = [a for a in has if a not in says] or [b for b in says if b not in has] or ["their order"]
        yield f"{what}s differ from the manifest: {odd[0]}"


def _nodes(model: onnx.ModelProto, allowed: frozenset[str]) -> Iterator[str]:
    ops = {node.op_type for node in model.graph.node}
    for op in sorted(ops - allowed - (ROUTING_OPS if "TopK" in ops else set())):
        yield f"op {op} is not allowed"
    for node in model.graph.node:
        if node.domain:
            yield f"node {node.name} is of the domain {node.domain}"
        if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute):
            yield f"node {node.name} holds a subgraph"


def _shapes(model: onnx.ModelProto) -> Iterator[str]:
    known = {v.name: v for v in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        for name in node.output:
            dims = _dims(known[name]) if name in known else []
            if name not in known or not all(isinstance(d, int) and d > 0 for d in dims):
                yield f"value {name} has no static shape: {dims}"
            elif len(dims) > MAX_RANK:
                yield f"value {name} has rank {len(dims)}, allowed is {MAX_RANK}"
    read = {name for node in model.graph.node for name in node.input}
    for value in model.graph.input:
        if value.name not in read:
            yield f"input {value.name} is not used"


def _constants(model: onnx.ModelProto) -> Iterator[str]:
    for name, count in Counter(tensor.name for tensor in model.graph.initializer).items():
        if count > 1:
            yield f"initializer {name} is there {count} times"
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            continue
        value = numpy_helper.to_array(tensor)
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            yield f"constant {tensor.name} is not finite"
        elif value.dtype.kind == "f" and value.size and np.abs(value).max() > FLOAT16_MAX:
            yield f"constant {tensor.name} reaches {np.abs(value).max():.6g}, above {FLOAT16_MAX:.0f}"
        elif value.dtype.kind in "iu" and value.size and np.abs(value.astype(np.float64)).max() >= 2**31:
            yield f"constant {tensor.name} does not fit int32"


def _leftovers(model: onnx.ModelProto) -> Iterator[str]:
    """Text that carries paths of the machine or makes the bytes depend on it."""
    nodes = model.graph.node
    if model.metadata_props or model.graph.metadata_props or any(n.metadata_props or n.doc_string for n in nodes):
        yield "metadata_props or doc_string is left"


def _type(value: onnx.ValueInfoProto) -> str:
    return str(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name)


def _dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in value.type.tensor_type.shape.dim]
