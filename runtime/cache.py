"""The rolling cache: constant length, right-aligned, new tokens in at the right, old ones out at the left.

`roll` says what happens; `RollingBuffer` does it without the concatenation. The slots lie in one flat buffer with
slack behind them: a roll by r tokens moves the window's start by r and writes only the new tokens. When the slack is
used up the window is copied back to the start, once per `slack` tokens.

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
    """One cached tensor, seen as (R, C, U): R blocks of C slots of U values.

    bskd (1, C, K, D) has R = 1 and U = K D; bksd (1, K, C, D) has R = K and U = D; keys of bksd-kt (1, K, D, C) have
    R = K D and U = 1. With R > 1 the blocks stand back to back, so moving the start by r U values gives every block
    the room for its r new slots: the r slots that the block behind it just dropped.
    """

    def __init__(self, shape: tuple[int, ...], axis: int, dtype: DTypeLike, slack: int) -> None:
        """shape of the window with its slots along `axis`; slack in slots, the most that one roll may add."""
        self.shape = shape
        self.slots, self.slack = shape[axis], slack
        self._blocks, self._unit = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        self._size = math.prod(shape)
        self._flat = np.empty(self._size + slack * self._unit, dtype)
        self._start = 0  # of the window, in slots
        self.copied_bytes = 0  # by moving the window back, since the last reset
        self.reset()  # and every page is there: no step waits for the system to map one

    def reset(self) -> None:
        """All slots zero, as if nothing was ever written."""
        self._flat.fill(0)
        self._start = 0
        self.copied_bytes = 0

    def window(self) -> NDArray[np.floating]:
        """The C slots as a contiguous view of `shape`, valid until the next roll."""
        offset = self._start * self._unit
        return self._flat[offset : offset + self._size].reshape(self.shape)

    def roll(self, new: NDArray[np.floating], skip: int = 0) -> None:
        """Append the slots `skip` .. of new, which has `shape` but for its slot axis."""
        tokens = new.reshape(self._blocks, -1, self._unit)  # (R, r, U)
        skip = max(skip, tokens.shape[1] - self.slots)
        count = tokens.shape[1] - skip
        assert count <= self.slack, f"a roll of {count} slots needs as much slack, have {self.slack}"
        if self._start + count > self.slack:
            self._move_back()
        self._start += count
        if self._blocks == 1:  # one stretch of memory: the common layout, and the step path
            end = (self._start + self.slots) * self._unit
            self._flat[end - count * self._unit : end] = tokens[0, skip:].reshape(-1)
        else:
            window = self.window().reshape(self._blocks, self.slots, self._unit)
            window[:, self.slots - count :] = tokens[:, skip:]

    def _move_back(self) -> None:
        """Copy the window to the buffer's start. NumPy copies overlapping stretches of one axis without a temporary."""
        shift = self._start * self._unit
        self._flat[: self._size] = self._flat[shift : shift + self._size]
        self._start = 0
        self.copied_bytes += self._size * self._flat.itemsize


def default_slack(rows: int, kv_len: int) -> int:
    """Slack in slots for a largest run of `rows` and a window of kv_len: a quarter of it, and at least one run."""
    return max(rows, kv_len // 4)
