"""Manifest keys for embeddings on the host, layers without a cache, three-part rotary."""

import json
import random

import pytest
from bundle_folders import corrupted, opens_or_is_refused
from toy_embeds import ROWS, embeds_manifest, save_bundle
from toy_model import H, V, toy_bundle

from rollkv.runtime.bundle import BundleError, open_bundle

OLD = ("embedding", "per_layer_embedding", "image_attention", "decode_attention", "projections")
OLD_ROPE = ("sections", "fixed_for", "query_scale")


@pytest.fixture
def folder(tmp_path):
    """A bundle with everything: embeddings, per-layer inputs, three-part rotary, a layer that reads another's cache."""
    manifest = embeds_manifest(per_layer=True, three_part=True, shared=True, window=5)
    return save_bundle(tmp_path / "b", manifest).path


def load(folder):
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def refusal(folder, raw):
    (folder / "manifest.json").write_text(json.dumps(raw), "utf-8")
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert message.startswith(str(folder))
    assert "\n" not in message
    return message


def test_everything_is_read_as_it_was_written(folder):
    m = open_bundle(folder).manifest
    again = embeds_manifest(per_layer=True, three_part=True, shared=True, window=5)
    assert (m.embedding, m.per_layer_embedding, m.layers, m.rope) == (
        again.embedding,
        again.per_layer_embedding,
        again.layers,
        again.rope,
    )
    assert m.three_part
    assert m.embedding.shape == list(ROWS.shape)


def test_a_manifest_of_before_these_keys_is_read_with_the_defaults(tmp_path):
    folder = save_bundle(tmp_path / "b", embeds_manifest(tokens="ids")).path
    raw = load(folder)
    for key in OLD:
        del raw[key]
    for key in OLD_ROPE:
        del raw["rope"]["full"][key]
    for layer in raw["layers"]:
        del layer["kv_from"]
    (folder / "manifest.json").write_text(json.dumps(raw), "utf-8")
    m = open_bundle(folder).manifest
    assert (m.embedding, m.per_layer_embedding, m.image_attention, m.three_part) == (None, None, "causal", False)
    assert (m.decode_attention, m.projections) == ("joined", "separate")
    assert [layer.kv_from for layer in m.layers] == [None, None]
    assert (m.rope["full"].fixed_for, m.rope["full"].query_scale) == (None, None)


def test_a_graph_without_position_ids_is_taken(tmp_path):
    folder = save_bundle(tmp_path / "b", embeds_manifest()).path
    raw = load(folder)
    for graph in raw["graphs"]:
        graph["inputs"] = [value for value in graph["inputs"] if value["role"] != "position_ids"]
    (folder / "manifest.json").write_text(json.dumps(raw), "utf-8")
    open_bundle(folder)


def test_the_numbers_of_rope_are_read(folder):
    raw = load(folder)
    raw["rope"]["full"] |= {"fixed_for": 24, "query_scale": [0.1, 8192]}
    (folder / "manifest.json").write_text(json.dumps(raw), "utf-8")
    rope = open_bundle(folder).manifest.rope["full"]
    assert (rope.fixed_for, rope.query_scale, rope.sections) == (24, [0.1, 8192.0], [1, 1, 1])


INPUTS = ("graphs", 0, "inputs")  # embeds, mask, sliding mask, positions, four caches, per-layer inputs


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("image_attention",), "both", "image_attention 'both' is not supported; supported: causal, bidirectional"),
        (("image_attention",), None, "image_attention: must be str, got None"),
        (("projections",), "fused", "projections 'fused' is not supported; supported: separate, joined"),
        (("projections",), None, "projections: must be str, got None"),
        (("layers", 2, "kv_from"), 2, "layers[2]: kv_from is 2, must be an earlier layer"),
        (("layers", 2, "kv_from"), -1, "layers[2]: kv_from is -1, must be an earlier layer"),
        (("layers", 2, "kv_from"), "0", "kv_from: must be int, got '0'"),
        (("layers", 2, "kv_from"), 1, "layers[2]: kv_len is 24, layers[1] that it reads has 8"),
        (("layers", 2, "window"), 5, "layers[2]: window is 5, layers[0] that it reads has None"),
        (("layers", 2, "kv_heads"), 3, "layers[2]: kv_heads is 3, layers[0] that it reads has 2"),
        (("layers", 2, "head_dim"), 3, "layers[2]: head_dim is 3, layers[0] that it reads has 6"),
        (("layers", 2, "kv_from"), None, "graph prefill.onnx: 0 values are the past_key of layers[2], must be one"),
        ((*INPUTS, 4, "layer"), 2, "past_key_0 belongs to layers[2], which has no cache: it reads that of 0"),
        ((*INPUTS, 4, "layer"), 1, "past_key_0 has 24 slots, layers[1] says kv_len 8"),
        (("graphs", 1, "outputs", 1, "layer"), 1, "decode.onnx: 0 values are the new_key of layers[0], must be one"),
        (("rope", "full", "sections"), [1, 1], "rope['full']: sections is [1, 1], must be three numbers"),
        (("rope", "full", "sections"), [1, 1, 2], "that add up to rotary_dim / 2, rotary_dim is 6"),
        (("rope", "full", "sections"), [2, 2, -1], "sections is [2, 2, -1], must be three numbers"),
        (("rope", "full", "sections"), None, "position_ids has shape [3, 1, 4], must be [1, 4]"),
        (("rope", "full", "fixed_for"), 0, "rope['full']: fixed_for is 0, must be positive or null"),
        (("rope", "full", "query_scale"), [1.0], "query_scale is [1.0], must be two numbers, the second positive"),
        (("rope", "full", "query_scale"), [1.0, 0], "query_scale is [1.0, 0.0], must be two numbers"),
        (("rope", "full", "query_scale"), [float("nan"), 1], "query_scale is [nan, 1.0], must be two numbers"),
        (("embedding",), None, "graph prefill.onnx: inputs_embeds needs embedding, which is missing"),
        (("per_layer_embedding",), None, "prefill.onnx: per_layer_inputs needs per_layer_embedding, which is missing"),
        (("embedding", "file"), "../e", "file name '../e' is not a bare name"),
        (("embedding", "file"), "e.bin", "file 'e.bin' is not listed in files"),
        (("embedding", "shape"), [V * H], "table embedding.bin: shape is [276], must be two positive sizes"),
        (("embedding", "shape"), [0, H], "table embedding.bin: shape is [0, 12], must be two positive sizes"),
        (("embedding", "dtype"), "int8", "dtype 'int8' is not supported; supported: float32, float16, bfloat16"),
        (("embedding", "dtype"), "float16", "[23, 12] of float16 are 552 bytes, files says 1104"),
        (("embedding", "shape"), [V + 1, H], "[24, 12] of float32 are 1152 bytes, files says 1104"),
        (("embedding", "scale"), float("inf"), "embedding.bin: scale is inf, must be finite and not 0 as float32"),
        (("embedding", "scale"), "1", "scale: must be float, got '1'"),
        (("hidden_size",), H + 1, "shape is [23, 12], must be [vocab_size, hidden_size], [23, 13]"),
        (("per_layer_embedding", "shape"), [5, V], "per_layer_inputs has shape [1, 4, 5], must be [1, 4, 23]"),
        ((*INPUTS, 0, "shape"), [1, 4, 11], "embeds has shape [1, 4, 11], must be [1, 4, 12]"),
        ((*INPUTS, 0, "dtype"), "int32", "inputs_embeds has dtype 'int32', must be float32, the manifest's dtype"),
        ((*INPUTS, 8, "dtype"), "int64", "per_layer_inputs has dtype 'int64', must be float32, the manifest's dtype"),
        ((*INPUTS, 8, "role"), "ids", "graph prefill.onnx: 2 values have the role ids or embeds, must be one"),
        ((*INPUTS, 8, "role"), "position_ids", "2 values have the role position_ids, must be one or none"),
        ((*INPUTS, 0, "role"), "per_layer_inputs", "0 values have the role ids or embeds, must be one"),
        ((*INPUTS, 3, "shape"), [1, 4], "position_ids has shape [1, 4], must be [3, 1, 4]"),
        ((*INPUTS, 3, "role"), "per_layer_inputs", "2 values have the role per_layer_inputs, must be one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_the_runtime_cannot_work_with_is_refused(folder, path, value, message):
    raw = load(folder)
    node = raw
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert message in refusal(folder, raw)


def test_a_layer_may_not_read_one_that_reads_another(folder):
    raw = load(folder)
    raw["layers"].append({**raw["layers"][2], "kv_from": 2})
    assert "layers[3]: kv_from is 2, but that layer has no cache of its own" in refusal(folder, raw)


def test_all_graphs_take_tokens_in_the_same_way(folder):
    raw = load(folder)
    raw["graphs"][1]["inputs"][0] |= {"role": "ids", "shape": [1, 1], "dtype": "int32"}
    assert "graph prefill.onnx: no input has the role ids, but other graphs have one" in refusal(folder, raw)


def test_per_layer_inputs_stand_in_every_graph_or_none(tmp_path):
    folder = save_bundle(tmp_path / "b", embeds_manifest(per_layer=True)).path
    raw = load(folder)
    raw["graphs"][1]["inputs"] = [v for v in raw["graphs"][1]["inputs"] if v["role"] != "per_layer_inputs"]
    assert "graph decode.onnx: no input has the role per_layer_inputs, but other graphs" in refusal(folder, raw)


def test_three_part_positions_need_sections(tmp_path):
    assert not toy_bundle().manifest.three_part
    folder = save_bundle(tmp_path / "b", embeds_manifest()).path
    raw = load(folder)
    raw["graphs"][0]["inputs"][2]["shape"] = [3, 1, 4]
    assert "position_ids has shape [3, 1, 4], must be [1, 4]" in refusal(folder, raw)


def test_no_corrupted_manifest_gives_anything_but_a_refusal(folder):
    raw, rng = load(folder), random.Random(13)
    for _ in range(600):
        (folder / "manifest.json").write_text(json.dumps(corrupted(raw, rng)), "utf-8")
        opens_or_is_refused(folder)
