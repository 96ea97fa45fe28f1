"""Fitting tokens to fixed shapes: padding, truncation, positions, and which runs take a prompt.

Pure functions on NumPy arrays and numbers; counts of real tokens drive them, never token ids.

n real tokens, c rows of a run, P tokens that went through before, p pads, C key slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class PromptError(ValueError):
    """A prompt that the bundle cannot take as it is."""

    exit_code = 2


@dataclass(frozen=True)
class Run:
    """One run of a graph: `rows` rows, of which the first `pads` are pads."""

    rows: int
    pads: int


def aligned_length(n: int, c: int) -> int:
    """n rounded up to a multiple of c."""
    return -(-n // c) * c


def pad_left(ids: Sequence[int], c: int, pad_id: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pad on the left to a multiple of c: what board code calls `padding_data`; `truncate` comes before it.

    Returns the padded ids and a 0/1 mask of real tokens, each (aligned_length,). Raises PromptError when ids is empty.
    """
    n = len(ids)
    if n == 0:
        raise PromptError("empty prompt: there is no token to run")
    length = aligned_length(n, c)
    padded = np.full(length, pad_id, np.int64)
    real = np.zeros(length, np.int64)
    padded[length - n :] = ids
    real[length - n :] = 1
    return padded, real


def truncate(ids: Sequence[int], limit: int, how: str = "left", keep_head: int | None = None) -> tuple[list[int], int]:
    """Cut ids to at most `limit` tokens; returns what is kept, and how many were cut.

    how: "left" keeps the last `limit`; "middle" keeps the first `keep_head` (limit // 4 if None) and the tail;
    "none" cuts nothing. Raises PromptError when "none" does not fit or keep_head is not in 0 .. limit - 1.
    """
    n = len(ids)
    if how not in ("none", "left", "middle"):
        raise PromptError(f"truncation {how!r} is unknown; allowed: none, left, middle")
    if keep_head is not None and not 0 <= keep_head < limit:
        raise PromptError(f"keep_head is {keep_head}, allowed: 0 .. {limit - 1}")
    if n <= limit:
        return list(ids), 0
    if how == "none":
        raise PromptError(f"the prompt has {n} tokens, allowed are {limit}")
    head = 0 if how == "left" else limit // 4 if keep_head is None else keep_head
    return [*ids[:head], *ids[n - (limit - head) :]], n - limit


def run_positions(past: int, pads: int, rows: int) -> NDArray[np.int64]:
    """Position of each row, (rows,): 0 for a pad, P, P + 1, ... for the real tokens."""
    positions = np.zeros(rows, np.int64)
    positions[pads:] = np.arange(past, past + rows - pads)
    return positions


def plan_runs(n: int, past: int, c: int, kv_len: int) -> list[Run]:
    """The runs that take n new tokens after `past` others: the padded one first, full ones after it.

    A run of c rows drops c slots whatever its pads, so a padded run is used only while P + c <= C. Later the
    remainder goes one by one. A full run with P + c > C forgets tokens: the caller asks for it only when it may.
    """
    rest = n % c
    if rest == 0:
        first = []
    elif past + c <= kv_len:
        first = [Run(c, c - rest)]
    else:
        first = [Run(1, 0)] * rest
    return first + [Run(c, 0)] * (n // c)
