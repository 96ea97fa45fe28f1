"""Saved states in memory, found by the tokens that they have in common with a prompt. Knows no session and no file."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.prefix import PrefixError
from rollkv.runtime.snapshot import Snapshot


class PrefixStore:
    """Snapshots in memory, at most `max_bytes` of them; the one that was not used for longest goes first.

    Any thread may use it. Nothing is copied: what `find` gives is what `add` took.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: bound of the sum of `Snapshot.nbytes`. Raises PrefixError unless it is a number from 0."""
        try:
            self.max_bytes = operator.index(max_bytes)
        except TypeError:
            self.max_bytes = -1
        if self.max_bytes < 0:
            raise PrefixError(f"max_bytes is {max_bytes!r}, allowed: whole numbers from 0 (bytes)")
        self._lock = threading.Lock()
        self._bytes = 0
        # by bundle and tokens, the least recently used first; with the tokens that can be matched, (known,)
        self._entries: OrderedDict[tuple[str, tuple[int, ...]], tuple[Snapshot, NDArray[np.int64]]] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Sum of `Snapshot.nbytes` of what is stored."""
        with self._lock:
            return self._bytes

    def add(self, snapshot: Snapshot) -> bool:
        """Store a snapshot, in place of one of the same bundle and tokens; others go until it fits.

        False, and nothing changes: it is larger than `max_bytes`, or none of its tokens can be matched by id. One
        whose tokens begin another's stays beside that: it may be usable where the longer one is not.
        """
        nbytes = snapshot.nbytes
        if nbytes > self.max_bytes or snapshot.known < 1:
            return False
        key = snapshot.bundle, snapshot.tokens
        ids = np.array(snapshot.tokens[: snapshot.known], np.int64)
        with self._lock:
            if key in self._entries:
                self._bytes -= self._entries.pop(key)[0].nbytes
            while self._bytes + nbytes > self.max_bytes:
                self._bytes -= self._entries.popitem(last=False)[1][0].nbytes
            self._entries[key] = snapshot, ids
            self._bytes += nbytes
        return True

    def find(self, ids: Sequence[int], bundle: str) -> tuple[Snapshot, int] | None:
        """The snapshot of `bundle` that shares most leading tokens with ids, and how many; None: none shares any.

        It is usable at that count, which is at least 1, and at most its `known` and len(ids): who needs logits must
        leave the last id out. Of equal ones the smallest. It counts as used.
        """
        asked = np.asarray(ids, np.int64)
        best: tuple[int, int] | None = None  # kept, - nbytes
        found = None
        with self._lock:
            for key, (snapshot, stored) in self._entries.items():
                kept = _common(asked, stored) if key[0] == bundle else 0
                rank = kept, -snapshot.nbytes
                if kept and (best is None or rank > best) and snapshot.usable(kept):
                    best, found = rank, key
            if best is None or found is None:
                return None
            self._entries.move_to_end(found)
            return self._entries[found][0], best[0]

    def clear(self) -> None:
        """Forget every snapshot."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many leading numbers of a (n,) and b (m,) are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
