from pathlib import Path

import pytest
from bundle_folders import FILES, at, listing, load, plain_folder, refusal, save

from rollkv.runtime import bundle as bundle_module
from rollkv.runtime.bundle import BundleError, Manifest, hash_file, open_bundle


@pytest.fixture
def folder(tmp_path):
    return plain_folder(tmp_path)


# Field -> a value of another type. Lists and objects are checked inside too.
WRONG = {
    ("format",): "1",
    ("rollkv",): 1,
    ("source",): [],
    ("source", "id"): None,
    ("source", "family"): 3,
    ("source", "sha256"): {},
    ("max_lm_input_len",): 4.5,
    ("chunk_size",): True,
    ("max_kvcache_len",): "24",
    ("kv_layout",): 0,
    ("dtype",): None,
    ("mask_value",): "-32768",
    ("vocab_size",): None,
    ("hidden_size",): [],
    ("max_position",): False,
    ("bos_token_id",): "1",
    ("eos_token_ids",): 2,
    ("layers",): {},
    ("layers", 0, "kv_len"): None,
    ("layers", 1, "window"): "5",
    ("layers", 0, "kv_heads"): 1.0,
    ("layers", 0, "head_dim"): [6],
    ("layers", 0, "rope"): 3,
    ("rope",): [],
    ("rope", "full", "inv_freq"): 1.0,
    ("rope", "full", "rotary_dim"): "4",
    ("rope", "full", "interleaved"): 0,
    ("rope", "full", "attention_scaling"): None,
    ("graphs",): None,
    ("graphs", 0, "file"): 3,
    ("graphs", 0, "role"): None,
    ("graphs", 1, "rows"): "1",
    ("graphs", 1, "kv_len"): None,
    ("graphs", 0, "head"): 1,
    ("graphs", 0, "opset"): "17",
    ("graphs", 0, "ir_version"): None,
    ("graphs", 0, "inputs"): {},
    ("graphs", 0, "outputs"): None,
    ("graphs", 0, "inputs", 0, "name"): 0,
    ("graphs", 0, "inputs", 0, "shape"): "1x4",
    ("graphs", 0, "inputs", 0, "dtype"): 32,
    ("graphs", 0, "outputs", 0, "role"): None,
    ("kv_pairs",): {},
    ("weights",): "weights.bin",
    ("weights", "file"): None,
    ("weights", "unique_bytes"): "0",
    ("files",): [],
    ("files", "weights.bin", "size"): "1000",
    ("files", "weights.bin", "sha256"): 0,
}
INSIDE = {
    ("eos_token_ids", 0): "2",
    ("rope", "full", "inv_freq", 1): "0.5",
    ("graphs", 0, "inputs", 0, "shape", 1): 4.0,
    ("graphs", 0, "inputs", 0): None,
    ("graphs", 0, "inputs", 4, "layer"): "0",
    ("layers", 0): 24,
    ("kv_pairs", 0): "past_key_0",
    ("kv_pairs", 0, 1): None,
    ("files", "weights.bin"): 1000,
    ("rope", "full"): None,
}


def named(path):
    return "-".join(map(str, path))


@pytest.mark.parametrize("path", WRONG, ids=named)
def test_a_missing_field_is_named(folder, path):
    raw = load(folder)
    del at(raw, path[:-1])[path[-1]]
    save(folder, raw)
    if path == ("files",):
        assert refusal(folder).endswith("is not listed in files")
    elif path == ("format",):
        assert "format is None, must be a positive integer" in refusal(folder)
    else:
        assert refusal(folder).endswith(f"{path[-1]} is missing")


@pytest.mark.parametrize("path", [*WRONG, *INSIDE], ids=named)
def test_a_field_of_another_type_is_named_with_what_was_there(folder, path):
    raw = load(folder)
    value = at(raw, path[:-1])[path[-1]] = {**WRONG, **INSIDE}[path]
    save(folder, raw)
    message = refusal(folder)
    name = next(part for part in reversed(path) if isinstance(part, str))
    assert name in message
    assert repr(value) in message
    assert "must be" in message


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 0, "format is 0, must be a positive integer"),
        (("format",), True, "format is True, must be a positive integer"),
        (("format",), 2, "format 2 is newer than 1, the newest this rollkv reads; upgrade rollkv"),
        (("kv_layout",), "sbkd", "kv_layout 'sbkd' is not supported; supported: bskd, bksd, bksd-kt"),
        (("dtype",), "bfloat16", "dtype 'bfloat16' is not supported; supported: float32, float16"),
        (("chunk_size",), 0, "chunk_size 0 is not in 1 .. max_kvcache_len"),
        (("chunk_size",), 25, "chunk_size 25 is not in 1 .. max_kvcache_len"),
        (("max_lm_input_len",), 25, "max_lm_input_len 25 is not in 1 .. max_kvcache_len"),
        (("max_position",), 23, "max_kvcache_len 24 is above max_position 23"),
        (("mask_value",), 0.0, "mask_value 0.0 is not in -65504 .. 0"),
        (("mask_value",), float("-inf"), "mask_value -inf is not in -65504 .. 0"),
        (("mask_value",), float("nan"), "mask_value nan is not in -65504 .. 0"),
        (("mask_value",), -(10**400), "mask_value: must be float, got -1000000"),
        (("layers",), [], "layers is empty"),
        (("graphs",), [], "graphs must hold a prefill and a decode graph"),
        (("graphs", 1, "role"), "verify", "graphs must hold a prefill and a decode graph"),
        (("graphs", 0, "rows"), 0, "graph prefill.onnx: rows is 0, must be in 1 .. 24"),
        (("graphs", 1, "rows"), 25, "graph decode.onnx: rows is 25, must be in 1 .. 24"),
        (("kv_pairs", 0), ["past_key_0"], "kv_pairs must hold pairs of names"),
        (("kv_pairs", 0, 0), "past_key_7", "kv_pairs names 'past_key_7', no past key or value of graph prefill.onnx"),
        (("kv_pairs", 0, 1), "new_key_7", "kv_pairs names 'new_key_7', no new key or value of graph prefill.onnx"),
        (("kv_pairs",), [], "past_key_0 is in no kv_pairs"),
        (("graphs", 0, "inputs", 0, "shape"), [1, 0], "input_ids has shape [1, 0], every size must be positive"),
        (("graphs", 0, "inputs", 0, "dtype"), "int8", "input_ids has dtype 'int8'; supported: float32, float16"),
        (("graphs", 0, "inputs", 4, "layer"), None, "graph prefill.onnx: past_key_0 names no layer"),
        (("graphs", 0, "inputs", 4, "layer"), 2, "graph prefill.onnx: past_key_0 names no layer"),
        (("graphs", 0, "inputs", 4, "shape"), [24], "past_key_0 has shape [24], a cache has four axes"),
        (("graphs", 0, "inputs", 0, "role"), "images", "input_ids has the role 'images', unknown to this rollkv"),
        (("layers", 0, "kv_len"), 23, "layers[0]: kv_len is 23, must be max_kvcache_len, 24"),
        (("graphs", 1, "rows"), 2, "graph decode.onnx: rows is 2, decode has 1"),
        (("graphs", 1, "outputs", 0, "role"), "new_key", "names no layer"),
        (("graphs", 1, "inputs", 0, "shape"), [1, 2], "graph decode.onnx: ids has shape [1, 2], must be [1, 1]"),
        (("graphs", 0, "inputs", 1, "shape"), [1, 1, 4, 23], "has the shapes [[1, 1, 4, 23]], the layers need"),
        (("graphs", 0, "inputs", 0, "name"), "position_ids", "graph prefill.onnx: a name occurs twice"),
        (("layers", 0, "window"), 0, "layers[0]: window is 0, must be positive or null"),
        (("weights", "file"), "../weights.bin", "file name '../weights.bin' is not a bare name"),
        (("weights", "file"), "other.bin", "file 'other.bin' is not listed in files"),
        (("graphs", 0, "file"), "/x.onnx", "file name '/x.onnx' is not a bare name"),
        (("files", "a/b"), {"size": 1, "sha256": ""}, "file name 'a/b' is not a bare name"),
        (("files", "a\\b"), {"size": 1, "sha256": ""}, r"file name 'a\\b' is not a bare name"),
        (("files", ".."), {"size": 1, "sha256": ""}, "file name '..' is not a bare name"),
        (("files", ""), {"size": 1, "sha256": ""}, "file name '' is not a bare name"),
        (("files", "a\0b"), {"size": 1, "sha256": ""}, "missing from the bundle"),
        (("files", "x" * 5000), {"size": 1, "sha256": ""}, "missing from the bundle"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_the_runtime_cannot_work_with_is_refused(folder, path, value, message):
    raw = load(folder)
    at(raw, path[:-1])[path[-1]] = value
    save(folder, raw)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"format": 1}', "rollkv is missing"),
    ],
)
def test_a_manifest_that_is_no_manifest_is_refused(folder, text, message):
    (folder / "manifest.json").write_bytes(text)
    assert message in refusal(folder)


def test_a_manifest_survives_being_written_and_read(folder):
    manifest = open_bundle(folder).manifest
    (folder / "manifest.json").write_text(manifest.to_json(), "utf-8")
    again = open_bundle(folder).manifest
    assert isinstance(again, Manifest)
    assert again == manifest
    assert again.layers[0].window is None
    assert again.layers[1].window == 5
    assert again.graphs[0].inputs[0].shape == [1, 4]
    assert again.rope["full"].inv_freq == [1.0, 0.5]


def test_a_whole_number_serves_where_a_fraction_may_stand(folder):
    raw = load(folder)
    raw["mask_value"] = -10000
    save(folder, raw)
    value = open_bundle(folder).manifest.mask_value
    assert (value, type(value)) == (-10000.0, float)


def test_unknown_keys_are_ignored_at_every_level(folder):
    want = open_bundle(folder).manifest
    raw = load(folder)
    for path in ((), ("source",), ("layers", 0), ("graphs", 1), ("graphs", 0, "inputs", 0), ("weights",)):
        at(raw, path)["later"] = {"new": [1]}
    raw["files"]["weights.bin"]["later"] = None
    save(folder, raw)
    assert open_bundle(folder).manifest == want


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert refusal(folder) == f"{folder / name}: missing from the bundle; export it again"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_another_size_is_named_with_both_sizes(folder, name, more):
    size = len(FILES[name])
    (folder / name).write_bytes((FILES[name] + b"x")[: size + more])
    assert refusal(folder).startswith(f"{folder / name}: {size + more} bytes, the manifest says {size};")


def test_a_folder_in_place_of_a_file_is_not_taken_for_it(folder):
    (folder / "decode.onnx").unlink()
    (folder / "decode.onnx").mkdir()
    assert "decode.onnx: missing" in refusal(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_in_a_small_file_is_found_when_it_is_opened(folder, name):
    (folder / name).write_bytes(b"~" + FILES[name][1:])
    assert refusal(folder).startswith(f"{folder / name}: its content is not what the manifest's sha256 says")


def test_a_changed_byte_in_a_large_file_is_found_by_check_alone(folder, monkeypatch):
    monkeypatch.setattr(bundle_module, "HASHED_AT_OPEN", 999)
    opened = open_bundle(folder)
    opened.check()
    (folder / "weights.bin").write_bytes(b"w" * 999 + b"v")
    opened = open_bundle(folder)
    with pytest.raises(BundleError, match=r"weights\.bin: its content is not what the manifest's sha256 says"):
        opened.check()


def test_check_names_a_file_that_has_gone_since(folder):
    opened = open_bundle(folder)
    (folder / "weights.bin").unlink()
    with pytest.raises(BundleError, match=r"weights\.bin: missing from the bundle"):
        opened.check()


def test_the_hash_is_sha256_of_the_content(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert hash_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_what_is_no_bundle_is_told_apart(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, why in (("nowhere", "no such folder"), ("file", "not a folder"), ("empty", "no manifest.json in it")):
        assert refusal(tmp_path / name).startswith(f"{tmp_path / name}: {why}; give the folder that `rollkv export`")
    assert "no such folder" in refusal(tmp_path / ("x" * 5000))


def test_it_opens_from_anywhere_moved_linked_and_under_any_name(folder, tmp_path, monkeypatch):
    want = open_bundle(folder).manifest
    moved = tmp_path / "a folder" / "模型 包"
    moved.parent.mkdir()
    folder.rename(moved)
    link = tmp_path / "link"
    link.symlink_to(moved, target_is_directory=True)
    monkeypatch.chdir(moved.parent)
    for path in (moved, str(moved), link, Path("模型 包"), "./模型 包/", Path("..") / "link"):
        opened = open_bundle(path)
        assert opened.manifest == want
        opened.check()


def test_it_opens_read_only_and_nothing_is_written_into_it(folder):
    before = listing(folder)
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    try:
        open_bundle(folder).check()
    finally:
        folder.chmod(0o755)
    assert listing(folder) == before


@pytest.mark.parametrize("name", ["manifest.json", "prefill.onnx"])
def test_a_file_that_may_not_be_read_is_named(folder, monkeypatch, name):
    """Without chmod, which does not bind root."""
    opens = Path.open

    def denied(path, *arguments, **more):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opens(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: path.open(encoding=encoding).read())
    assert refusal(folder) == f"{folder / name}: cannot be read: Permission denied"


def test_layers_with_different_windows_are_refused(folder):
    raw = load(folder)
    for i, layer in enumerate(raw["layers"]):
        layer["window"] = 3 + i
    save(folder, raw)
    assert "layers have the windows [3, 4]; one is supported" in refusal(folder)


def test_a_text_file_that_the_manifest_does_not_list_is_not_used(folder):
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    assert "chat_template.jinja: the manifest does not list it; remove it" in refusal(folder)
