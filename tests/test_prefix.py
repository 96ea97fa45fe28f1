"""Saved prefixes: what is written comes back, and nothing else is taken for it."""

import dataclasses
import errno
import hashlib
import json
import os
import stat
import struct

import numpy as np
import pytest

from rollkv.runtime.prefix import PrefixError, load_prefix, save_prefix
from rollkv.runtime.snapshot import CachePart, Snapshot

BUNDLE, OTHER = "ab" * 32, "cd" * 32


def some_snapshot(dtype=np.float32, tokens=(5, 0, 31, 7, -1, 9)):
    rng = np.random.default_rng(1)
    n = len(tokens)
    parts = (
        CachePart(0, None, rng.standard_normal((4, 2, n, 3)).astype(dtype)),
        CachePart(n - 2, 3, rng.standard_normal((2, 1, 2, 5)).astype(dtype)),
    )
    return Snapshot(BUNDLE, tuple(tokens), 4, ((0, 0), (5, -3)), parts)


def same(a, b):
    assert (a.bundle, a.tokens, a.known, a.offsets) == (b.bundle, b.tokens, b.known, b.offsets)
    assert [(p.first, p.window, p.data.dtype) for p in a.parts] == [(p.first, p.window, p.data.dtype) for p in b.parts]
    for p, q in zip(a.parts, b.parts, strict=True):
        np.testing.assert_array_equal(p.data, q.data)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_was_saved_comes_back(tmp_path, dtype):
    snapshot = some_snapshot(dtype)
    save_prefix(tmp_path / "p", snapshot)
    same(load_prefix(str(tmp_path / "p"), BUNDLE), snapshot)
    assert [item.name for item in tmp_path.iterdir()] == ["p"]


def test_data_that_does_not_lie_in_one_piece_is_saved_as_it_reads(tmp_path):
    data = np.arange(240, dtype=np.float32).reshape(5, 6, 2, 4).transpose(2, 0, 1, 3)[:, ::2]
    snapshot = Snapshot(BUNDLE, tuple(range(6)), 6, ((0, 0),), (CachePart(0, None, data),))
    save_prefix(tmp_path / "p", snapshot)
    same(load_prefix(tmp_path / "p", BUNDLE), snapshot)


def test_a_snapshot_without_a_cache_of_its_own_is_saved_too(tmp_path):
    save_prefix(tmp_path / "p", Snapshot(BUNDLE, (1, 2), 2, ((0, 0),), ()))
    same(load_prefix(tmp_path / "p", BUNDLE), Snapshot(BUNDLE, (1, 2), 2, ((0, 0),), ()))


def test_equal_snapshots_give_equal_files(tmp_path):
    save_prefix(tmp_path / "a", some_snapshot())
    save_prefix(tmp_path / "b", some_snapshot())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_file_can_be_read_from_its_description_alone(tmp_path):
    snapshot = some_snapshot()
    save_prefix(tmp_path / "p", snapshot)
    raw = (tmp_path / "p").read_bytes()
    magic, version, length, digest = struct.unpack("<8sII32s", raw[:48])
    text = raw[48 : 48 + length]
    assert (magic, version, digest) == (b"RKPREFIX", 1, hashlib.sha256(text).digest())
    header, start = json.loads(text), -(-(48 + length) // 64) * 64
    assert header["sha256"] == hashlib.sha256(raw[start:]).hexdigest()
    for part, want in zip(header["parts"], snapshot.parts, strict=True):
        assert part["offset"] % 64 == 0
        count = int(np.prod(part["shape"]))
        got = np.frombuffer(raw, "<f4", count, start + part["offset"]).reshape(part["shape"])
        np.testing.assert_array_equal(got, want.data)


def test_the_data_is_mapped_and_cannot_be_written_to(tmp_path):
    save_prefix(tmp_path / "p", some_snapshot())
    data = load_prefix(tmp_path / "p", BUNDLE).parts[0].data
    base = data
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert type(base.base).__name__ == "mmap"
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 0


def test_a_prefix_can_be_saved_over_the_file_that_it_was_loaded_from(tmp_path):
    save_prefix(tmp_path / "p", some_snapshot())
    loaded = load_prefix(tmp_path / "p", BUNDLE)
    save_prefix(tmp_path / "p", loaded)
    same(load_prefix(tmp_path / "p", BUNDLE), loaded)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_previous_file_and_nothing_else(tmp_path, monkeypatch, call, error):
    save_prefix(tmp_path / "p", some_snapshot())
    before = (tmp_path / "p").read_bytes()

    def fail(*arguments):
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        save_prefix(tmp_path / "p", some_snapshot(np.float16))
    assert [item.name for item in tmp_path.iterdir()] == ["p"]
    assert (tmp_path / "p").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "says"), [("folder", "folder: a folder"), ("missing/p", "there is no folder"), ("file/p", "no folder")]
)
def test_a_name_that_cannot_be_a_file_is_refused(tmp_path, name, says):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(PrefixError, match=says):
        save_prefix(tmp_path / name, some_snapshot())
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": (), "known": 0, "offsets": (), "parts": ()}, "no tokens: there is nothing to keep"),
        ({"known": 5}, "known is 5"),
        ({"parts": (CachePart(0, None, np.zeros((1, 1, 6, 1), np.int32)),)}, "dtype is 'int32', allowed: float32, flo"),
        ({"parts": (CachePart(0, None, np.array([[[[None]] * 6]])),)}, "dtype is 'object'"),
        ({"parts": (CachePart(1, None, np.zeros((1, 1, 6, 1), np.float32)),)}, "first is 1 with 6 slots"),
    ],
)
def test_a_snapshot_that_no_file_could_give_back_is_not_saved(tmp_path, changes, says):
    with pytest.raises(PrefixError, match=says):
        save_prefix(tmp_path / "p", Snapshot(**{**vars(some_snapshot()), **changes}))
    assert not list(tmp_path.iterdir())


def refused(path, says, bundle=BUNDLE):
    with pytest.raises(PrefixError, match=says) as caught:
        load_prefix(path, bundle)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    assert str(path).replace("\0", "") in message.replace("\\x00", "")
    assert len(message) < 300 + len(str(path))


def test_a_prefix_of_another_bundle_is_refused(tmp_path):
    save_prefix(tmp_path / "p", some_snapshot())
    refused(tmp_path / "p", "saved from the bundle with sha256 'abab.*this one has 'cdcd", OTHER)


def test_what_is_no_file_is_refused(tmp_path):
    refused(tmp_path / "missing", "no such file")
    refused(tmp_path, "not a file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a file")
    refused(f"{tmp_path}/\0", "cannot be read")
    refused(tmp_path / ("x" * 300), "cannot be read: File name too long")


@pytest.mark.parametrize("content", [b"", b"RKPREFIX", b"x" * 47, b"x" * 200, bytes(4096)])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "p").write_bytes(content)
    refused(tmp_path / "p", "not a saved prefix")


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    save_prefix(tmp_path / "p", some_snapshot())
    raw = (tmp_path / "p").read_bytes()
    for length in range(0, len(raw), 7):
        (tmp_path / "cut").write_bytes(raw[:length])
        refused(tmp_path / "cut", "save|too short")
    (tmp_path / "cut").write_bytes(raw + b"\0")
    refused(tmp_path / "cut", f"{len(raw) + 1} bytes, its header says {len(raw)}")


def test_a_changed_byte_anywhere_is_noticed(tmp_path):
    save_prefix(tmp_path / "p", some_snapshot())
    raw = (tmp_path / "p").read_bytes()
    length = struct.unpack("<I", raw[12:16])[0]
    padding = range(48 + length, -(-(48 + length) // 64) * 64)  # says nothing
    for at in set(range(0, len(raw), 5)) - set(padding):
        changed = bytearray(raw)
        changed[at] ^= 16
        (tmp_path / "changed").write_bytes(changed)
        refused(tmp_path / "changed", "not a saved|format|header|data is not")


def test_a_newer_format_is_refused(tmp_path):
    save_prefix(tmp_path / "p", some_snapshot())
    raw = bytearray((tmp_path / "p").read_bytes())
    raw[8] = 2
    (tmp_path / "p").write_bytes(raw)
    refused(tmp_path / "p", "format 2, this rollkv reads 1 .. 1; upgrade rollkv")


def with_header(path, text, length=None):
    """A file that is right but for its header, whose own sha256 is right too."""
    save_prefix(path, some_snapshot())
    raw = path.read_bytes()
    old = struct.unpack("<I", raw[12:16])[0]
    data = raw[-(-(48 + old) // 64) * 64 :]
    text = text(json.loads(raw[48 : 48 + old])) if callable(text) else text
    start = struct.pack("<8sII32s", b"RKPREFIX", 1, length or len(text), hashlib.sha256(text).digest()) + text
    path.write_bytes(start.ljust(-(-len(start) // 64) * 64, b"\0") + data)
    return path


def changed(**changes):
    return lambda header: json.dumps({**header, **changes}).encode()


def changed_part(**changes):
    def change(header):
        header["parts"][0].update(changes)
        return json.dumps(header).encode()

    return change


def test_unknown_keys_of_a_header_are_ignored(tmp_path):
    path = with_header(tmp_path / "p", changed(later=[1], parts_of="x"))
    same(load_prefix(path, BUNDLE), some_snapshot())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"tokens": [' + b"9" * 5000 + b"]}", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"cos\nsystem\n(S'true'\ntR.", "not JSON"),
        (b"{}", "tokens is None, must be a list"),
        (changed(bundle=7), "bundle is 7, must be a sha256"),
        (changed(bundle="../../x"), "saved from the bundle"),
        (changed(tokens=[]), "no tokens"),
        (changed(tokens={"0": 1}), "tokens is .*, must be a list"),
        (changed(tokens=[1, "x"]), r"tokens\[1\] is 'x'"),
        (changed(tokens=[1.0]), r"tokens\[0\] is 1.0"),
        (changed(tokens=[True]), r"tokens\[0\] is True"),
        (changed(tokens=[1, -2]), r"tokens\[1\] is -2"),
        (changed(tokens=[2**70]), r"tokens\[0\] is 118"),
        (changed(tokens=["x" * 10_000]), r"tokens\[0\] is 'xxx"),
        (changed(tokens=[1] * 7), "first is 0 with 6 slots, their sum must be 7"),
        (changed(known=-1), "known is -1"),
        (changed(known=7), r"known is 7, must count tokens of 0 \.\. 6"),
        (changed(known=5), "known is 5"),
        (changed(known=None), "known is None"),
        (changed(offsets=None), "offsets is None"),
        *(
            (changed(offsets=offsets), r"offsets is .*, must begin with \[0, 0\]")
            for offsets in ([], [[0]], [[0, 1], [1, 2]], [[3, 0]], [[0, -5]], [3])
        ),
        (changed(offsets=[[0, 0], [0, 2]]), r"offsets\[1\] is \[0, 2\], must be \[count in 1 \.\. 6"),
        (changed(offsets=[[0, 0], [7, 1]]), r"offsets\[1\] is \[7, 1\]"),
        (changed(offsets=[[0, 0], [1, 0.5]]), r"offsets\[1\] is \[1, 0.5\]"),
        (changed(offsets=[[0, 0], [2, -3]]), r"offsets\[1\] is \[2, -3\]: positions go back"),
        (changed(parts=3), "parts is 3"),
        (changed(parts=[3]), r"parts\[0\] is 3, must be an object"),
        (changed(parts=[{}]), r"parts\[0\]: dtype is None"),
        (changed(parts=[]), "bytes, its header says"),
        (changed(sha256="0" * 64), "its data is not what its sha256 says"),
        (changed(sha256=None), "its data is not what its sha256 says"),
        (changed_part(dtype="object"), "dtype is 'object', allowed: float32, float16"),
        (changed_part(dtype="O"), "dtype is 'O'"),
        (changed_part(dtype=["float32"]), "dtype is"),
        (changed_part(dtype="float16"), r"parts\[1\]: offset is"),
        (changed_part(shape=[4, 2, 6]), "shape is .*must be four whole numbers from 1"),
        (changed_part(shape=[4, 2, 6, -3]), "shape is"),
        (changed_part(shape=[4, 2, 6, 0]), "shape is"),
        (changed_part(shape="4263"), "shape is"),
        (changed_part(shape=[4, 2, 6, 2**40]), "shape is"),
        (changed_part(shape=[2**31 - 1, 2**31 - 1, 6, 2**31 - 1]), "ends at byte .*the file has .*: cut off"),
        (changed_part(first=-1), "first is -1"),
        (changed_part(first=1), "first is 1 with 6 slots, their sum must be 6"),
        (changed_part(window=0), "window is 0"),
        (changed_part(window=2.5), "window is 2.5"),
        (changed_part(offset=64), "offset is 64, must be 0"),
        (changed_part(offset=-64), "offset is -64"),
        (changed_part(offset=2**80), "offset is 1208"),
        (changed_part(offset=None), "offset is None"),
    ],
)
def test_a_header_that_says_what_cannot_be_is_refused(tmp_path, text, says):
    refused(with_header(tmp_path / "p", text), says)


def test_a_state_that_has_forgotten_what_the_next_token_sees_is_refused(tmp_path):
    data = np.zeros((2, 1, 4, 5), np.float32)
    for window, most in ((None, 0), (6, 3)):
        snapshot = Snapshot(BUNDLE, tuple(range(8)), 8, ((0, 0),), (CachePart(4, window, data),))
        with pytest.raises(PrefixError, match=f"first is 4, but what the next token sees begins at {most}"):
            save_prefix(tmp_path / "p", snapshot)
        if window is not None:  # a window of 5 sees the last four tokens
            save_prefix(tmp_path / "p", dataclasses.replace(snapshot, parts=(CachePart(4, 5, data),)))


def test_numbers_that_are_not_finite_are_refused_though_the_checksum_is_right(tmp_path):
    data = np.zeros((2, 1, 6, 5), np.float32)
    data[1, 0, 3, 2] = np.nan
    save_prefix(tmp_path / "p", Snapshot(BUNDLE, tuple(range(6)), 6, ((0, 0),), (CachePart(0, None, data),)))
    refused(tmp_path / "p", r"parts\[0\]: its data holds a number that is not finite")


def test_nothing_is_written_into_a_bundle(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "manifest.json").write_text('{"format": 1, "rollkv": "0.1.0", "graphs": []}')
    (tmp_path / "link").symlink_to(tmp_path / "b")
    for name in ("b/weights.bin", "link/p", "b/../b/p"):
        with pytest.raises(PrefixError, match="lies in a bundle, into which nothing is written"):
            save_prefix(tmp_path / name, some_snapshot())
    assert [item.name for item in (tmp_path / "b").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(("name", "says"), [("x" * 300, "File name too long"), ("a\0b", "embedded null byte")])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name, says):
    with pytest.raises(PrefixError, match=says):
        save_prefix(f"{tmp_path}/{name}", some_snapshot())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("length", [2**32 - 1, 2**31, 100_000, 65 << 20])
def test_a_header_longer_than_the_file_is_refused_before_anything_is_read(tmp_path, length):
    refused(with_header(tmp_path / "p", b"{}", length), f"a header of {length} bytes in a file of")


def test_random_bytes_after_the_start_never_end_in_anything_but_a_refusal(tmp_path):
    rng = np.random.default_rng(5)
    for _ in range(200):
        text = rng.integers(0, 256, rng.integers(1, 200), np.uint8).tobytes()
        refused(with_header(tmp_path / "p", text), "not JSON")


def test_a_folder_that_cannot_be_synced_does_not_turn_a_finished_save_into_an_error(tmp_path, monkeypatch):
    sync = os.fsync

    def only_files(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not supported")
        sync(handle)

    monkeypatch.setattr(os, "fsync", only_files)
    save_prefix(tmp_path / "p", some_snapshot())
    same(load_prefix(tmp_path / "p", BUNDLE), some_snapshot())
