"""The audit finds every breach of the contract that is put into a good graph, all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import export
from family_shapes import make_family
from onnx import TensorProto, helper, numpy_helper

from rollkv.export.audit import AuditError, audit_graph, mask_operand_bytes
from rollkv.export.targets import ROUTING_OPS
from rollkv.runtime.bundle import Bundle, GraphInfo


@pytest.fixture
def good(bundle: Callable[..., Bundle]) -> tuple[onnx.ModelProto, GraphInfo]:
    made = bundle("llama")
    info = made.manifest.graphs[0]
    return onnx.load(made.path / info.file, load_external_data=False), info


def test_the_graphs_of_a_bundle_have_no_findings(bundle: Callable[..., Bundle]) -> None:
    made = bundle("qwen2-window")
    for info in made.manifest.graphs:
        assert audit_graph(onnx.load(made.path / info.file, load_external_data=False), info) == []


def test_routing_is_allowed_in_a_mixture_of_experts_and_nothing_beside_it(tmp_path: Path) -> None:
    made = export(make_family(tmp_path / "source", "qwen2_moe"), tmp_path / "bundle")
    for info in made.manifest.graphs:
        model = onnx.load(made.path / info.file, load_external_data=False)
        assert {node.op_type for node in model.graph.node} >= ROUTING_OPS
        assert audit_graph(model, info) == []
    for op in ("NonZero", "Where", "Loop", "ScatterElements"):
        model.graph.node[0].op_type = op
        assert f"op {op} is not allowed" in audit_graph(model, info)


@pytest.mark.parametrize(
    ("norm", "op"),
    [("rowmax", "Abs"), ("rowmax", "ReduceMax"), ("rsqrt", "Reciprocal"), ("native", "RMSNormalization")],
)
def test_the_ops_of_a_norm_are_allowed_where_that_form_was_chosen(
    good: tuple[onnx.ModelProto, GraphInfo], norm: str, op: str
) -> None:
    model, info = good
    model.graph.node[0].op_type = op
    assert f"op {op} is not allowed" not in audit_graph(model, info, norm)
    for other in {"plain", "rowmax", "rsqrt", "native"} - {norm}:
        assert f"op {op} is not allowed" in audit_graph(model, info, other)


def _forbidden_op(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Shape", ["logits"], ["s"], "intruder"))
    model.graph.value_info.append(helper.make_tensor_value_info("s", TensorProto.INT64, [3]))


def _cast(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Cast", ["logits"], ["s"], "intruder", to=TensorProto.FLOAT16))
    model.graph.value_info.append(helper.make_tensor_value_info("s", TensorProto.FLOAT16, [1, 1, 307]))


def _dynamic(model: onnx.ModelProto) -> None:
    model.graph.value_info[0].type.tensor_type.shape.dim[0].dim_param = "n"


def _rank_five(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 1]), "axes"))
    model.graph.node.append(helper.make_node("Unsqueeze", ["logits", "axes"], ["five"]))
    model.graph.value_info.append(helper.make_tensor_value_info("five", TensorProto.FLOAT, [1, 1, 1, 1, 307]))


def _constant(value: float) -> Callable[[onnx.ModelProto], None]:
    def put(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.array([value], np.float32), "intruder"))

    return put


def _wide_integer(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**62]), "intruder"))


def _unused(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            if name == "attention_mask":
                node.input[k] = "constant_0"


def _renamed(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "scores"


def _opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 18


def _ir(model: onnx.ModelProto) -> None:
    model.ir_version = 11


def _remark(model: onnx.ModelProto) -> None:
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="File /somewhere/model.py")


def _domain(model: onnx.ModelProto) -> None:
    model.graph.node[0].domain = "com.microsoft"


def _subgraph(model: onnx.ModelProto) -> None:
    body = helper.make_graph([], "body", [], [])
    model.graph.node[0].attribute.append(helper.make_attribute("body", body))


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (_forbidden_op, "op Shape is not allowed"),
        (_cast, "op Cast is not allowed"),
        (_dynamic, "has no static shape: ['n'"),
        (_rank_five, "value five has rank 5, allowed is 4"),
        (_constant(float("inf")), "constant intruder is not finite"),
        (_constant(float("nan")), "constant intruder is not finite"),
        (_constant(-3.4e38), "constant intruder reaches 3.4"),
        (_constant(65505.0), "above 65504"),
        (_wide_integer, "constant intruder does not fit int32"),
        (_unused, "input attention_mask is not used"),
        (_renamed, "outputs differ from the manifest: scores float32"),
        (_opset, "opset imports are [('', 18)], asked for 17"),
        (_ir, "IR version is 11, asked for 9"),
        (_remark, "metadata_props or doc_string is left"),
        (_domain, "is of the domain com.microsoft"),
        (_subgraph, "holds a subgraph"),
    ],
)
def test_each_breach_is_found(
    good: tuple[onnx.ModelProto, GraphInfo], spoil: Callable[[onnx.ModelProto], None], finding: str
) -> None:
    model, info = good
    spoil(model)
    assert any(finding in line for line in audit_graph(model, info)), audit_graph(model, info)


def test_all_breaches_are_told_at_once(good: tuple[onnx.ModelProto, GraphInfo]) -> None:
    model, info = good
    for spoil in (_forbidden_op, _opset, _remark):
        spoil(model)
    findings = audit_graph(model, info)
    assert len(findings) >= 3
    message = str(AuditError(info.file, findings))
    assert message.startswith(f"prefill.onnx: {len(findings)} findings: ")
    assert all(line in message for line in findings)


def test_the_mask_operand_counts_two_bytes_for_every_head_row_and_slot() -> None:
    assert mask_operand_bytes(heads=9, rows=128, kv_len=1344) == 2 * 9 * 128 * 1344


def test_a_name_that_two_initializers_have_is_found(good: tuple[onnx.ModelProto, GraphInfo]) -> None:
    model, info = good
    twice = model.graph.initializer.add()
    twice.CopyFrom(model.graph.initializer[0])
    assert f"initializer {twice.name} is there 2 times" in audit_graph(model, info)
