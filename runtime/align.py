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


class LimitError(ValueError):
    """The cache or the model's positions are used up."""

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


def truncate(
    ids: Sequence[int],
    limit: int,
    how: str = "left",
    keep_head: int | None = None,
    protect: tuple[int, int] | None = None,
) -> tuple[list[int], int]:
    """Cut ids to at most `limit` tokens, as `kept_ranges` says; returns what is kept, and how many were cut."""
    kept = [token for start, stop in kept_ranges(len(ids), limit, how, keep_head, protect) for token in ids[start:stop]]
    return kept, len(ids) - len(kept)


def kept_ranges(
    n: int, limit: int, how: str = "left", keep_head: int | None = None, protect: tuple[int, int] | None = None
) -> list[tuple[int, int]]:
    """Which of n tokens a truncation to `limit` keeps, as ranges (start, stop): ids, embeds, positions are cut alike.

    how: "left" keeps the last `limit`; "middle" keeps the first `keep_head` and the tail; "none" cuts nothing.
    protect: (start, stop) of tokens that must all be kept, such as an image's; "none" ignores it. keep_head is
    limit // 4 if None, or `stop` where the protected tokens would be cut with that and fit with this.
    Raises PromptError when "none" does not fit, keep_head is not in 0 .. limit - 1, or a protected token would be cut.
    """
    if how not in ("none", "left", "middle"):
        raise PromptError(f"truncation {how!r} is unknown; allowed: none, left, middle")
    if keep_head is not None and not 0 <= keep_head < limit:
        raise PromptError(f"keep_head is {keep_head}, allowed: 0 .. {limit - 1}")
    if protect is not None and how != "none" and not 0 <= protect[0] < protect[1]:
        raise PromptError(f"protect is {protect[0]}:{protect[1]}, allowed: start:stop with 0 <= start < stop")
    if n <= limit:
        return [(0, n)]
    if how == "none":
        raise PromptError(f"the prompt has {n} tokens, allowed are {limit}")
    head = 0 if how == "left" else limit // 4 if keep_head is None else keep_head
    if protect is not None:
        start, stop = protect
        if stop > n:
            raise PromptError(f"protect is {start}:{stop}, the prompt has {n} tokens")
        if stop > head and start < n - (limit - head):  # neither inside the head nor inside the tail
            if how == "left" or keep_head is not None or stop >= limit:
                raise PromptError(_cut_span(n, limit, how, head, start, stop))
            head = stop  # above limit // 4, else the span were inside the head
    return [(0, head), (n - (limit - head), n)] if head else [(n - limit, n)]


def _cut_span(n: int, limit: int, how: str, head: int, start: int, stop: int) -> str:
    """What to say when the tokens start .. stop - 1 would be cut."""
    kept = f"the last {limit}" if not head else f"the first {head} and the last {limit - head}"
    cures = ["a larger -L"]
    if stop < limit:
        cures.insert(0, f"truncation middle with keep_head of at least {stop}")
    elif start >= n - limit:
        cures.insert(0, f"truncation middle with keep_head of at most {start - (n - limit)}")
    return (
        f"the protected tokens {start}:{stop} cannot be kept whole: the prompt has {n} tokens, L = {limit}, and "
        f"truncation {how} keeps {kept}; choose {', or '.join(cures)}"
    )


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


def three_part_positions(n: int, images: Sequence[tuple[int, int, int]], start: int = 0) -> NDArray[np.int64]:
    """Rotary positions (3, n) of n tokens of text and images: time, height, width (Qwen2-VL, arXiv 2409.12191, 2.1).

    images: (index of its first token, h, w) of each, in order; its h * w tokens stand row by row, so a grid is counted
    in tokens, after the vision tower merged its patches. start: position of the first token.
    Text counts up on all three. Token (j, k) of an image that starts at position s has (s, s + j, s + k), and what
    follows goes on at s + max(h, w). Videos are not covered: models differ in how their time counts.
    Raises PromptError for an image outside of the n tokens or in another.
    """
    positions = np.empty((3, n), np.int64)
    at, following = 0, start  # tokens done; position of the next
    for index, h, w in images:
        size = h * w
        if min(h, w) < 1 or index < at or index + size > n:
            raise PromptError(f"image of {h} x {w} tokens at index {index}: allowed are sizes from 1 on, in {at}:{n}")
        positions[:, at:index] = np.arange(following, following + index - at)
        following += index - at
        positions[:, index : index + size] = following + np.indices((1, h, w)).reshape(3, -1)
        at, following = index + size, following + max(h, w)
    positions[:, at:] = np.arange(following, following + n - at)
    return positions
