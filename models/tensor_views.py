"""Stored tensors seen another way: rows picked, parts joined, values moved, a low-rank update added, while they stream.

Each view is a `StoredTensor` over others and reads what the asked rows need, when they are asked for. Where a view
holds more than about that block, it says so. Shapes that do not fit are a fault of the caller, who has compared them
with the config (`names.TensorName.assemble`, `lora.Lora.apply`): asserted. Knows no file format and no family.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollkv.models.tensors import StoredTensor

Index = NDArray[np.integer]
Block = NDArray[np.float32]

_SPAN = 4  # rows read for each row asked for, before runs are read one by one


@dataclass(frozen=True, eq=False)
class Picked:
    """The rows (axis 0) or columns (axis 1) `index` of a tensor with 1 or 2 axes, in the order of `index`.

    index: (n,) integers, which may repeat. Reading holds up to 4 times the block along axis 0; along axis 1 the whole
    width of the inner rows.
    """

    stored: StoredTensor
    index: Index
    axis: int = 0

    def __post_init__(self) -> None:
        shape = self.stored.shape
        assert self.axis < len(shape) <= 2, f"axis {self.axis} of shape {shape}"
        if len(self.index):
            first, last = self.index.min(), self.index.max()
            assert 0 <= first <= last < shape[self.axis], f"{first} .. {last} along axis {self.axis} of shape {shape}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The inner shape with n in the place of the picked axis."""
        return _resized(self.stored.shape, self.axis, len(self.index))

    def read(self, start: int, stop: int) -> Block:
        """Rows start .. stop - 1."""
        if self.axis == 1:
            return self.stored.read(start, stop)[:, self.index]
        wanted = self.index[start:stop]
        if not len(wanted):
            return np.empty((0, *self.stored.shape[1:]), np.float32)
        first, end = int(wanted.min()), int(wanted.max()) + 1
        if end - first <= _SPAN * len(wanted):
            return self.stored.read(first, end)[wanted - first]
        block = np.empty((len(wanted), *self.stored.shape[1:]), np.float32)
        order = np.argsort(wanted, kind="stable")
        for run in np.split(order, np.flatnonzero(np.diff(wanted[order]) > 1) + 1):
            first = int(wanted[run[0]])
            block[run] = self.stored.read(first, int(wanted[run[-1]]) + 1)[wanted[run] - first]
        return block


@dataclass(frozen=True, eq=False)
class Joined:
    """Parts one behind the other along axis 0 or 1; in the other axis they agree."""

    parts: tuple[StoredTensor, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        shapes = [part.shape for part in self.parts]
        assert len({_resized(shape, self.axis, 0) for shape in shapes}) == 1, f"axis {self.axis} of {set(shapes)}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The parts' shape, their sizes along the axis added up."""
        return _resized(self.parts[0].shape, self.axis, sum(part.shape[self.axis] for part in self.parts))

    def read(self, start: int, stop: int) -> Block:
        """Rows start .. stop - 1."""
        if self.axis == 1:
            return np.concatenate([part.read(start, stop) for part in self.parts], axis=1)
        block = np.empty((max(0, stop - start), *self.shape[1:]), np.float32)
        offset = 0
        for part in self.parts:
            first, end = max(start, offset), min(stop, offset + part.shape[0])
            if first < end:
                block[first - start : end - start] = part.read(first - offset, end - offset)
            offset += part.shape[0]
        return block


@dataclass(frozen=True, eq=False)
class Stacked:
    """Vectors of one length as the rows of a matrix."""

    vectors: tuple[StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(how many vectors, their length)."""
        return (len(self.vectors), *self.vectors[0].shape)

    def read(self, start: int, stop: int) -> Block:
        """Rows start .. stop - 1: (stop - start, length)."""
        return np.stack([vector.read(0, vector.shape[0]) for vector in self.vectors[start:stop]])


@dataclass(frozen=True, eq=False)
class Plus:
    """Every value plus a number, added in float32."""

    stored: StoredTensor
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The inner shape."""
        return self.stored.shape

    def read(self, start: int, stop: int) -> Block:
        """Rows start .. stop - 1."""
        return self.stored.read(start, stop) + np.float32(self.offset)


@dataclass(frozen=True, eq=False)
class Flattened:
    """A tensor (E, R, ...) as (E * R, ...): the first two axes are one.

    Reading holds the block and one whole item (R, ...) beside it.
    """

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(E * R, ...)."""
        items, rows, *rest = self.stored.shape
        return (items * rows, *rest)

    def read(self, start: int, stop: int) -> Block:
        """Rows start .. stop - 1."""
        rows = self.stored.shape[1]
        block = np.empty((max(0, stop - start), *self.stored.shape[2:]), np.float32)
        for item in range(start // rows, -(-stop // rows)) if start < stop else ():
            first, end = max(start, item * rows), min(stop, (item + 1) * rows)
            whole = self.stored.read(item, item + 1)[0]  # (R, ...)
            block[first - start : end - start] = whole[first - item * rows : end - item * rows]
        return block


@dataclass(frozen=True, eq=False)
class Swapped:
    """A tensor (E, R, S) as (E, S, R)."""

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, S, R)."""
        items, rows, columns = self.stored.shape
        return (items, columns, rows)

    def read(self, start: int, stop: int) -> Block:
        """Items start .. stop - 1."""
        return self.stored.read(start, stop).swapaxes(1, 2)


@dataclass(frozen=True, eq=False)
class LowRank:
    """stored + scale * (b @ a), or the update transposed where the tensor is stored as (in, out).

    a: (r, in). b: (out, r). The update is summed in float64 and the sum rounded once, so that values hardly depend on
    how they are cut into blocks. Reading holds three times the block, and the smaller of a and b whole or both.
    """

    stored: StoredTensor
    a: StoredTensor
    b: StoredTensor
    scale: float
    fan_in_fan_out: bool = False  # stored is (in, out): Conv1D, an embedding

    def __post_init__(self) -> None:
        assert len(self.a.shape) == len(self.b.shape) == 2, (self.a.shape, self.b.shape)
        assert self.a.shape[0] == self.b.shape[1], f"A of shape {self.a.shape}, B of shape {self.b.shape}"
        update = (self.b.shape[0], self.a.shape[1])
        update = update[::-1] if self.fan_in_fan_out else update
        assert update == self.stored.shape, f"an update of shape {update} for a tensor of shape {self.stored.shape}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The inner shape."""
        return self.stored.shape

    def read(self, start: int, stop: int) -> Block:
        """Rows start .. stop - 1."""
        if self.fan_in_fan_out:
            left = self.a.read(0, self.a.shape[0])[:, start:stop].T  # (n, r)
            right = self.b.read(0, self.b.shape[0]).T  # (r, out)
        else:
            left = self.b.read(start, stop)  # (n, r)
            right = self.a.read(0, self.a.shape[0])  # (r, in)
        update = left.astype(np.float64) @ right.astype(np.float64)
        update *= self.scale
        update += self.stored.read(start, stop)
        return update.astype(np.float32)


def half_order(heads: int, head_dim: int, rotary_dim: int) -> NDArray[np.int64]:
    """Rows that turn rotary pairs (2i, 2i + 1) into the order of halves (i, i + R / 2), (heads * head_dim,).

    In each head the rows 0, 2, 4 .. R - 2, then 1, 3 .. R - 1, then those that do not rotate as they are.
    rotary_dim: R, even, at most head_dim.
    """
    rows = np.arange(head_dim)
    head = np.concatenate([rows[:rotary_dim:2], rows[1:rotary_dim:2], rows[rotary_dim:]])
    index: NDArray[np.int64] = np.add.outer(np.arange(heads) * head_dim, head).reshape(-1)
    return index


def grouped(heads: int, parts: int, which: int, head_dim: int) -> NDArray[np.int64]:
    """Rows of part `which` where each head stores `parts` blocks of head_dim rows, (heads * head_dim,).

    GPT-NeoX: q, k and v of a head lie together, so parts is 3.
    """
    starts = (np.arange(heads) * parts + which) * head_dim
    index: NDArray[np.int64] = np.add.outer(starts, np.arange(head_dim)).reshape(-1)
    return index


def _resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])
