"""The rolling cache: constant length, right-aligned, new tokens in at the right, old ones out at the left.

`roll` says what happens; `RollingBuffer` does it without the concatenation. The slots lie in one flat buffer with
slack behind them: a roll by r tokens moves the window's start by r and writes only the new tokens. When the slack is
used up the window is copied back to the start, once per `slack` tokens. A board that registers the addresses of its
inputs cannot follow a start that moves: with `fixed` the window stays where it is and every roll moves its content.

Knows no graph: a buffer is a shape and the axis of its slots.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def roll(cache: NDArray[Any], new: NDArray[Any], axis: int, pads: int = 0) -> NDArray[Any]:
    """What a roll is: concat(cache, new[pads:])[-C:] along the slot axis, a new array of the cache's shape."""
    kept = np.take(new, range(pads, new.shape[axis]), axis)
    joined = np.concatenate((cache, kept), axis)
    return np.take(joined, range(joined.shape[axis] - cache.shape[axis], joined.shape[axis]), axis)


class RollingBuffer:
    """One cached tensor, or several of one shape, seen as (R, C, U): R blocks of C slots of U values.

    bskd (1, C, K, D) has R = 1 and U = K D; bksd (1, K, C, D) has R = K and U = D; keys of bksd-kt (1, K, D, C) have
    R = K D and U = 1; N tensors in one (N, 1, C, K, D) have N times as many blocks. The blocks stand back to back, so
    moving the start by r U values gives every block the room for its r new slots: the r slots that the block behind it
    just dropped. So the slack is that of one block, however many there are; and what a rewind brings back at the left
    of a block is no longer what was dropped there.
    """

    def __init__(self, shape: tuple[int, ...], axis: int, dtype: DTypeLike, slack: int, fixed: bool = False) -> None:
        """shape of the window with its slots along `axis`; slack in slots, the most that one roll may add.

        fixed: the window never moves; there is no slack then, and a roll of any size copies the window.
        """
        self.shape, self._axis = shape, axis
        self.slots, self.slack = shape[axis], 0 if fixed else slack
        self._blocks, self._unit = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        self._size = math.prod(shape)
        self._fixed = fixed
        self._flat = np.empty(self._size + self.slack * self._unit, dtype)
        self.start = 0  # of the window, in slots
        self.copied_bytes = 0  # by moving the window or its content, since the last reset
        self.reset()  # and every page is there: no step waits for the system to map one

    @property
    def nbytes(self) -> int:
        """Bytes of the window, without the slack."""
        return self._size * self._flat.itemsize

    def reset(self) -> None:
        """All slots zero, as if nothing was ever written."""
        self._flat.fill(0)
        self.start = 0
        self.copied_bytes = 0

    def window(self) -> NDArray[np.floating]:
        """The C slots as a contiguous view of `shape`, valid until the next roll or rewind."""
        offset = self.start * self._unit
        return self._flat[offset : offset + self._size].reshape(self.shape)

    def blocks(self) -> NDArray[np.floating]:
        """The same slots as a view of (R, C, U)."""
        return self.window().reshape(self._blocks, self.slots, self._unit)

    def roll(self, new: NDArray[np.floating], skip: int = 0, stop: int | None = None) -> None:
        """Append the slots skip .. stop - 1 of new, by default to its end; it has `shape` but for its slots."""
        tokens = new.reshape(self._blocks, -1, self._unit)  # (R, r, U)
        stop = tokens.shape[1] if stop is None else stop
        skip = max(skip, stop - self.slots)
        count = stop - skip
        if self._fixed:
            shift = count * self._unit
            self._move(shift, 0, self._size - shift)
        else:
            assert count <= self.slack, f"a roll of {count} slots needs as much slack, have {self.slack}"
            if self.start + count > self.slack:
                self._move(self.start * self._unit, 0, self._size)
                self.start = 0
            self.start += count
        if self._blocks == 1:  # one stretch of memory
            end = (self.start + self.slots) * self._unit
            self._flat[end - count * self._unit : end] = tokens[0, skip:stop].reshape(-1)
        else:
            self.blocks()[:, self.slots - count :] = tokens[:, skip:stop]

    def rewind(self, count: int) -> None:
        """Take the newest `count` slots off: what is left moves to the right end. The first slots are undefined then.

        Moves the start alone as long as that many slots were rolled since the window was last copied.
        """
        if self.start < count:
            shift = (count - self.start) * self._unit
            self._move(0, shift, self._size - shift)
            self.start = count
        self.start -= count

    def resize(self, slots: int) -> None:
        """Lay the window out anew with so many slots, at most as many as at first: the newest stay, zeros before them.

        Where R = 1 that is not needed: the last slots of the window are one stretch already.
        """
        kept = self.blocks()[:, max(0, self.slots - slots) :].copy()
        shape = (*self.shape[: self._axis], slots, *self.shape[self._axis + 1 :])
        size, copied = math.prod(shape), self.copied_bytes + kept.nbytes
        self.slots, self.shape, self._size = slots, shape, size  # in one statement, in which no Ctrl-C arrives
        self.load(kept)
        self.copied_bytes = copied

    def load(self, slots: NDArray[np.floating]) -> None:
        """Fill the last slots with slots (R, count, U); the others are zero."""
        self.reset()
        self.blocks()[:, self.slots - slots.shape[1] :] = slots

    def _move(self, source: int, target: int, size: int) -> None:
        """Copy `size` values within the buffer. NumPy copies overlapping stretches of one axis without a temporary."""
        self._flat[target : target + size] = self._flat[source : source + size]
        self.copied_bytes += size * self._flat.itemsize
