"""Names in a graph file have no dots or slashes, stay distinct, and lead back to the decoder's parameters."""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import TensorProto, helper

from rollkv.export.artefact import stored_weights
from rollkv.export.names import plain_names
from rollkv.runtime.bundle import Bundle


def test_every_name_of_a_bundles_graphs_is_plain(bundle: Callable[..., Bundle]) -> None:
    made = bundle("llama")
    for info in made.manifest.graphs:
        graph = onnx.load(made.path / info.file, load_external_data=False).graph
        names = [v.name for v in (*graph.input, *graph.output, *graph.initializer, *graph.value_info)]
        names += [name for node in graph.node for name in (node.name, *node.input, *node.output)]
        assert not [name for name in names if not name.replace("_", "").isalnum() and name]


def test_the_weights_of_a_bundle_are_found_by_the_decoders_names(bundle: Callable[..., Bundle]) -> None:
    names = stored_weights(bundle("llama"))
    assert {"embedding.weight", "layers.1.attention.q.weight", "rope.full.cos"} <= names.keys()


def test_names_that_would_become_the_same_stay_apart() -> None:
    nodes = [
        helper.make_node("Abs", ["x"], ["a.b"], "one"),
        helper.make_node("Abs", ["a.b"], ["a/b"], "two"),
        helper.make_node("Abs", ["a/b"], ["a__b"], "three"),
        helper.make_node("Abs", ["a__b"], ["y"], "four"),
    ]
    value = helper.make_tensor_value_info
    outside = [value("x", TensorProto.FLOAT, [1])], [value("y", TensorProto.FLOAT, [1])]
    inner = [value(name, TensorProto.FLOAT, [1]) for name in ("a.b", "a/b", "a__b")]
    model = helper.make_model(helper.make_graph(nodes, "g", *outside, value_info=inner))
    plain_names(model)
    onnx.checker.check_model(model, full_check=True)
    made = [name for node in model.graph.node for name in node.output]
    assert len(set(made)) == 4
    assert made[-1] == "y"
    assert [v.name for v in model.graph.value_info] == made[:3]
