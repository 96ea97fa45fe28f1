"""The header of a GGUF file: its metadata and its table of tensors, every length checked against the file.

Knows the layout of the format (versions 2 and 3, little-endian) and nothing of models: what a key means is for
`gguf_file.py` and `gguf_tokenizer.py`. Source of the layout: the GGUF specification, docs/gguf.md of ggml.

The `gguf` package has a reader of its own. It trusts the lengths that a damaged file gives, so that it can loop
without end, and takes ten seconds for a vocabulary of 150,000 tokens; here only its constants are used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from rollkv.models.config import CheckpointError
from rollkv.models.tensors import refuse_lfs_pointer

SUPPORTED_VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16  # keys, and tensors; models have a few hundred to a few thousand
MAX_STRINGS = 1 << 22  # strings in one array; the largest vocabularies have about 2 ** 18
MAX_NAME = 128  # bytes of a key or of a tensor's name
MAX_DIMENSIONS = 4
MAX_INTEGER = (1 << 31) - 1

_SCALARS: Mapping[int, str] = {  # value type -> struct format and NumPy dtype, without the byte order
    int(GGUFValueType.UINT8): "B",
    int(GGUFValueType.INT8): "b",
    int(GGUFValueType.UINT16): "H",
    int(GGUFValueType.INT16): "h",
    int(GGUFValueType.UINT32): "I",
    int(GGUFValueType.INT32): "i",
    int(GGUFValueType.FLOAT32): "f",
    int(GGUFValueType.BOOL): "?",
    int(GGUFValueType.UINT64): "Q",
    int(GGUFValueType.INT64): "q",
    int(GGUFValueType.FLOAT64): "d",
}
_STRING = int(GGUFValueType.STRING)
_ARRAY = int(GGUFValueType.ARRAY)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `shape` has the slowest axis first (out, in), `offset` counts from the file's start."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes
    size: int  # bytes


def quoted(value: object) -> str:
    """A value from a file as a message shows it: a long one is cut."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Metadata:
    """The keys and values of one file, with typed access; every getter raises CheckpointError naming key and file.

    Numbers stored as float32 are the shortest decimal that rounds to the stored value: 1e-05, as the checkpoint's
    author wrote it, not 9.999999747378752e-06.
    """

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self._values = values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def value(self, key: str) -> object:
        """Whatever the file has under the key; CheckpointError when it has nothing."""
        if key not in self._values:
            raise CheckpointError(f"{self.path}: the metadata has no key {key!r}")
        return self._values[key]

    def integer(self, key: str, default: int | None = None, *, low: int = 0) -> int:
        """An integer of low .. 2**31 - 1."""
        if default is not None and key not in self._values:
            return default
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_INTEGER:
            raise self._unfit(key, value, f"an integer of {low} to {MAX_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        if default is not None and key not in self._values:
            return default
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._unfit(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._unfit(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self.value(key)
        if not isinstance(value, str):
            raise self._unfit(key, value, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings."""
        value = self.value(key)
        if not isinstance(value, list):
            raise self._unfit(key, value, "an array of strings")
        return value

    def array(self, key: str, length: int, kinds: str) -> NDArray[Any]:
        """An array of `length` numbers: integers for kinds "iu", floats for "f"."""
        value = self.value(key)
        if not isinstance(value, np.ndarray) or len(value) != length or value.dtype.kind not in kinds:
            raise self._unfit(key, value, f"an array of {length} {'floats' if kinds == 'f' else 'integers'}")
        return value

    def token(self, key: str) -> int | None:
        """A token id, None when the key is absent; an id that the file's vocabulary does not have is an error."""
        if key not in self._values:
            return None
        token = self.integer(key)
        if "tokenizer.ggml.tokens" in self._values and token >= (count := len(self.strings("tokenizer.ggml.tokens"))):
            raise self._unfit(key, token, f"one of {count} tokens")
        return token

    def _unfit(self, key: str, value: object, allowed: str) -> CheckpointError:
        if isinstance(value, (list, np.ndarray)):
            kind = value.dtype.name if isinstance(value, np.ndarray) else "string"
            shown = f"an array of {len(value)} x {kind}"
        else:
            shown = quoted(value)
        return CheckpointError(f"{self.path}: metadata key {key!r} is {shown}, not {allowed}")


@dataclass(frozen=True)
class Header:
    """What the header says, and the whole file as mapped bytes."""

    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    data: NDArray[np.uint8]  # (bytes of the file,), mapped and not loaded


def read_header(path: Path) -> Header:
    """Map the file and read its header.

    Raises CheckpointError, naming the file, for anything that is not a complete GGUF file of a known version.
    """
    data = _map(path)
    cursor = _Cursor(path, data)
    _check_start(path, data)
    cursor.position = 8
    tensor_count = _count(cursor, "tensors")
    key_count = _count(cursor, "metadata keys")
    values: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.text("a metadata key", MAX_NAME)
        if key in values:
            raise CheckpointError(f"{path}: metadata key {key!r} occurs twice")
        values[key] = cursor.value(cursor.number("I", key), key)
    metadata = Metadata(path, values)
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.integer("general.alignment", GGUF_DEFAULT_ALIGNMENT, low=1)
    if alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment}, not a power of two")
    return Header(metadata, _place(path, entries, cursor.position, alignment, len(data)), data)


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: the file is empty")
        data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return data


def _check_start(path: Path, data: NDArray[np.uint8]) -> None:
    refuse_lfs_pointer(path)
    start = bytes(data[:4])
    if start != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file: it starts with {start!r}, not b'GGUF'")
    if len(data) < 24:
        raise CheckpointError(f"{path}: the file ends inside its header, after {len(data)} bytes")
    (version,) = struct.unpack("<I", data[4:8].tobytes())
    if version and version & 0xFFFF == 0:
        raise CheckpointError(f"{path}: a big-endian GGUF file; only little-endian files are read")
    if version not in SUPPORTED_VERSIONS:
        allowed = ", ".join(map(str, SUPPORTED_VERSIONS))
        raise CheckpointError(f"{path}: GGUF version {version}; versions read: {allowed}")


def _count(cursor: _Cursor, what: str) -> int:
    count = cursor.number("Q", f"the number of {what}")
    if count > MAX_ENTRIES:
        raise CheckpointError(f"{cursor.path}: damaged header: {count} {what}, at most {MAX_ENTRIES} are read")
    return int(count)


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.position = 0
        self._bytes = data.data

    def advance(self, size: int, what: str) -> int:
        """Move on by `size` bytes and return where they start; CheckpointError when the file has fewer."""
        start = self.position
        if size > len(self._bytes) - start:
            raise CheckpointError(
                f"{self.path}: the file ends inside its header: {what} at byte {start} takes {size} bytes, "
                f"the file has {len(self._bytes)}; it is truncated or damaged"
            )
        self.position = start + size
        return start

    def number(self, code: str, what: str) -> Any:
        """One scalar of a struct format."""
        return struct.unpack_from("<" + code, self._bytes, self.advance(struct.calcsize("<" + code), what))[0]

    def text(self, what: str, longest: int = MAX_INTEGER) -> str:
        """One UTF-8 string with its length before it."""
        size = self.number("Q", what)
        if size > longest:
            raise CheckpointError(f"{self.path}: damaged header: {what} has {size} bytes, at most {longest} are read")
        start = self.advance(size, what)
        try:
            return str(self._bytes[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: damaged header: {what} at byte {start} is not UTF-8") from error

    def value(self, kind: int, key: str) -> object:
        """A metadata value: int, float, bool, str, list of str, or a NumPy vector for an array of numbers."""
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self._array(self.number("I", key), self.number("Q", key), key)
        code = self._code(kind, key)
        value = self.number(code, key)
        return float(str(np.float32(value))) if code == "f" else value

    def _array(self, kind: int, count: int, key: str) -> list[str] | NDArray[Any]:
        if kind == _STRING:
            if count > MAX_STRINGS:
                raise CheckpointError(
                    f"{self.path}: damaged header: {key!r} has {count} strings, at most {MAX_STRINGS} are read"
                )
            return [self.text(key) for _ in range(count)]
        dtype = np.dtype("<" + self._code(kind, key))
        start = self.advance(count * dtype.itemsize, key)
        return np.frombuffer(self._bytes, dtype, count, start)

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: damaged header: metadata key {key!r} has unknown value type {kind}")
        return _SCALARS[kind]


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type number and offset in the data section, as the file gives them."""
    name = cursor.text("a tensor's name", MAX_NAME)
    rank = cursor.number("I", name)
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has {rank} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.number("Q", name) for _ in range(rank))[::-1]  # the file has the fastest axis first
    return name, shape, cursor.number("I", name), cursor.number("Q", name)


def _place(
    path: Path, entries: list[tuple[str, tuple[int, ...], int, int]], end: int, alignment: int, file_size: int
) -> tuple[TensorInfo, ...]:
    """Turn the entries into places in the file; they must follow one another as the specification lays them."""
    data_start = -(-end // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    expected = 0  # offset of the next tensor in the data section
    for name, shape, number, offset in entries:
        if name in placed:
            raise CheckpointError(f"{path}: tensor {name!r} occurs twice")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(f"{path}: tensor {name!r} has type {number}, which gguf does not know") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for length in shape:
            elements *= length
        if elements == 0 or shape[-1] % block:
            raise CheckpointError(
                f"{path}: tensor {name!r} of type {kind.name} has shape {list(shape)}: "
                f"a row must be a positive multiple of {block}"
            )
        size = elements // block * block_bytes
        if offset != expected:
            raise CheckpointError(f"{path}: tensor {name!r} is said to lie at {offset}, its turn is at {expected}")
        if data_start + offset + size > file_size:
            raise CheckpointError(
                f"{path}: the file is truncated: tensor {name!r} ends at byte {data_start + offset + size}, "
                f"the file has {file_size}"
            )
        placed[name] = TensorInfo(name, kind, shape, data_start + offset, size)
        expected = -(-(offset + size) // alignment) * alignment
    return tuple(placed.values())
