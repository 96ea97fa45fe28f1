"""A manifest whose fed rotations, or head on the host, contradict the rest is refused when it is opened."""

import copy
from dataclasses import replace

import pytest
from test_manifest_checks import change, load, refusal, store
from toy_forms import forms_manifest, save_forms
from toy_model import H, V

from rollkv.runtime.bundle import FileInfo, open_bundle
from rollkv.runtime.manifest_checks import check_manifest

# inputs: ids, mask, cos, sin, caches; outputs: hidden states, keys and values
COS, SIN, END = ("graphs", 0, "inputs", 2), ("graphs", 0, "inputs", 3), ("graphs", 0, "outputs", 0)


@pytest.fixture
def folder(tmp_path):
    """c = 4, D = 6, V = 23, H = 12."""
    return save_forms(tmp_path / "b", forms_manifest(bias=True)).path


def test_the_manifest_itself_passes(folder):
    assert open_bundle(folder).manifest.head_table.shape == [V, H]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*COS, "rope"), "far", "prefill.onnx: rope_cos has the rope 'far', must be a name in rope: 'full'"),
        ((*COS, "rope"), None, "prefill.onnx: rope_cos has the rope None, must be a name in rope: 'full'"),
        ((*COS, "shape"), [1, 4, 3], "rope_cos has shape [1, 4, 3], must be [1, 4, 6]"),
        ((*COS, "shape"), [1, 1, 6], "rope_cos has shape [1, 1, 6], must be [1, 4, 6]"),
        ((*SIN, "shape"), [4, 6], "rope_sin has shape [4, 6], must be [1, 4, 6]"),
        ((*COS, "dtype"), "int32", "rope_cos has dtype 'int32', must be float32, the manifest's dtype"),
        ((*COS, "dtype"), "float16", "rope_cos has dtype 'float16', must be float32, the manifest's dtype"),
        ((*SIN, "role"), "rope_cos", "rope_sin is a second rope_cos of rope 'full'"),
        ((*SIN, "role"), "rope_query_scale", "rope_sin has shape [1, 4, 6], must be [1, 4, 1]"),
        ((*END, "role"), "rope_cos", "hidden_states has the role rope_cos of an input, but is an output"),
        ((*END, "rope"), "full", "hidden_states has the rope 'full', but is an output"),
        (("graphs", 0, "inputs", 1, "rope"), "full", "attention_mask has the rope 'full', but the role attention_mask"),
        (("rope", "full", "interleaved"), True, "rope 'full' is fed, but interleaved: its halves are not alike"),
        (("rope", "full", "query_scale"), [0.1, 8.0], "rope_query_scale of rope 'full' is missing"),
        (
            ("layers", 1, "rope"),
            "other",
            "layers[1]: rope is 'other', must be null or a name in rope: 'full'",
        ),
        # the head
        (("graphs", 0, "head"), "last", "graph decode.onnx: head is none, but other graphs give logits"),
        (("graphs", 1, "head"), "all", "graph prefill.onnx: head is none, but other graphs give logits"),
        ((*END, "role"), "logits", "graph prefill.onnx: 0 values have the role hidden_states, must be one"),
        ((*END, "shape"), [1, 4, H], "hidden_states has shape [1, 4, 12], must be [1, 1, 12] with head none"),
        ((*END, "shape"), [1, 1, V], "hidden_states has shape [1, 1, 23], must be [1, 1, 12] with head none"),
        ((*END, "dtype"), "int32", "hidden_states has dtype 'int32'; supported: float32, float16"),
        (("head_table",), None, "head_table is missing, which graphs with head none need"),
        (("head_table", "shape"), [H, V], "head_table: shape is [12, 23], must be [23, 12]"),
        (("head_table", "shape"), [V, H, 1], "table head.bin: shape is [23, 12, 1], must be two positive sizes"),
        (("head_table", "dtype"), "float16", "table head.bin: [23, 12] of float16 are 552 bytes, files says 1104"),
        (("head_table", "dtype"), "int8", "table head.bin: dtype 'int8' is not supported"),
        (("head_table", "scale"), 2.0, "head_table: scale is 2.0, must be 1; logit_scale scales what comes out"),
        (("head_table", "file"), "../head.bin", "file name '../head.bin' is not a bare name"),
        (("head_table", "file"), "other.bin", "file 'other.bin' is not listed in files"),
        (("head_bias", "shape"), [V, 1], "head_bias: shape is [23, 1], must be [1, 23]"),
        (("head_bias", "scale"), 0.5, "head_bias: scale is 0.5, must be 1"),
        (("logit_scale",), 0.0, "logit_scale is 0.0, must be finite and not 0 as float32"),
        (("logit_scale",), 1e39, "logit_scale is 1e+39, must be finite and not 0 as float32"),
        (("logit_scale",), float("nan"), "logit_scale is nan, must be finite and not 0 as float32"),
        (("logit_softcap",), 0, "logit_softcap is 0.0, must be finite and positive as float32, or null"),
        (("logit_softcap",), -5.0, "logit_softcap is -5.0, must be finite and positive as float32, or null"),
        (("logit_softcap",), 1e-50, "logit_softcap is 1e-50, must be finite and positive as float32, or null"),
    ],
)
def test_what_contradicts_the_rest_is_refused(folder, path, value, message):
    raw = load(folder)
    change(raw, path, value)
    assert message in refusal(folder, raw)


@pytest.mark.parametrize(("role", "other"), [("rope_cos", "rope_sin"), ("rope_sin", "rope_cos")])
def test_one_of_the_pair_alone_is_refused(folder, role, other):
    raw = load(folder)
    for graph in raw["graphs"]:
        graph["inputs"] = [value for value in graph["inputs"] if value["role"] != role]
    assert f"graph prefill.onnx: {role} of rope 'full' is missing" in refusal(folder, raw)
    assert other != role


def test_a_scale_of_queries_that_the_rope_does_not_have_is_refused(folder):
    raw = load(folder)
    extra = {**raw["graphs"][0]["inputs"][2], "name": "s", "role": "rope_query_scale", "shape": [1, 4, 1]}
    raw["graphs"][0]["inputs"].append(extra)
    assert "rope_query_scale of rope 'full' is there, but rope has no query_scale" in refusal(folder, raw)


def test_graphs_that_do_not_take_the_same_rotations_are_refused(folder):
    raw = load(folder)
    inputs = raw["graphs"][1]["inputs"]
    raw["graphs"][1]["inputs"] = [value for value in inputs if not value["role"].startswith("rope_")]
    assert "graph decode.onnx: rotations are not fed as in prefill.onnx" in refusal(folder, raw)


def test_a_rope_that_layers_turn_by_and_that_is_not_fed_is_refused(folder):
    raw = load(folder)
    raw["rope"]["sliding"] = copy.deepcopy(raw["rope"]["full"])
    raw["layers"][1]["rope"] = "sliding"
    assert "graph prefill.onnx: layers turn by rope 'sliding', which is not fed as others are" in refusal(folder, raw)


def test_two_ropes_are_fed_under_names_of_their_own(folder):
    raw = load(folder)
    raw["rope"]["sliding"] = copy.deepcopy(raw["rope"]["full"])
    raw["layers"][1]["rope"] = "sliding"
    for graph in raw["graphs"]:
        for role in ("rope_cos", "rope_sin"):
            one = next(value for value in graph["inputs"] if value["role"] == role)
            graph["inputs"].append({**one, "name": f"{role}_sliding", "rope": "sliding"})
    store(folder, raw)
    open_bundle(folder)


def test_hidden_states_beside_logits_are_refused(folder):
    raw = load(folder)
    end = raw["graphs"][0]["outputs"][0]
    raw["graphs"][0]["outputs"].append({**end, "name": "logits", "role": "logits", "shape": [1, 1, V]})
    assert "logits has the role logits, with head none only hidden_states is allowed" in refusal(folder, raw)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "head_table",
            {"file": "embedding.bin", "shape": [V, H], "dtype": "float32", "scale": 1.0},
            "head_table is th",
        ),
        ("head_bias", {"file": "embedding.bin", "shape": [V, H], "dtype": "float32", "scale": 1.0}, "head_bias is the"),
        ("logit_scale", 2.0, "logit_scale or logit_softcap is set, but no graph has head none"),
        ("logit_softcap", 2.0, "logit_scale or logit_softcap is set, but no graph has head none"),
    ],
)
def test_a_head_that_no_graph_leaves_to_the_host_is_refused(tmp_path, key, value, message):
    folder = save_forms(tmp_path / "b", forms_manifest(hidden=False, tokens="embeds")).path
    raw = load(folder)
    raw[key] = value
    assert message in refusal(folder, raw)


@pytest.mark.parametrize("settings", [{"feed": False}, {"hidden": False}, {"three_part": True}, {"cap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_form_of_the_contract_passes(settings, dtype):
    manifest = forms_manifest(dtype=dtype, **settings)
    names = ("weights.bin", "head.bin", *(graph.file for graph in manifest.graphs))
    files = {name: FileInfo(size=V * H * 4, sha256="0") for name in names}
    check_manifest(replace(manifest, files=files), "m")
