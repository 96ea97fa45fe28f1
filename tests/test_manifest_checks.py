"""A manifest whose values contradict each other is refused when it is opened: the graphs would give wrong numbers."""

import json

import pytest
from toy_embeds import embeds_manifest, save_bundle
from toy_model import V, toy_bundle

from rollkv.runtime.bundle import BundleError, open_bundle
from rollkv.runtime.manifest_checks import check_manifest


@pytest.fixture
def folder(tmp_path):
    """c = 4, C = 24; layer 1 has a window of 5, so 8 slots; layer 2 reads layer 0; K = 2, D = 6."""
    return save_bundle(tmp_path / "b", embeds_manifest(per_layer=True, shared=True, window=5)).path


def load(folder):
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def store(folder, raw):
    (folder / "manifest.json").write_text(json.dumps(raw), "utf-8")


def change(raw, path, value):
    for key in path[:-1]:
        raw = raw[key]
    raw[path[-1]] = value


def refusal(folder, raw):
    store(folder, raw)
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert message.startswith(f"{folder / 'manifest.json'}: ")
    assert "\n" not in message
    return message


INPUTS, OUTPUTS = ("graphs", 0, "inputs"), ("graphs", 0, "outputs")
# inputs: embeds, mask, sliding mask, positions, key 0, value 0, key 1, value 1, per-layer; outputs: logits, key 0, ...
ROPE = ("rope", "full")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        # pairs
        (
            ("kv_pairs", 0, 1),
            "new_value_0",
            "'past_key_0', the past_key of layers[0], with 'new_value_0', the new_valu",
        ),
        (
            ("kv_pairs", 0, 1),
            "new_key_1",
            "the past_key of layers[0], with 'new_key_1', the new_key of layers[1]; must",
        ),
        (("kv_pairs", 1), ["past_key_0", "new_key_0"], "kv_pairs names 'past_key_0' twice"),
        (("kv_pairs", 0, 0), "inputs_embeds", "kv_pairs names 'inputs_embeds', no past key or value of graph prefill"),
        (("kv_pairs", 0, 1), "logits", "kv_pairs names 'logits', no new key or value of graph prefill.onnx"),
        # lengths
        (("max_kvcache_len",), 25, "graphs hold 0 decode graphs of kv_len 25, must be one"),
        (("graphs", 0, "kv_len"), 3, "graph prefill.onnx: kv_len is 3, must be in 4 .. 24"),
        (("graphs", 0, "kv_len"), 23, "prefill graphs have the rows [], must be chunk_sizes in order, [4]"),
        (("graphs", 1, "kv_len"), 23, "graphs hold 0 decode graphs of kv_len 24, must be one"),
        (("chunk_size",), 5, "chunk_size is 5, must be 4, the largest of chunk_sizes"),
        (("graphs", 0, "rows"), 3, "graph prefill.onnx: rows is 3, must be one of chunk_sizes, [4]"),
        (("layers", 0, "kv_len"), 25, "layers[0]: kv_len is 25, must be max_kvcache_len, 24"),
        (("layers", 1, "kv_len"), 7, "layers[1]: kv_len is 7, must be in 8 .. 24 for window 5"),
        (("layers", 1, "kv_len"), 25, "layers[1]: kv_len is 25, must be in 8 .. 24 for window 5"),
        (("layers", 1, "window"), 6, "layers[1]: kv_len is 8, must be in 9 .. 24 for window 6"),
        (("layers", 1, "window"), None, "layers[1]: kv_len is 8, must be max_kvcache_len, 24"),
        (("graphs", 0, "head"), "some", "prefill.onnx: head 'some' is not supported; supported: last, all, none"),
        # rotation
        (("layers", 1, "rope"), "far", "layers[1]: rope is 'far', must be null or a name in rope: 'full'"),
        (("rope",), {}, "layers[0]: rope is 'full', must be null or a name in rope: none"),
        ((*ROPE, "rotary_dim"), 5, "rope['full']: rotary_dim is 5, must be positive and even"),
        ((*ROPE, "rotary_dim"), 0, "rope['full']: rotary_dim is 0, must be positive and even"),
        ((*ROPE, "rotary_dim"), -2, "rope['full']: rotary_dim is -2, must be positive and even"),
        ((*ROPE, "rotary_dim"), 4, "rope['full']: inv_freq has 3 numbers, must have rotary_dim / 2, 2"),
        ((*ROPE, "inv_freq"), [], "rope['full']: inv_freq has 0 numbers, must have rotary_dim / 2, 3"),
        ((*ROPE, "inv_freq", 1), float("nan"), "rope['full']: inv_freq[1] is nan, must be finite"),
        ((*ROPE, "inv_freq", 2), float("inf"), "rope['full']: inv_freq[2] is inf, must be finite"),
        ((*ROPE, "attention_scaling"), 0, "rope['full']: attention_scaling is 0.0, must be finite and positive"),
        ((*ROPE, "attention_scaling"), -1.0, "rope['full']: attention_scaling is -1.0, must be finite and positive"),
        ((*ROPE, "attention_scaling"), float("nan"), "attention_scaling is nan, must be finite and positive"),
        (
            ROPE,
            {"inv_freq": [1.0] * 4, "rotary_dim": 8, "interleaved": False, "attention_scaling": 1.0},
            "rope['full']: rotary_dim is 8, above the head_dim 6 of layers[0]",
        ),
        # shapes
        (
            ("layers", 1, "kv_heads"),
            3,
            "past_key_1 has shape [1, 8, 2, 6], must be [1, 8, 3, 6]: bskd and the sizes of",
        ),
        (
            ("layers", 1, "head_dim"),
            7,
            "past_key_1 has shape [1, 8, 2, 6], must be [1, 8, 2, 7]: bskd and the sizes of",
        ),
        ((*INPUTS, 5, "shape"), [1, 24, 6, 2], "past_value_0 has shape [1, 24, 6, 2], must be [1, 24, 2, 6]"),
        ((*INPUTS, 5, "shape"), [2, 24, 2, 6], "past_value_0 has shape [2, 24, 2, 6], must be [1, 24, 2, 6]"),
        ((*OUTPUTS, 1, "shape"), [1, 24, 2, 6], "new_key_0 has shape [1, 24, 2, 6], must be [1, 4, 2, 6]"),
        ((*OUTPUTS, 4, "shape"), [1, 4, 2, 5], "new_value_1 has shape [1, 4, 2, 5], must be [1, 4, 2, 6]"),
        ((*OUTPUTS, 0, "shape"), [1, 4, V], "logits has shape [1, 4, 23], must be [1, 1, 23] with head last"),
        (("graphs", 0, "head"), "all", "logits has shape [1, 1, 23], must be [1, 4, 23] with head all"),
        (("vocab_size",), V + 1, "logits has shape [1, 1, 23], must be [1, 1, 24] with head last"),
        ((*INPUTS, 1, "shape"), [1, 2, 4, 24], "attention_mask has the shapes [[1, 2, 4, 24]], the layers need"),
        # types and roles
        (("dtype",), "float16", "inputs_embeds has dtype 'float32', must be float16, the manifest's dtype"),
        ((*INPUTS, 1, "dtype"), "float16", "attention_mask has dtype 'float16', must be float32, the manifest's dtype"),
        ((*INPUTS, 4, "dtype"), "float16", "past_key_0 has dtype 'float16', must be float32, the manifest's dtype"),
        ((*OUTPUTS, 1, "dtype"), "int32", "new_key_0 has dtype 'int32', must be float32, the manifest's dtype"),
        ((*OUTPUTS, 0, "dtype"), "int32", "logits has dtype 'int32'; supported: float32, float16"),
        ((*INPUTS, 3, "dtype"), "float32", "position_ids has dtype 'float32'; supported: int32, int64"),
        ((*INPUTS, 4, "role"), "new_key", "past_key_0 has the role new_key of an output, but is an input"),
        ((*OUTPUTS, 1, "role"), "past_key", "new_key_0 has the role past_key of an input, but is an output"),
        # ids and sizes
        (("bos_token_id",), V, "bos_token_id is 23, must be in 0 .. 22, the vocabulary"),
        (("bos_token_id",), -1, "bos_token_id is -1, must be in 0 .. 22, the vocabulary"),
        (("eos_token_ids",), [2, V], "eos_token_ids[1] is 23, must be in 0 .. 22, the vocabulary"),
        (("vocab_size",), 0, "vocab_size is 0, must be positive"),
        (("hidden_size",), 0, "hidden_size is 0, must be positive"),
        # tables; 1e39 is infinite as float32, 1e-50 is 0
        (("embedding", "scale"), 1e39, "table embedding.bin: scale is 1e+39, must be finite and not 0 as float32"),
        (("embedding", "scale"), 0, "table embedding.bin: scale is 0.0, must be finite and not 0 as float32"),
        (("embedding", "scale"), 1e-50, "table embedding.bin: scale is 1e-50, must be finite and not 0 as float32"),
        (("per_layer_embedding", "scale"), -1e39, "table per_layer.bin: scale is -1e+39, must be finite and not 0"),
    ],
)
def test_what_contradicts_the_rest_is_refused(folder, path, value, message):
    raw = load(folder)
    change(raw, path, value)
    assert message in refusal(folder, raw)


@pytest.mark.parametrize("swapped", [(0, 1), (0, 2), (1, 3)])
def test_new_outputs_that_changed_places_are_refused(folder, swapped):
    raw = load(folder)
    first, second = (raw["kv_pairs"][i] for i in swapped)
    first[1], second[1] = second[1], first[1]
    assert "must be the same layer and part" in refusal(folder, raw)


def test_a_cache_without_a_pair_is_refused(folder):
    raw = load(folder)
    raw["kv_pairs"].pop()
    assert refusal(folder, raw).endswith("past_value_1 is in no kv_pairs")


def test_ids_are_whole_numbers(tmp_path):
    folder = save_bundle(tmp_path / "b", embeds_manifest(tokens="ids")).path
    raw = load(folder)
    raw["graphs"][1]["inputs"][0]["dtype"] = "float32"
    assert "graph decode.onnx: input_ids has dtype 'float32'; supported: int32, int64" in refusal(folder, raw)


@pytest.mark.parametrize(("role", "key"), [("embeds", "embedding"), ("per_layer_inputs", "per_layer_embedding")])
def test_a_table_that_no_graph_reads_is_refused(folder, role, key):
    raw = load(folder)
    for graph in raw["graphs"]:
        for value in graph["inputs"]:
            if value["role"] == role == "embeds":
                value |= {"role": "ids", "shape": [1, graph["rows"]], "dtype": "int32"}
        graph["inputs"] = [value for value in graph["inputs"] if value["role"] != role]
    assert refusal(folder, raw).endswith(f"{key} is there, but no graph has an input of the role {role}")


def several(raw, *sizes):
    """The manifest with a prefill graph for each size in place of the one of 4 rows."""
    four, *rest = raw["graphs"]
    raw["graphs"] = rest
    for rows in reversed(sizes):
        graph = json.loads(json.dumps(four)) | {"rows": rows}
        for value in (*graph["inputs"], *graph["outputs"]):
            axis = 2 if value["role"].endswith("_mask") else 1
            if not value["role"].startswith("past") and value["role"] != "logits":
                value["shape"][axis] = rows
        raw["graphs"].insert(0, graph)
    return raw | {"chunk_sizes": list(sizes), "chunk_size": sizes[-1]}


def test_several_prefill_graphs_are_taken(folder):
    store(folder, several(load(folder), 2, 3, 4))
    m = open_bundle(folder).manifest
    assert (m.chunk_size, m.chunk_sizes, m.prefill_rows) == (4, [2, 3, 4], [2, 3, 4])


def test_a_manifest_without_chunk_sizes_has_one(folder):
    raw = load(folder)
    del raw["chunk_sizes"]
    store(folder, raw)
    m = open_bundle(folder).manifest
    assert (m.chunk_sizes, m.prefill_rows) == ([], [4])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("chunk_sizes",), [3, 2, 4], "chunk_sizes is [3, 2, 4], must be positive and ascend"),
        (("chunk_sizes",), [2, 2, 4], "chunk_sizes is [2, 2, 4], must be positive and ascend"),
        (("chunk_sizes",), [0, 2, 4], "chunk_sizes is [0, 2, 4], must be positive and ascend"),
        (("chunk_sizes",), [2, 4, 5], "chunk_size is 4, must be 5, the largest of chunk_sizes"),
        (("chunk_size",), 2, "chunk_size is 2, must be 4, the largest of chunk_sizes"),
        (("chunk_sizes",), [2, 4], "graph prefill.onnx: rows is 3, must be one of chunk_sizes, [2, 4]"),
        (("chunk_sizes",), [1, 2, 3, 4], "prefill graphs have the rows [2, 3, 4], must be chunk_sizes in order, [1,"),
        (("graphs", 1, "rows"), 2, "prefill graphs have the rows [2, 2, 4], must be chunk_sizes in order, [2, 3, 4]"),
        (("graphs", 1, "head"), "all", "prefill.onnx: logits has shape [1, 1, 23], must be [1, 3, 23] with head all"),
        (("graphs", 1, "kv_len"), 20, "prefill graphs have the rows [2, 4], must be chunk_sizes in order, [2, 3, 4]"),
        (("graphs", 1, "outputs", 1, "shape"), [1, 4, 2, 6], "has shape [1, 4, 2, 6], must be [1, 3, 2, 6]"),
    ],
)
def test_sizes_that_contradict_the_graphs_are_refused(folder, path, value, message):
    raw = several(load(folder), 2, 3, 4)
    change(raw, path, value)
    assert message in refusal(folder, raw)


def test_prefill_graphs_out_of_order_and_a_second_decode_graph_are_refused(folder):
    raw = several(load(folder), 2, 3, 4)
    raw["graphs"][0], raw["graphs"][1] = raw["graphs"][1], raw["graphs"][0]
    assert refusal(folder, raw).endswith(
        "prefill graphs have the rows [3, 2, 4], must be chunk_sizes in order, [2, 3, 4]"
    )
    raw = several(load(folder), 2, 4)
    raw["graphs"].append(raw["graphs"][-1])
    assert refusal(folder, raw).endswith("graphs hold 2 decode graphs of kv_len 24, must be one")


def test_graphs_of_a_smaller_visible_length_take_the_last_slots_and_none_is_there_twice(folder):
    whole = load(folder)
    raw = shorter(whole, 12)
    store(folder, raw)
    assert open_bundle(folder).manifest.kv_lens == [12, 24]
    raw["graphs"].append(raw["graphs"][-1])
    assert "graph decode.onnx: another one has the same role, rows and kv_len" in refusal(folder, raw)
    for name, slots, wanted in (("attention_mask", 13, 12), ("past_key_0", 11, 12), ("past_key_1", 7, 8)):
        raw = shorter(whole, 12)
        value = next(value for value in raw["graphs"][-1]["inputs"] if value["name"] == name)
        value["shape"][3 if name.endswith("mask") else 1] = slots
        said = refusal(folder, raw)
        assert f"{wanted}" in said
        assert name in said


def shorter(raw, kv_len):
    """With a decode graph more, of a smaller visible length; layers[1] has 8 slots."""
    raw = json.loads(json.dumps(raw))
    graph = json.loads(json.dumps(raw["graphs"][-1])) | {"kv_len": kv_len}
    for value in graph["inputs"]:
        if value["role"] == "attention_mask":
            value["shape"][3] = kv_len
        if value["role"].startswith("past") and value["layer"] == 0:
            value["shape"][1] = kv_len
    raw["graphs"].append(graph)
    return raw


def test_a_window_needs_slots_for_the_largest_run(folder):
    raw = several(load(folder), 2, 5)
    assert "layers[1]: kv_len is 8, must be in 9 .. 24 for window 5" in refusal(folder, raw)


@pytest.mark.parametrize("slots", [8, 9, 24])
def test_a_layer_with_a_window_may_have_more_slots_than_it_needs(folder, slots):
    raw = load(folder)
    raw["layers"][1]["kv_len"] = slots
    for graph in raw["graphs"]:
        for value in graph["inputs"]:
            if value["role"] == "sliding_attention_mask":
                value["shape"][-1] = slots
            if value["role"] in ("past_key", "past_value") and value["layer"] == 1:
                value["shape"][1] = slots
    store(folder, raw)
    assert open_bundle(folder).manifest.layers[1].kv_len == slots


def test_a_scale_may_be_negative(folder):
    raw = load(folder)
    raw["embedding"]["scale"] = -0.5
    store(folder, raw)
    assert open_bundle(folder).manifest.embedding.scale == -0.5


def test_the_values_of_a_graph_that_is_not_run_are_not_compared(folder):
    raw = load(folder)
    other = json.loads(json.dumps(raw["graphs"][1])) | {"role": "verify", "rows": 7, "kv_len": 9}
    raw["graphs"].append(other)
    store(folder, raw)
    assert len(open_bundle(folder).manifest.graphs) == 3


@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 1},
        {"window": 5},
        {"window": 500},
        {"c": 24},
        {"c": 24, "window": 1},
        {"c": 1, "C": 1},
        {"c": 1, "C": 1, "window": 1},
        {"head": "all", "ids": "int64"},
        {"dtype": "float16"},
        {"eos": (0, V - 1)},
    ],
    ids=str,
)
def test_every_form_of_the_contract_passes(layout, settings):
    m = embeds_manifest(tokens="ids", layout=layout, **settings)
    files = {name: {"size": 1, "sha256": ""} for name in ("prefill.onnx", "decode.onnx", "weights.bin")}
    m.files.update(files)
    check_manifest(m, "here")


def test_layers_that_do_not_turn_need_no_rope(tmp_path):
    m = toy_bundle().manifest
    raw = json.loads(m.to_json())
    raw["layers"] = [layer | {"rope": None} for layer in raw["layers"]]
    folder = save_bundle(tmp_path / "b", embeds_manifest(tokens="ids")).path
    store(folder, load(folder) | {"layers": raw["layers"], "rope": {}})
    assert open_bundle(folder).manifest.rope == {}


def test_each_rope_is_compared_with_the_heads_of_its_own_layers(folder):
    """As in gemma 4, whose heads differ in width by the kind of layer."""
    raw = load(folder)
    raw["rope"]["wide"] = {"inv_freq": [1.0] * 4, "rotary_dim": 8, "interleaved": False, "attention_scaling": 1.0}
    store(folder, raw)  # of no layer
    assert sorted(open_bundle(folder).manifest.rope) == ["full", "wide"]
    raw["layers"][1] |= {"rope": "wide", "head_dim": 8}
    for graph in raw["graphs"]:
        for value in (*graph["inputs"], *graph["outputs"]):
            if value.get("layer") == 1:
                value["shape"][3] = 8
    store(folder, raw)
    assert open_bundle(folder).manifest.layers[1].rope == "wide"
