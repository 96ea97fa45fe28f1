"""Every cached tensor of a session, and which positions they hold.

Tensors of one shape and one window lie in one buffer: a run's new tokens reach all of them in one copy. Knows no ids
and runs no graph. P, C, Cs and W as in the contract; S pinned tokens of the policy `sinks`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.align import LimitError
from rollkv.runtime.cache import RollingBuffer
from rollkv.runtime.manifest import SLOT_AXES, GraphInfo, Manifest, ValueInfo
from rollkv.runtime.sinks import turn_keys
from rollkv.runtime.snapshot import CachePart

Array = NDArray[np.floating]


@dataclass(frozen=True)
class Group:
    """N cached tensors of one shape: names of the past inputs and new outputs, and the buffer (N, *shape)."""

    pasts: tuple[ValueInfo, ...]
    names: tuple[str, ...]  # theirs
    news: tuple[str, ...]
    axis: int  # of the slots, in the shape of one tensor
    window: int | None
    buffer: RollingBuffer
    slots: int  # of the window when it sees C; the buffer's may be fewer, see KvCache.fit

    def visible(self, kv_len: int) -> Array:
        """The last min(C', slots) slots of all tensors, which a graph of the visible length C' reads: a view."""
        window, count = self.buffer.window(), min(kv_len, self.slots)
        if count == self.buffer.slots:
            return window
        assert self.axis == 1, f"a window of {self.buffer.slots} slots must be laid out anew for {count}"
        return window[:, :, self.buffer.slots - count :]

    def shape_of(self, rows: int) -> tuple[int, ...]:
        """Shape of the new tokens of a run of `rows` rows, all tensors together."""
        shape = [len(self.pasts), *self.pasts[0].shape]
        shape[self.axis + 1] = rows
        return tuple(shape)


class KvCache:
    """All groups of a session, which roll together."""

    def __init__(self, m: Manifest, decode: GraphInfo, rows: int, slack: int | None, fixed: bool) -> None:
        """rows: the most that one run adds. slack: of each buffer, in slots.

        None: as many slots as the window has. One slack serves all tensors of a group, so that is little memory; no
        window is copied before tokens are forgotten, and until then every rewind moves its start alone.
        """
        self._m = m
        new_of: dict[str, str] = dict(m.kv_pairs)
        kinds: dict[tuple[tuple[int, ...], int, int | None], list[ValueInfo]] = {}
        for value in decode.inputs:
            if value.role in ("past_key", "past_value"):
                assert value.layer is not None
                axis = SLOT_AXES[m.kv_layout][value.role == "past_value"]
                kinds.setdefault((tuple(value.shape), axis, m.layers[value.layer].window), []).append(value)
        self.groups: list[Group] = []
        for (shape, axis, window), values in kinds.items():
            buffer = RollingBuffer(
                (len(values), *shape),
                axis + 1,
                values[0].dtype,
                shape[axis] if slack is None else max(slack, min(rows, shape[axis])),
                fixed,
            )
            names = tuple(value.name for value in values)
            news = tuple(new_of[name] for name in names)
            self.groups.append(Group(tuple(values), names, news, axis, window, buffer, shape[axis]))
        self.kv_len = 0  # for which the windows are laid out; 0: for any, as they are in bskd and where nothing is held
        self._first = [0] * len(self.groups)  # position of the oldest token that each group holds
        self._pinned: list[Array] = []  # the first tokens as they were stored, one array per group without a window

    @property
    def nbytes(self) -> int:
        """Bytes of all windows."""
        return sum(group.buffer.nbytes for group in self.groups)

    @property
    def copied_bytes(self) -> int:
        """Bytes copied by moving windows, since the last reset."""
        return sum(group.buffer.copied_bytes for group in self.groups)

    @property
    def forgot(self) -> bool:
        """Whether a layer without a window has dropped a token."""
        return any(first > 0 and group.window is None for first, group in zip(self._first, self.groups, strict=True))

    def fit(self, kv_len: int) -> None:
        """Lay the windows out for a graph of the visible length C', which is not below `kv_len` now.

        In bskd the last slots of a window lie in one stretch, and nothing is done.
        """
        if self._m.kv_layout == "bskd" or kv_len == self.kv_len:
            return
        assert kv_len > self.kv_len
        for group in self.groups:
            slots = min(kv_len, group.slots)
            if slots != group.buffer.slots:
                group.buffer.resize(slots)
        self.kv_len = kv_len

    def reset(self) -> None:
        """All slots zero."""
        self.kv_len = 0
        self._first = [0] * len(self.groups)
        self._pinned = []
        for group in self.groups:
            group.buffer.reset()

    def roll(self, new: Sequence[Array], skip: int, stop: int, position: int) -> None:
        """Append rows skip .. stop - 1 of a run; new: an array of `Group.shape_of` for each. position: P after it."""
        for index, group in enumerate(self.groups):
            group.buffer.roll(new[index], skip, stop)
            self._first[index] = max(self._first[index], position - group.buffer.slots)

    def can_rewind(self, position: int) -> bool:
        """Whether every token that tokens from `position` on can see is still held.

        So while no layer has dropped a token; a layer with a window needs the last W - 1 only.
        """
        return all(
            first <= (0 if group.window is None else max(0, position - (group.window - 1)))
            for first, group in zip(self._first, self.groups, strict=True)
        )

    def rewind(self, count: int) -> None:
        """Take the newest `count` tokens off, which `can_rewind` allowed."""
        for group in self.groups:
            group.buffer.rewind(count)

    def parts(self, position: int) -> tuple[CachePart, ...]:
        """A copy of what is held after `position` tokens."""
        parts = []
        for first, group in zip(self._first, self.groups, strict=True):
            count = min(position - first, group.buffer.slots)
            held = group.buffer.blocks()  # (R, C, U), of all N tensors
            data = held[:, held.shape[1] - count :].copy()
            shape = (len(group.pasts), len(held) // len(group.pasts), count, held.shape[2])
            parts.append(CachePart(first, group.window, data.reshape(shape)))
        return tuple(parts)

    def check(self, parts: Sequence[CachePart]) -> None:
        """Raise LimitError when parts are of another cache."""
        fits = len(parts) == len(self.groups)
        for part, group in zip(parts, self.groups, strict=False):
            (tensors, blocks, count, unit), held = part.data.shape, group.buffer.blocks()
            fits = fits and part.window == group.window and part.data.dtype == held.dtype and count <= group.slots
            fits = fits and (tensors, tensors * blocks, unit) == (len(group.pasts), held.shape[0], held.shape[2])
        if not fits:
            raise LimitError("the saved tokens belong to a cache of other sizes")

    def load(self, parts: Sequence[CachePart]) -> None:
        """Hold what `parts` gave, which `check` has passed."""
        self.reset()
        position = max(part.first + part.data.shape[2] for part in parts)
        self.fit(next((kv_len for kv_len in self._m.kv_lens if kv_len >= position), self._m.max_kvcache_len))
        for index, (part, group) in enumerate(zip(parts, self.groups, strict=True)):
            tensors, blocks, count, unit = part.data.shape
            group.buffer.load(part.data.reshape(tensors * blocks, count, unit))
            self._first[index] = part.first

    # Sinks

    def pin(self, count: int, position: int) -> None:
        """Keep a copy of the first `count` tokens, all of which are still held after `position` tokens."""
        assert not self.forgot
        self._pinned = []
        for group in self.groups:
            if group.window is None:
                start = group.buffer.slots - position
                self._pinned.append(_slots(group, start, start + count).copy())

    @contextlib.contextmanager
    def pinned_before(self, rows: int, delta: int) -> Iterator[None]:
        """For one run of `rows` rows the pinned tokens stand in the slots that it sees first, moved by delta positions.

        The graph drops its first `rows` slots, so these are slots rows .. rows + S - 1. When the run fails, what they
        held is there again.
        """
        overwritten = []
        try:
            for pinned, group in zip(self._pinned, (g for g in self.groups if g.window is None), strict=True):
                slots = _slots(group, rows, rows + pinned.shape[group.axis + 1])
                turned = self._turned(group, pinned, delta)
                overwritten.append((slots, slots.copy()))
                slots[...] = turned
            yield
        except BaseException:
            for slots, before in overwritten:
                slots[...] = before
            raise

    def _turned(self, group: Group, pinned: Array, delta: int) -> Array:
        """Keys rotated by the rope of their layer, values as they are."""
        turned = pinned.copy()
        by_rope: dict[str, list[int]] = {}
        for index, value in enumerate(group.pasts):
            rope = self._m.layers[value.layer or 0].rope
            if value.role == "past_key" and rope is not None:
                by_rope.setdefault(rope, []).append(index)
        for name, indices in by_rope.items():
            keys = pinned[indices]
            if self._m.kv_layout == "bksd-kt":  # (N, 1, K, D, S)
                turned[indices] = turn_keys(keys.swapaxes(-1, -2), delta, self._m.rope[name]).swapaxes(-1, -2)
            else:
                turned[indices] = turn_keys(keys, delta, self._m.rope[name])
        return turned


def _slots(group: Group, start: int, stop: int) -> Array:
    """Slots start .. stop - 1 of all tensors of a group, a view."""
    index = (slice(None),) * (group.axis + 1) + (slice(start, stop),)
    return group.buffer.window()[index]
