"""A snapshot of a session as a file.

A file holds, little-endian: 8 bytes `MAGIC`, the format (uint32), the length of the header (uint32), the header's
sha256 (32 bytes), the header, zeros up to a multiple of 64 bytes, and then the data: the parts in turn, in C order,
with zeros between them so that each starts at a multiple of 64 bytes; the last one ends the file. The header is JSON:
`bundle`, `tokens`, `known`, `offsets` as in `Snapshot`; `parts`, each with `first`, `window`, `dtype`, `shape` and
`offset`, counted from where the data starts; `sha256` of the data. A reader refuses a higher format and ignores unknown
keys. The numbers are read as numbers: nothing in a file is ever run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import reprlib
import secrets
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.snapshot import CachePart, Snapshot

MAGIC = b"RKPREFIX"
FORMAT = 1
_START = struct.Struct("<8sII32s")  # magic, format, length of the header, its sha256
_ALIGN = 64  # bytes
_HEADER_MAX = 64 << 20  # bytes: some 6 million tokens
_STORED = {"float32": "<f4", "float16": "<f2"}  # dtype of a part -> how its numbers lie in the file
_INT_MAX = 2**31 - 1


class PrefixError(ValueError):
    """A saved prefix that is missing, damaged, or of another bundle; or one that cannot be saved as asked."""

    exit_code = 2


def save_prefix(path: str | Path, snapshot: Snapshot) -> None:
    """Write a snapshot to the file `path`; one that was there is replaced in one step.

    Raises PrefixError for a snapshot that no file can hold, a folder's name, or a folder that is missing; OSError when
    writing fails. Whatever fails, `path` is then as it was, and nothing is left beside it.
    """
    final = Path(_file_name(path))
    if fault := name_fault(final):
        raise PrefixError(f"{str(final)[:100]!r}: {fault}; give another name")
    pieces = _layout(snapshot, str(final))
    if os.path.isdir(final):
        raise PrefixError(f"{final}: a folder; give the name of a file")
    if os.path.exists(final) and not os.path.isfile(final):  # a pipe or a device is nothing to replace
        raise PrefixError(f"{final}: exists and is not a file; give another name")
    if not os.path.isdir(final.parent):
        raise PrefixError(f"{final}: there is no folder {final.parent}; make it first")
    if in_bundle(final):
        raise PrefixError(f"{final}: lies in a bundle, into which nothing is written; give another folder")
    work = final.parent / f".rollkv-{secrets.token_hex(8)}.part"
    try:
        with open(work, "xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(work, final)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(work)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(final), None  # not the one beside it
        raise
    _sync_folder(final.parent)


def name_fault(path: str | Path) -> str | None:
    """Why no file can have this name, whether one is there or not; None when one can."""
    try:
        os.stat(path)
    except ValueError as error:  # a zero byte
        return str(error)
    except OSError as error:
        return error.strerror if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else None
    return None


def in_bundle(path: Path) -> bool:
    """Whether a file of this name would lie in the folder of a bundle, also through a link."""
    for folder in {*path.resolve().parents, path.absolute().parent.resolve()}:
        try:
            manifest = json.loads((folder / "manifest.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(manifest, dict) and {"format", "rollkv", "graphs"} <= manifest.keys():
            return True
    return False


def load_prefix(path: str | Path, bundle: str) -> Snapshot:
    """Read a file of `save_prefix`: all of it is checked, and the data stays on the disk, mapped read-only.

    bundle: sha256 (hex) of the manifest that the snapshot must belong to. Raises PrefixError: no such file, not one of
    these, a newer format, cut off, changed, or of another bundle; OSError when the disk fails.
    """
    name = str(_file_name(path))
    raw = _map(path, name)
    header, start = _read_header(raw, name)
    _check_tokens(header, name)
    tokens = header["tokens"]
    if header["bundle"] != bundle:
        raise PrefixError(
            f"{name}: saved from the bundle with sha256 {_short(header['bundle'])}, this one has {_short(bundle)}; "
            "open the bundle that it was saved from, or save it again"
        )
    end = 0
    parts = []
    for i, part in enumerate(_list(header, "parts", name)):
        where = f"{name}: parts[{i}]"
        if not isinstance(part, dict):
            raise PrefixError(f"{where} is {_short(part)}, must be an object")
        length = _check_part(part, len(tokens), where)
        if not _is_int(part.get("offset"), 0, 2**63) or part["offset"] != _aligned(end):
            raise PrefixError(f"{where}: offset is {_short(part.get('offset'))}, must be {_aligned(end)}")
        at, end = start + part["offset"], part["offset"] + length
        if start + end > len(raw):
            raise PrefixError(f"{where}: ends at byte {start + end}, the file has {len(raw)}: cut off; save it again")
        data = raw[at : start + end].view(_STORED[part["dtype"]]).reshape(part["shape"])
        parts.append(CachePart(part["first"], part["window"], data))
    if start + end != len(raw):
        raise PrefixError(f"{name}: {len(raw)} bytes, its header says {start + end}; save it again")
    digest = hashlib.sha256(raw[start:].data)
    if digest.hexdigest() != header.get("sha256"):
        raise PrefixError(f"{name}: its data is not what its sha256 says: changed or damaged; save it again")
    for i, cached in enumerate(parts):
        if not all(np.isfinite(tensor).all() for tensor in cached.data):
            raise PrefixError(f"{name}: parts[{i}]: its data holds a number that is not finite; save it again")
    offsets = tuple((count, shift) for count, shift in header["offsets"])
    return Snapshot(bundle, tuple(tokens), header["known"], offsets, tuple(parts))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _layout(snapshot: Snapshot, name: str) -> list[bytes | memoryview]:
    """What the file holds, piece by piece. Raises PrefixError for a snapshot that `load_prefix` would refuse."""
    header: dict[str, Any] = {
        "bundle": snapshot.bundle,
        "tokens": [int(token) for token in snapshot.tokens],
        "known": int(snapshot.known),
        "offsets": [[int(number) for number in pair] for pair in snapshot.offsets],
        "parts": [],
    }
    _check_tokens(header, name)
    pieces: list[bytes | memoryview] = []
    digest = hashlib.sha256()
    end = 0
    for i, part in enumerate(snapshot.parts):
        given = {
            "first": int(part.first),
            "window": None if part.window is None else int(part.window),
            "dtype": part.data.dtype.name,
            "shape": list(part.data.shape),
            "offset": _aligned(end),
        }
        length = _check_part(given, len(snapshot.tokens), f"{name}: parts[{i}]")
        array = np.ascontiguousarray(part.data, _STORED[part.data.dtype.name])
        for piece in (bytes(_aligned(end) - end), array.reshape(-1).view(np.uint8).data):
            digest.update(piece)
            pieces.append(piece)
        header["parts"].append(given)
        end = _aligned(end) + length
    header["sha256"] = digest.hexdigest()
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(text) > _HEADER_MAX:
        raise PrefixError(f"{name}: the header would take {len(text)} bytes, allowed: {_HEADER_MAX}; save fewer tokens")
    start = _START.pack(MAGIC, FORMAT, len(text), hashlib.sha256(text).digest()) + text
    return [start.ljust(_aligned(len(start)), b"\0"), *pieces]


def _file_name(path: str | Path) -> str | Path:
    if not isinstance(path, str | os.PathLike):  # open() would take a number for an open file, and close it
        raise PrefixError(f"path is {path!r}, allowed: the name of a file")
    return path


def _map(path: str | Path, name: str) -> NDArray[np.uint8]:
    """All bytes of a file, mapped read-only."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            raise PrefixError(f"{name}: not a file; give one that a session saved")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < _START.size:
                raise PrefixError(f"{name}: not a saved prefix: too short; give a file that a session saved")
            return np.asarray(np.memmap(file, np.uint8, "r"))
    except FileNotFoundError:
        raise PrefixError(f"{name}: no such file; give one that a session saved") from None
    except OSError as error:
        if error.errno == errno.EIO:  # the disk, and not the name
            raise
        raise PrefixError(f"{name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, PrefixError):
            raise
        raise PrefixError(f"{name!r}: cannot be read: {error}") from None  # a name with a zero byte


def _read_header(raw: NDArray[np.uint8], name: str) -> tuple[dict[str, Any], int]:
    """The header as parsed JSON, an object, and where the data starts."""
    magic, version, length, sha256 = _START.unpack(raw[: _START.size].tobytes())
    if magic != MAGIC:
        raise PrefixError(f"{name}: not a saved prefix; give a file that a session saved")
    if not 1 <= version <= FORMAT:
        raise PrefixError(
            f"{name}: format {version}, this rollkv reads 1 .. {FORMAT}; upgrade rollkv, or save it again"
        )
    end = _START.size + length
    if length > _HEADER_MAX or _aligned(end) > len(raw):
        raise PrefixError(
            f"{name}: a header of {length} bytes in a file of {len(raw)}, allowed: up to {_HEADER_MAX} and within the "
            "file; it is cut off or damaged: save it again"
        )
    text = raw[_START.size : end].tobytes()
    if hashlib.sha256(text).digest() != sha256:
        raise PrefixError(f"{name}: its header is not what its sha256 says: changed or damaged; save it again")
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        raise PrefixError(f"{name}: its header is not JSON; save it again") from None
    if not isinstance(header, dict):
        raise PrefixError(f"{name}: its header is not a JSON object; save it again")
    return header, _aligned(end)


def _check_tokens(header: dict[str, Any], name: str) -> None:
    """Refuse a header whose `bundle`, `tokens`, `known` or `offsets` are not what `Snapshot` says."""
    tokens, known, last = _list(header, "tokens", name), header.get("known"), -1
    if not isinstance(header.get("bundle"), str):
        raise PrefixError(f"{name}: bundle is {_short(header.get('bundle'))}, must be a sha256")
    if not tokens:
        raise PrefixError(f"{name}: no tokens: there is nothing to keep")
    for i, token in enumerate(tokens):
        if not _is_int(token, -1, _INT_MAX):
            raise PrefixError(f"{name}: tokens[{i}] is {_short(token)}, must be an id, or -1")
    if not _is_int(known, 0, len(tokens)) or -1 in tokens[:known]:
        raise PrefixError(f"{name}: known is {_short(known)}, must count tokens of 0 .. {len(tokens)} that are ids")
    offsets, rotary = _list(header, "offsets", name), 0
    if not offsets or offsets[0] != [0, 0]:
        raise PrefixError(f"{name}: offsets is {_short(offsets)}, must begin with [0, 0]")
    for i, pair in enumerate(offsets):
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and _is_int(pair[0], last + 1, len(tokens))
            and _is_int(pair[1], -_INT_MAX, _INT_MAX)
        ):
            raise PrefixError(
                f"{name}: offsets[{i}] is {_short(pair)}, must be [count in {last + 1} .. {len(tokens)}, whole number]"
            )
        if sum(pair) < rotary:
            raise PrefixError(
                f"{name}: offsets[{i}] is {_short(pair)}: positions go back; their sum is at least {rotary}"
            )
        last, rotary = pair[0], sum(pair)


def _check_part(part: dict[str, Any], tokens: int, where: str) -> int:
    """Refuse a part of the header that is not what `CachePart` says; the bytes that its data takes."""
    dtype, shape = part.get("dtype"), part.get("shape")
    if not isinstance(dtype, str) or dtype not in _STORED:
        raise PrefixError(f"{where}: dtype is {_short(dtype)}, allowed: {', '.join(_STORED)}")
    # Of slots there may be none: a layer with a window of 1 needs nothing of what went before.
    if not (
        isinstance(shape, list)
        and len(shape) == 4
        and all(_is_int(size, 0 if axis == 2 else 1, _INT_MAX) for axis, size in enumerate(shape))
    ):
        raise PrefixError(f"{where}: shape is {_short(shape)}, must be four whole numbers from 1, the third from 0")
    if not _is_int(part.get("first"), 0, tokens) or part["first"] + shape[2] != tokens:
        raise PrefixError(
            f"{where}: first is {_short(part.get('first'))} with {shape[2]} slots, their sum must be {tokens}, "
            "the number of tokens"
        )
    window = part.get("window")
    if window is not None and not _is_int(window, 1, _INT_MAX):
        raise PrefixError(f"{where}: window is {_short(window)}, must be a whole number from 1, or null")
    most = 0 if window is None else max(0, tokens - (window - 1))
    if part["first"] > most:
        raise PrefixError(f"{where}: first is {part['first']}, but what the next token sees begins at {most}")
    return math.prod(shape) * np.dtype(_STORED[dtype]).itemsize


def _list(header: dict[str, Any], key: str, name: str) -> list[Any]:
    value = header.get(key)
    if not isinstance(value, list):
        raise PrefixError(f"{name}: {key} is {_short(value)}, must be a list")
    return value


def _is_int(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _short(value: object) -> str:
    return reprlib.repr(value)[:60]


def _sync_folder(folder: Path) -> None:
    """Bring the new name onto the disk where the system can: the file has it already."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
