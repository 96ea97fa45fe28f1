"""One mapping of the weight file for all graphs of a bundle.

ONNX Runtime maps the file once more for every graph, and keeps it mapped behind the packed copies that it computes
from; here every graph is given arrays over the same pages, which can be let go. Where a tensor lies is read from the
.onnx itself: a few fields of ONNX's protobuf messages, so that the runtime does without the onnx package.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A system maps large stretches around a page that is read, so tensors smaller than this are copied.
_SMALL = 1 << 16  # bytes
# Fields of ONNX's messages (onnx.proto) and the data types that a bundle has.
_MODEL_GRAPH, _GRAPH_INITIALIZER = 7, 5
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_EXTERNAL, _TENSOR_LOCATION = 1, 2, 8, 13, 14
_EXTERNAL = 1  # the data location of a tensor whose data lie in another file, whatever entries it has
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_DTYPES = {1: "float32", 6: "int32", 7: "int64", 10: "float16"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a graph that lies in another file. offset, length: in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    location: str
    offset: int
    length: int


class MappedWeights:
    """The weight file of a bundle as arrays, which belong to no graph."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when it cannot be read."""
        self._name = path.name
        self._map: mmap.mmap | None = None
        if path.stat().st_size:  # nothing can be mapped of an empty file
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map or b"", np.uint8)
        self._arrays: dict[StoredTensor, NDArray[Any]] = {}

    def of(self, graph: Path) -> dict[str, NDArray[Any]]:
        """The tensors that a graph has in this file, by name, read-only; what it has elsewhere is left out."""
        return {
            tensor.name: self._array(tensor)
            for tensor in stored_tensors(graph)
            if tensor.location == self._name and tensor.offset + tensor.length <= len(self._bytes)
        }

    def release(self) -> None:
        """Let go of the pages in memory; one that is read again comes back from the file."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _array(self, tensor: StoredTensor) -> NDArray[Any]:
        if tensor not in self._arrays:
            data = self._bytes[tensor.offset : tensor.offset + tensor.length].view(tensor.dtype).reshape(tensor.shape)
            self._arrays[tensor] = data.copy() if tensor.length < _SMALL else data
        return self._arrays[tensor]


def stored_tensors(graph: Path) -> list[StoredTensor]:
    """The initializers of an .onnx file that lie in another, but for names that occur twice; none of a damaged file."""
    found: list[StoredTensor | None] = []
    names: Counter[str] = Counter()
    try:
        for field, model_part in _fields(memoryview(graph.read_bytes())):
            for inner, part in _fields(_message(model_part)) if field == _MODEL_GRAPH else ():
                if inner == _GRAPH_INITIALIZER:
                    name, tensor = _tensor(_message(part))
                    names[name] += 1
                    found.append(tensor)
    except (IndexError, KeyError, ValueError):  # the engine is asked next, and says why
        return []
    return [tensor for tensor in found if tensor is not None and names[tensor.name] == 1]


def _tensor(message: memoryview) -> tuple[str, StoredTensor | None]:
    """Its name; None: its data are in the message, or it is not as a bundle has it."""
    dims: list[int] = []
    texts: dict[str, str] = {}
    name, dtype, where = "", 0, 0
    for field, value in _fields(message):
        if field == _TENSOR_DIMS:
            dims += [value] if isinstance(value, int) else _varints(value)
        elif field == _TENSOR_TYPE:
            dtype = value if isinstance(value, int) else 0
        elif field == _TENSOR_LOCATION:
            where = value if isinstance(value, int) else 0
        elif field == _TENSOR_NAME:
            name = str(_message(value), "utf-8")
        elif field == _TENSOR_EXTERNAL:
            entry = {key: str(_message(text), "utf-8") for key, text in _fields(_message(value))}
            texts[entry[_ENTRY_KEY]] = entry[_ENTRY_VALUE]
    if where != _EXTERNAL or not texts or dtype not in _DTYPES:
        return name, None
    tensor = StoredTensor(
        name, _DTYPES[dtype], tuple(dims), texts["location"], int(texts["offset"]), int(texts["length"])
    )
    size = math.prod(dims) * np.dtype(tensor.dtype).itemsize
    aligned = tensor.offset >= 0 and tensor.offset % np.dtype(tensor.dtype).itemsize == 0
    return name, tensor if tensor.length == size > 0 and aligned else None


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a protobuf message: a whole number, or the bytes of what has a length."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
        elif kind == 2:
            length, at = _varint(message, at)
            if at + length > len(message):
                raise ValueError("a field ends behind its message")
            yield key >> 3, message[at : at + length]
            at += length
        elif kind in (1, 5):  # numbers of 8 and 4 bytes: nothing here has one
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"protobuf has no wire type {kind}")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A whole number of 7 bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number has more than 10 bytes")


def _varints(packed: memoryview) -> list[int]:
    values, at = [], 0
    while at < len(packed):
        value, at = _varint(packed, at)
        values.append(value)
    return values


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands where a message is expected")
    return value
