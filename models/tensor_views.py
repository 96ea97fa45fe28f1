"""Stored tensors seen another way: rows picked, parts joined, values moved, a low-rank update added, while they stream.

Each view is a `StoredTensor` over others and reads what the asked rows need, when they are asked for. Where a view
holds more than about that block, it says so. Knows no file format and no family.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollkv.models.config import CheckpointError
from rollkv.models.tensors import StoredTensor

Index = NDArray[np.integer]
Block = NDArray[np.float32]

_SPAN = 4  # rows read for each row asked for, before runs are read one by one


@dataclass(frozen=True, eq=False)
class Picked:
    """The rows (axis 0) or columns (axis 1) `index` of a tensor with 1 or 2 axes, in the order of `index`.

    index: (n,) integers, which may repeat. Reading holds up to 4 times the block along axis 0; along axis 1 the whole
    width of the inner rows.
    Raises CheckpointError: an axis or an index that the tensor does not have.
    """

    stored: StoredTensor
    index: Index
    axis: int = 0

    def __post_init__(self) -> None:
        shape = self.stored.shape
        if not self.axis < len(shape) <= 2:
            raise CheckpointError(f"a tensor of shape {shape}: axis {self.axis} is picked of 1 or 2 axes only")
        if len(self.index) and not 0 <= self.index.min() <= self.index.max() < shape[self.axis]:
            what = ("rows", "columns")[self.axis]
            raise CheckpointError(f"a tensor of shape {shape} has no {what} {self.index.min()} .. {self.index.max()}")

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
    """Parts one behind the other along axis 0 or 1.

    Raises CheckpointError: parts that differ in another axis.
    """

    parts: tuple[StoredTensor, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        shapes = [part.shape for part in self.parts]
        if len({_resized(shape, self.axis, 0) for shape in shapes}) != 1:
            kinds = ", ".join(map(str, sorted(set(shapes))))
            raise CheckpointError(f"tensors of the shapes {kinds} cannot be joined along axis {self.axis}")

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
class Scaled:
    """Every value times a number, multiplied in float32."""

    stored: StoredTensor
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The inner shape."""
        return self.stored.shape

    def read(self, start: int, stop: int) -> Block:
        """Rows start .. stop - 1."""
        return self.stored.read(start, stop) * np.float32(self.factor)


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
    Raises CheckpointError: shapes that do not fit.
    """

    stored: StoredTensor
    a: StoredTensor
    b: StoredTensor
    scale: float
    fan_in_fan_out: bool = False  # stored is (in, out): Conv1D, an embedding

    def __post_init__(self) -> None:
        if not (len(self.a.shape) == len(self.b.shape) == 2 and self.a.shape[0] == self.b.shape[1]):
            raise CheckpointError(f"A of shape {self.a.shape} and B of shape {self.b.shape} share no rank")
        update = (self.b.shape[0], self.a.shape[1])
        update = update[::-1] if self.fan_in_fan_out else update
        if update != self.stored.shape:
            raise CheckpointError(f"an update of shape {update} does not fit a tensor of shape {self.stored.shape}")

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
