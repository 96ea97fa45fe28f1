"""Every pass keeps the numbers, does what it says, and fails with its name."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_trace import config, options, random_decoder, random_feeds, run_onnx, trace_graph

from rollkv.export import passes
from rollkv.export.targets import BASE_OPS, ROUTING_OPS


def small(nodes: list[onnx.NodeProto], constants: dict[str, Any] | None = None, opset: int = 18) -> onnx.ModelProto:
    """x (2, 3) and w (5, 3) in, y out."""
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [5, 3]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    initializers = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    graph = helper.make_graph(nodes, "small", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def ops(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("simplify", [True, False])
@pytest.mark.parametrize("opset", [13, 17, 18, 23])
def test_all_passes_together_keep_every_output(simplify: bool, opset: int) -> None:
    cfg, opts = config(tied_head=True, qk_norm="rms-head"), options()
    decoder = random_decoder(cfg, opts)
    feeds = random_feeds(cfg, opts, 4, 7)
    before = trace_graph(cfg, opts, 4)
    wanted = run_onnx(before, decoder, feeds)
    after = passes.run_passes(before, passes.passes_for(opset, simplify))
    onnx.checker.check_model(after)
    assert [(o.domain, o.version) for o in after.opset_import] == [("", opset)]
    assert not ops(after).keys() & {"Constant", "Cast", "Identity", "Shape", "Expand", "Where", "Range"}
    got = run_onnx(after, decoder, feeds)
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=2e-6 * np.abs(array).max(), err_msg=name)


def test_constant_subgraphs_become_initializers_and_weights_do_not() -> None:
    nodes = [
        helper.make_node("Constant", [], ["two"], value_ints=[6]),
        helper.make_node("Constant", [], ["one"], value_ints=[1]),
        helper.make_node("Concat", ["two", "one"], ["shape"], axis=0),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Reshape", ["same", "shape"], ["y"]),
    ]
    model, changed = passes.fold_constants(small(nodes))
    assert changed
    assert ops(model) == {"Reshape": 1}
    assert model.graph.node[0].input[0] == "x"
    assert numpy_helper.to_array(model.graph.initializer[0]).tolist() == [6, 1]
    assert passes.fold_constants(model)[1] is False


def test_a_constant_above_the_size_limit_is_not_computed_ahead() -> None:
    nodes = [
        helper.make_node("Constant", [], ["n"], value_ints=[passes.SMALL + 1]),
        helper.make_node("ConstantOfShape", ["n"], ["big"]),
        helper.make_node("ReduceSum", ["big"], ["sum"]),
        helper.make_node("Mul", ["x", "sum"], ["y"]),
    ]
    model, _ = passes.fold_constants(small(nodes))
    assert "ConstantOfShape" in ops(model)


def test_the_product_with_a_transposed_weight_becomes_gemm_and_keeps_its_rank() -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axis"], ["x3"]),
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["x3", "wt"], ["y"]),
    ]
    model = small(nodes, {"axis": np.array([0])})
    model, changed = passes.gemm_with_transposed(model)
    assert changed
    model, _ = passes.share_constants(model)
    assert ops(model) == {"Unsqueeze": 1, "Reshape": 2, "Gemm": 1}
    draw = np.random.default_rng(0)
    x, w = draw.standard_normal((2, 3), np.float32), draw.standard_normal((5, 3), np.float32)
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x, "w": w})[0], (x @ w.T)[None], rtol=1e-6)


def test_equal_constants_are_kept_once_and_dead_nodes_go() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "a"], ["r"]),
        helper.make_node("Reshape", ["r", "b"], ["y"]),
        helper.make_node("Neg", ["x"], ["unread"]),
    ]
    model, changed = passes.share_constants(
        small(nodes, {"a": np.array([3, 2]), "b": np.array([3, 2]), "c": np.array([7])})
    )
    assert changed
    assert ops(model) == {"Reshape": 2}
    assert len(model.graph.initializer) == 1


def test_lowering_turns_the_axes_of_a_mean_into_an_attribute() -> None:
    model = small([helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=1)], {"axes": np.array([-1])})
    model, changed = passes.opset_conversion(17)(model)
    assert changed
    node = model.graph.node[0]
    assert list(node.input) == ["x"]
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute} == {"axes": [-1], "keepdims": 1}


@pytest.mark.parametrize("opset", range(13, 24))
def test_every_op_of_a_graph_has_a_form_at_every_opset(opset: int) -> None:
    for op in BASE_OPS | ROUTING_OPS | {"Identity"}:
        now = onnx.defs.get_schema(op, 18)
        assert op in passes.SAME_MEANING or onnx.defs.get_schema(op, opset).since_version == now.since_version


def test_ops_of_unchanged_meaning_differ_between_opsets_in_types_and_optional_attributes_alone() -> None:
    """ONNX's own schemas; the axes of ReduceMean have a rule."""
    for op in passes.SAME_MEANING:
        versions = {(s := onnx.defs.get_schema(op, opset)).since_version: s for opset in range(13, 24)}
        older = [versions[key] for key in sorted(versions)]
        for old, new in itertools.pairwise(older):
            assert len(old.outputs) == len(new.outputs)
            extra = {name for name in new.attributes if name not in old.attributes}
            gone = {name for name in old.attributes if name not in new.attributes}
            assert extra <= {"allowzero", "saturate", "noop_with_empty_axes"}
            assert not any(new.attributes[name].required for name in extra)
            if op != "ReduceMean":
                assert not gone
                assert [(i.name, i.option) for i in old.inputs] == [(i.name, i.option) for i in new.inputs]
            for before, after in zip(old.type_constraints, new.type_constraints, strict=True):
                assert set(before.allowed_type_strs) <= set(after.allowed_type_strs)


def test_a_mean_keeps_its_axes_as_an_input_above_18() -> None:
    model = small([helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=1)], {"axes": np.array([-1])})
    model, changed = passes.opset_conversion(23)(model)
    assert changed
    assert list(model.graph.node[0].input) == ["x", "axes"]
    assert model.opset_import[0].version == 23


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (1e-5, "constant k holds 1e-05, allowed in float16: 0 and 6.1e-05 .. 65504"),
        (-6e-5, "constant k holds 6e-05, allowed in float16"),
        (7e4, "constant k holds 70000, allowed in float16"),
        (np.nan, "constant k holds nan, allowed in float16"),
    ],
)
def test_a_constant_that_float16_does_not_hold_is_refused(value: float, says: str) -> None:
    model = small([helper.make_node("Add", ["x", "k"], ["y"])], {"k": np.array([0, value], np.float32)})
    with pytest.raises(passes.PassError, match=f"pass halve_floats failed: ValueError: {says}"):
        passes.run_passes(model, (passes.halve_floats,))


def test_whole_numbers_stay_when_a_graph_becomes_float16() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["n"], to=TensorProto.INT32),
        helper.make_node("Cast", ["n"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["f", "shape"], ["r"]),
        helper.make_node("Add", ["r", "k"], ["y"]),
    ]
    model = small(nodes, {"shape": np.array([3, 2]), "k": np.array([0.0, 0.1], np.float32)})
    model = passes.run_passes(model, (passes.halve_floats, passes.infer_shapes))
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.input)}
    f16 = TensorProto.FLOAT16
    assert kinds == {"x": f16, "w": f16, "n": TensorProto.INT32, "f": f16, "r": f16}
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert constants["shape"].tolist() == [3, 2]
    np.testing.assert_array_equal(constants["k"], np.array([0.0, 0.1], np.float16))


@pytest.mark.parametrize(
    ("node", "opset", "says"),
    [
        (helper.make_node("Split", ["x"], ["y", "z"], num_outputs=2), 17, "num_outputs"),
        (helper.make_node("Resize", ["x", "", "w"], ["y"]), 17, "Resize"),
        (helper.make_node("ReduceMean", ["x", "axes"], ["y"], noop_with_empty_axes=1), 17, "noop_with_empty_axes"),
        (helper.make_node("Pad", ["x", "axes"], ["y"]), 23, "Pad  changed between opset 18 and 23; there is no rule"),
    ],
)
def test_lowering_refuses_what_it_has_no_rule_for(node: onnx.NodeProto, opset: int, says: str) -> None:
    model = small([node], {"axes": np.array([-1])})
    with pytest.raises(passes.PassError, match=f"pass convert_opset failed.*{says}"):
        passes.run_passes(model, (passes.opset_conversion(opset),))


def test_a_failing_pass_is_named_with_those_before_it() -> None:
    def broken(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
        raise KeyError("oh")

    model = small([helper.make_node("Neg", ["x"], ["y"])])
    with pytest.raises(passes.PassError, match="pass broken failed after fold_constants, share_constants: KeyError"):
        passes.run_passes(model, (passes.fold_constants, passes.share_constants, broken))


def test_every_value_of_the_finished_graph_has_a_shape_and_nothing_has_remarks() -> None:
    cfg, opts = config(), options()
    model = passes.run_passes(trace_graph(cfg, opts, 1), passes.passes_for(17, True))
    named = {v.name for v in (*model.graph.value_info, *model.graph.output)}
    assert {name for node in model.graph.node for name in node.output} <= named
    for item in (model, model.graph, *model.graph.node, *model.graph.value_info):
        assert not item.metadata_props
        assert not item.doc_string
