"""Fitting tokens to fixed shapes: padding, truncation and positions.

Pure functions on NumPy arrays and numbers; counts of real tokens drive them, never token ids.

n real tokens, c rows of a run, P tokens that went through before, p pads, C key slots.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PromptError(ValueError):
    """A prompt that the bundle cannot take as it is."""

    exit_code = 2


class LimitError(ValueError):
    """The cache or the model's positions are used up."""

    exit_code = 2


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
    protect: (start, stop) of tokens that must all be kept, such as an image's. keep_head, if None, is limit // 4;
    where protected tokens would be cut with that, the largest head below it that lets the tail hold them all, and if
    there is none, `stop`.
    Raises PromptError when "none" does not fit, keep_head is not in 0 .. limit - 1, protect is no span of the n tokens
    (whether anything is cut or not), or a protected token would be cut.
    """
    if not isinstance(how, str) or how not in ("none", "left", "middle"):
        raise PromptError(f"truncation {how!r} is unknown; allowed: none, left, middle")
    if keep_head is not None and not 0 <= whole_number("keep_head", keep_head) < limit:
        raise PromptError(f"keep_head is {keep_head}, allowed: 0 .. {limit - 1}")
    span = None if protect is None else read_span(protect, n)
    if n <= limit:
        return [(0, n)]
    if how == "none":
        raise PromptError(f"the prompt has {n} tokens, allowed are {limit}")
    head = 0 if how == "left" else limit // 4 if keep_head is None else keep_head
    if span is not None:
        start, stop = span
        most = start - (n - limit)  # the largest head that leaves the span inside the tail, if not negative
        if stop > head > most:  # neither inside the head nor inside the tail
            if how == "left" or keep_head is not None or (most < 0 and stop >= limit):
                raise PromptError(_cut_span(n, limit, how, head, start, stop))
            head = most if most >= 0 else stop
    return [(0, head), (n - (limit - head), n)] if head else [(n - limit, n)]


def read_span(protect: Any, n: int | None = None) -> tuple[int, int]:
    """A span (start, stop) of protected tokens, checked; it must end within the n tokens of the prompt, if n is given.

    Raises PromptError.
    """
    try:
        start, stop = protect
        if isinstance(protect, str | bytes):
            raise TypeError
        span = whole_number("protect", start), whole_number("protect", stop)
    except (TypeError, ValueError):  # PromptError too
        raise PromptError(f"protect is {_shown(protect)}, allowed: two whole numbers, start and stop") from None
    if not 0 <= span[0] < span[1]:
        raise PromptError(f"protect is {span[0]}:{span[1]}, allowed: start:stop with 0 <= start < stop")
    if n is not None and span[1] > n:
        raise PromptError(f"protect is {span[0]}:{span[1]}, the prompt has {n} tokens")
    return span


def check_protect(protect: Any, how: str, on_limit: str, n: int | None = None) -> tuple[int, int]:
    """A span as `read_span` gives it, which the settings can guard: it holds against truncation alone.

    Raises PromptError where nothing is truncated and the oldest tokens may be forgotten, protected or not.
    """
    span = read_span(protect, n)
    if how == "none" and on_limit != "stop":
        raise PromptError(
            f"protect goes with truncation left or middle; without one, on_limit {on_limit} forgets those tokens too"
        )
    return span


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start on."""
    end = min(len(a), len(b))
    if a[:end] == b[:end]:
        return end
    return next(i for i in range(end) if a[i] != b[i])


def check_word(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise PromptError when a setting is none of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise PromptError(f"{name} {value!r} is unknown; allowed: {', '.join(allowed)}")


def whole_number(name: str, value: Any) -> int:
    """An integer of Python or NumPy as int. Raises PromptError for anything else, a truth value too."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise PromptError(f"{name} is {_shown(value)}, allowed: a whole number") from None


def _shown(value: Any) -> str:
    """A value for a message: one line, cut if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


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
    if not pads:
        return np.arange(past, past + rows)
    positions = np.zeros(rows, np.int64)
    positions[pads:] = np.arange(past, past + rows - pads)
    return positions


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
