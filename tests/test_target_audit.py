"""A graph is held against a target: every breach put into a good graph is found, with the flag that cures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rollkv.export.target_audit import form_findings, size_findings, target_findings
from rollkv.export.targets import TARGETS, Target
from rollkv.runtime.bundle import Bundle, GraphInfo, WeightsInfo

UNIVERSAL = TARGETS["universal"]
Good = tuple[onnx.ModelProto, GraphInfo]


@pytest.fixture
def good(bundle: Callable[..., Bundle]) -> Good:
    made = bundle("llama")
    info = made.manifest.graphs[0]
    return onnx.load(made.path / info.file, load_external_data=False), info


def rules(model: onnx.ModelProto, info: GraphInfo, target: Target = UNIVERSAL) -> list[str]:
    return [f"{finding.rule} {finding.level}" for finding in target_findings(model, info, target)]


def test_the_profiles_have_distinct_names_and_forms_within_their_own_limits() -> None:
    assert list(TARGETS) == [target.name for target in TARGETS.values()]
    for target in TARGETS.values():
        low, high = target.opsets
        assert low <= target.opset <= high
        assert target.notes, f"{target.name}: no limit has a source"
        assert all(note.text and note.source for note in target.notes)
    others = [target for target in TARGETS.values() if target is not UNIVERSAL]
    assert all(UNIVERSAL.ops <= other.ops for other in others)
    assert all(other.opsets[0] <= UNIVERSAL.opset <= other.opsets[1] for other in others)
    assert all(UNIVERSAL.ir_version <= other.ir_version and UNIVERSAL.max_rank <= other.max_rank for other in others)


def test_a_graph_of_the_default_form_has_no_op_rank_type_or_mask_that_a_target_refuses(good: Good) -> None:
    for target in TARGETS.values():
        assert [rule for rule in rules(*good, target) if "refused" in rule] == [], target.name


def test_an_op_that_a_target_does_not_take_is_counted_and_cured(good: Good) -> None:
    model, info = good
    model.graph.node[3].op_type = model.graph.node[4].op_type = "Reciprocal"
    model.graph.node[5].op_type = "Einsum"
    found = [finding for finding in target_findings(model, info, UNIVERSAL) if finding.rule == "op"]
    assert [str(finding) for finding in found] == [
        "prefill.onnx: 1 x Einsum, which universal does not take",
        "prefill.onnx: 2 x Reciprocal, which universal does not take; cure: --norm rowmax",
    ]
    assert [f.rule for f in target_findings(model, info, TARGETS["mnn"]) if f.rule == "op"] == ["op"]


def test_opset_and_ir_version_outside_of_a_targets_range_are_named(good: Good) -> None:
    model, info = good
    model.opset_import[0].version, model.ir_version = 18, 10
    texts = [str(f) for f in target_findings(model, info, TARGETS["sophgo-bm1684x"]) if f.rule in ("opset", "ir")]
    assert texts == [
        "prefill.onnx: opset is 18, sophgo-bm1684x takes 13 .. 17; cure: --opset 17",
        "prefill.onnx: IR version is 10, sophgo-bm1684x takes up to 9; cure: --opset 17, which needs no newer one",
    ]
    assert rules(model, info, TARGETS["rk3588"]) == []


def test_ranks_types_and_constants_are_found_together(good: Good) -> None:
    model, info = good
    graph = model.graph
    graph.value_info.append(helper.make_tensor_value_info("five", TensorProto.FLOAT, [1, 1, 1, 1, 2]))
    graph.value_info.append(helper.make_tensor_value_info("wide", TensorProto.DOUBLE, [1]))
    graph.initializer.append(numpy_helper.from_array(np.array([1e5], np.float32), "large"))
    graph.initializer.append(numpy_helper.from_array(np.array(1e-8, np.float32), "small"))
    graph.node.append(helper.make_node("Add", ["logits", "small"], ["sum"], "tiny"))
    found = target_findings(model, info, UNIVERSAL)
    assert [finding.text for finding in found if finding.rule in ("rank", "type", "constant")] == [
        "value five has rank 5, universal takes up to 4",
        "1 values of type float64, the first is wide",
        "constant large reaches 100000, no float16 holds it",
        "1 x 1e-08 is added, which some converters drop (below 1e-6)",
    ]


def test_a_mask_that_is_added_twice_or_far_from_the_softmax_is_found(good: Good) -> None:
    model, info = good
    graph = model.graph
    add = next(node for node in graph.node if node.op_type == "Add" and "attention_mask" in node.input)
    place = list(graph.node).index(add)
    graph.node.insert(place + 1, helper.make_node("Add", [add.output[0], "attention_mask"], ["again"], "again"))
    graph.node[place + 2].input[0] = "again"
    texts = [finding.text for finding in target_findings(model, info, UNIVERSAL) if finding.rule == "mask"]
    assert texts == [
        f"node {add.name} adds a mask, and no softmax follows directly",
        "node again adds a mask to a sum that has one: twice the mask overflows float16",
    ]


def test_a_mask_that_is_doubled_before_it_is_added_is_found(good: Good) -> None:
    model, info = good
    graph = model.graph
    graph.node.insert(0, helper.make_node("Add", ["attention_mask", "attention_mask"], ["double"], "double"))
    texts = [finding.text for finding in target_findings(model, info, UNIVERSAL) if finding.rule == "mask"]
    assert "node double adds a mask to a sum that has one: twice the mask overflows float16" in texts


def test_a_softmax_over_another_axis_is_found(good: Good) -> None:
    model, info = good
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    del softmax.attribute[:]
    softmax.attribute.append(helper.make_attribute("axis", 1))
    assert "softmax warning" in rules(model, info)


def test_the_mask_operand_is_counted_over_all_heads(good: Good) -> None:
    model, info = good  # 6 heads, c = 8, C = 48
    small = replace(UNIVERSAL, mask_operand_limit=2 * 6 * 8 * 48 - 1)
    found = [finding for finding in target_findings(model, info, small) if finding.rule == "mask"]
    assert [finding.cure for finding in found] == ["-c 7"]
    assert "mask warning" not in rules(model, info, replace(UNIVERSAL, mask_operand_limit=2 * 6 * 8 * 48))


def test_names_with_dots_or_slashes_are_found(good: Good) -> None:
    model, info = good
    model.graph.node[0].name = "layers.0/node"
    found = [finding.text for finding in target_findings(model, info, UNIVERSAL) if finding.rule == "name"]
    assert found == ["1 names have dots or slashes, the first is layers.0/node"]


def test_a_field_of_the_form_that_differs_from_the_profile_names_its_flag() -> None:
    form = {**UNIVERSAL.form(), "kv_layout": "bksd", "mask_value": -255.0}
    assert [str(finding) for finding in form_findings(form, UNIVERSAL)] == [
        "kv_layout is bksd, the profile universal has bskd; cure: --kv-layout bskd",
        "mask_value is -255.0, the profile universal has -32768.0; cure: --mask-value=-32768.0",
    ]


def test_a_form_that_the_compiler_refuses_is_more_than_a_warning() -> None:
    apart = {**UNIVERSAL.form(), "decode_attention": "apart"}
    assert [finding.level for finding in form_findings(apart, UNIVERSAL)] == ["refused"]
    elsewhere = {**TARGETS["mnn"].form(), "decode_attention": "apart"}
    assert [finding.level for finding in form_findings(elsewhere, TARGETS["mnn"])] == ["warning"]


def test_weights_above_two_gigabytes_do_not_fit_one_file(bundle: Callable[..., Bundle]) -> None:
    large = replace(bundle("llama").manifest, weights=WeightsInfo(file="weights.bin", unique_bytes=3 << 30))
    inline = replace(UNIVERSAL, weights="inline")
    assert [finding.level for finding in size_findings(large, inline)] == ["refused"]
    assert size_findings(large, UNIVERSAL) == []
    assert size_findings(bundle("llama").manifest, inline) == []
