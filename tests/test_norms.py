"""Every form of a norm gives the numbers of the plain one, on hostile rows too, and none of the old form stays."""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from test_trace import config, options, random_decoder, random_feeds, run_onnx, trace_graph

from rollkv.export import passes
from rollkv.export.float16 import halve_floats
from rollkv.export.norms import norm_form, old_norms
from rollkv.export.pipeline import ir_version
from rollkv.export.targets import NORM_OPS

WIDTH = 36
FORMS = [("rowmax", 13), ("rowmax", 17), ("rowmax", 18), ("rowmax", 23), ("rsqrt", 13), ("rsqrt", 18), ("native", 23)]


def plain(weight: tuple[int, ...] | None = (WIDTH,), centred: bool = False, eps: float = 1e-5) -> onnx.ModelProto:
    """x (1, 6, 2, 36) and perhaps w in, the norm of x out, at opset 18."""
    node, f32 = helper.make_node, TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x", f32, [1, 6, 2, WIDTH])]
    inputs += [] if weight is None else [helper.make_tensor_value_info("w", f32, weight)]
    row = "centred" if centred else "x"
    last = "y" if weight is None else "scaled"
    nodes = [node("ReduceMean", ["x", "axes"], ["middle"]), node("Sub", ["x", "middle"], [row])] if centred else []
    nodes += [
        node("Mul", [row, row], ["square"]),
        node("ReduceMean", ["square", "axes"], ["mean"], keepdims=1),
        node("Add", ["mean", "eps"], ["sum"]),
        node("Sqrt", ["sum"], ["root"]),
        node("Div", [row, "root"], [last], "divided"),
    ]
    nodes += [] if weight is None else [node("Mul", ["scaled", "w"], ["y"])]
    constants = [
        numpy_helper.from_array(np.array([-1]), "axes"),
        numpy_helper.from_array(np.array(eps, np.float32), "eps"),
    ]
    outputs = [helper.make_tensor_value_info("y", f32, [1, 6, 2, WIDTH])]
    graph = helper.make_graph(nodes, "norm", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def in_form(model: onnx.ModelProto, form: str, opset: int) -> onnx.ModelProto:
    steps = (passes.opset_conversion(opset), norm_form(form), passes.infer_shapes)
    model = passes.run_passes(model, steps)
    model.ir_version = ir_version(opset)
    onnx.checker.check_model(model, full_check=True)
    return model


def ops(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


def hostile() -> np.ndarray:
    """Rows of zeros, of 3e4, of 1e-8, of one huge number among small ones, and two of an ordinary size."""
    x = np.random.default_rng(5).standard_normal((1, 6, 2, WIDTH)).astype(np.float32)
    x[0, 0] = 0
    x[0, 1] = np.sign(x[0, 1]) * 3e4
    x[0, 2] *= 1e-8
    x[0, 3] *= 1e-3
    x[0, 3, :, 7] = 24926.0
    x[0, 4] *= 100
    return x


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    taken = {value.name for value in session.get_inputs()}
    return np.asarray(session.run(None, {name: a for name, a in feeds.items() if name in taken})[0])


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("weight", [None, (WIDTH,), (2, WIDTH)], ids=["bare", "weight", "heads"])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize(("form", "opset"), FORMS)
def test_a_rewritten_norm_equals_the_plain_one_on_hostile_rows(
    form: str, opset: int, eps: float, weight: tuple[int, ...] | None, centred: bool
) -> None:
    x = hostile()
    w = np.random.default_rng(6).standard_normal(weight or 1).astype(np.float32)
    model = in_form(plain(weight, centred, eps), form, opset)
    assert NORM_OPS[form] <= ops(model).keys()
    got = run(model, {"x": x, "w": w})
    exact = x.astype(np.float64)
    if centred:  # in float32, as every form has it: what is left of 3e4 is rounded once
        exact = (x - x.mean(-1, keepdims=True, dtype=np.float32)).astype(np.float64)
    wanted = exact / np.sqrt((exact * exact).mean(-1, keepdims=True) + eps) * (1 if weight is None else w)
    np.testing.assert_array_equal(got[0, 0], 0)
    tolerance = 2e-4 if centred else 4e-6  # a centred row is off by the rounding of its mean
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted[0, 5]).max())


@pytest.mark.parametrize(("form", "opset"), FORMS)
def test_the_rowmax_form_adds_no_constant_that_a_converter_drops_and_the_others_keep_theirs(
    form: str, opset: int
) -> None:
    model = in_form(plain(), form, opset)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    added = [constants[n] for node in model.graph.node if node.op_type == "Add" for n in node.input if n in constants]
    assert [float(np.float32(value)) for value in added] == {
        "rowmax": [float(np.float32(1e-4))],
        "rsqrt": [float(np.float32(1e-5))],
        "native": [],
    }[form]
    attributes = {a.name for node in model.graph.node if node.op_type.startswith("Reduce") for a in node.attribute}
    assert ("axes" in attributes) is (opset < 18)


@pytest.mark.parametrize("weight", [(WIDTH,), (2, WIDTH)])
def test_the_native_form_takes_the_weight_in_and_is_one_node(weight: tuple[int, ...]) -> None:
    model = in_form(plain(weight), "native", 23)
    assert ops(model) == {"RMSNormalization": 1}
    node = model.graph.node[0]
    assert list(node.input) == ["x", "w"]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {"axis": -1, "epsilon": pytest.approx(1e-5), "stash_type": TensorProto.FLOAT}


def test_the_native_form_of_a_norm_without_a_weight_or_with_one_that_does_not_fit_scales_by_ones() -> None:
    for shape in (None, (1, 1, 2, WIDTH), (1,)):
        model = in_form(plain(shape), "native", 23)
        scale = model.graph.node[0].input[1]
        ones = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == scale)
        np.testing.assert_array_equal(ones, np.ones(WIDTH, np.float32))
        assert ops(model)["Mul"] == (0 if shape is None else 1)


def _other_axis(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([1]), "axes"))


def _fed_eps(model: onnx.ModelProto) -> None:
    del model.graph.initializer[1]
    model.graph.input.append(helper.make_tensor_value_info("eps", TensorProto.FLOAT, [1]))


def _no_eps(model: onnx.ModelProto) -> None:
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array(0, np.float32), "eps"))


def _other_row(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Neg", ["x"], ["minus"]))
    model.graph.node[5].input[0] = "minus"


def _two_readers(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Neg", ["root"], ["more"]))
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1, 6, 2, 1]))


def _power(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(2, np.float32), "two"))
    model.graph.node[0].CopyFrom(helper.make_node("Pow", ["x", "two"], ["square"]))


@pytest.mark.parametrize("form", ["rowmax", "rsqrt", "native"])
@pytest.mark.parametrize("spoil", [_other_axis, _fed_eps, _no_eps, _other_row, _two_readers, _power])
def test_a_norm_that_does_not_match_stops_the_export(spoil: Any, form: str) -> None:
    model = plain()
    spoil(model)
    with pytest.raises(passes.PassError, match=f"pass rewrite_norms failed.*1 norms were not rewritten as {form}: "):
        in_form(model, form, 23)


def test_a_square_that_is_no_norm_stays() -> None:
    node = helper.make_node("Mul", ["y", "y"], ["z"])
    model = plain()
    model.graph.node.append(node)
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 6, 2, WIDTH]))
    model = in_form(model, "native", 23)
    assert ops(model) == {"RMSNormalization": 1, "Mul": 1}


class ReduceMean(OpRun):  # type: ignore[misc]
    """Adds up in float32, as hardware does, and rounds the mean; the evaluator's own would add up in float16."""

    op_domain = ""

    def _run(self, x: np.ndarray, axes: np.ndarray, **_: Any) -> tuple[np.ndarray]:
        return (x.mean(tuple(axes), dtype=np.float32, keepdims=True).astype(x.dtype),)


def test_rowmax_stays_right_in_float16_where_the_plain_form_overflows() -> None:
    x, w = hostile().astype(np.float16), np.ones(WIDTH, np.float16)
    exact = x.astype(np.float64)
    wanted = exact / np.sqrt((exact * exact).mean(-1, keepdims=True) + 1e-4)
    results = {}
    for form in ("plain", "rowmax"):
        model = passes.run_passes(plain(eps=1e-4), (norm_form(form), halve_floats, passes.infer_shapes))
        names = [name for node in model.graph.node for name in node.output]
        model.graph.output.extend(v for v in model.graph.value_info if v.name in names)
        with np.errstate(over="ignore"):
            emulation = ReferenceEvaluator(model, new_ops=[ReduceMean])  # NumPy's float16, rounded at every node
            values = emulation.run(None, {"x": x, "w": w})
        results[form] = dict(zip([v.name for v in model.graph.output], values, strict=True))
        assert {value.dtype for value in values} == {np.dtype(np.float16)}
    assert np.isinf(results["plain"]["square"][0, 1]).all()
    assert not results["plain"]["y"][0, 1].any(), "3e4 / inf"
    assert all(np.isfinite(value).all() for value in results["rowmax"].values())
    got = results["rowmax"]["y"].astype(np.float64)
    np.testing.assert_allclose(got, wanted, rtol=8 * 2**-11, atol=8 * 2**-11)


@functools.cache
def traced(settings: tuple[tuple[str, str], ...]) -> bytes:
    data: bytes = trace_graph(config((None, 5), **dict(settings)), options(), 4).SerializeToString()
    return data


@pytest.mark.parametrize(("form", "opset"), [("rowmax", 17), ("rsqrt", 18), ("native", 23)])
@pytest.mark.parametrize(
    "settings",
    [
        {"qk_norm": "rms-head"},
        {"qk_norm": "rms-width"},
        {"norm": "layer-bias", "qk_norm": "layer-heads"},
        {"norm": "layer", "qk_norm": "layer-head"},
    ],
    ids=["rms-head", "rms-width", "layer-heads", "layer-head"],
)
def test_all_norms_of_a_decoder_are_rewritten_and_every_output_stays(
    settings: dict[str, str], form: str, opset: int
) -> None:
    cfg, opts = config((None, 5), **settings), options()
    decoder = random_decoder(cfg, opts)
    feeds = random_feeds(cfg, opts, 4, 7)
    before = onnx.ModelProto.FromString(traced(tuple(settings.items())))
    assert len(old_norms(before)) == 2 * 4 + 1
    wanted = run_onnx(before, decoder, feeds)
    after = passes.run_passes(before, passes.passes_for(opset, opset == 23, form))
    assert old_norms(after) == []
    got = run_onnx(after, decoder, feeds)
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=5e-6 * np.abs(array).max(), err_msg=name)
