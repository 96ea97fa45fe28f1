"""New tokens on their way into a session: as ids, as embeddings of a caller, with rotary positions.

Everything that a caller gives is checked here, against the manifest, before anything runs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rollkv.runtime.align import LimitError, PromptError
from rollkv.runtime.manifest import Manifest

NO_ID = -1  # a token that came as an embedding alone


@dataclass(frozen=True)
class Prompt:
    """n tokens; every part is cut alike."""

    ids: list[int]  # NO_ID where there is none
    embeds: NDArray[np.floating] | None = None  # (n, H) of the caller; None: rows of the bundle's table
    positions: NDArray[np.int64] | None = None  # (3, n); None: the next ones

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Prompt:
        """Tokens start .. stop - 1."""
        if self.embeds is None and self.positions is None:
            return Prompt(self.ids[start:stop])
        return self.keep([(start, stop)])

    def keep(self, ranges: Sequence[tuple[int, int]]) -> Prompt:
        """The tokens of ranges (start, stop), joined."""
        ids = [token for start, stop in ranges for token in self.ids[start:stop]]
        index = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        return Prompt(
            ids,
            None if self.embeds is None else self.embeds[index],
            None if self.positions is None else self.positions[:, index],
        )


def read_prompt(
    m: Manifest,
    ids: Sequence[int] | None,
    embeds: ArrayLike | None = None,
    positions: ArrayLike | None = None,
) -> Prompt:
    """What a caller gave, checked.

    Raises PromptError: no token, an id outside of the vocabulary, embeddings that the bundle does not take or of
    another shape or type, or that are not finite, positions that are not (3, n) whole numbers or negative, or that
    the bundle does not have. Raises LimitError for a position that the model does not have.
    """
    if ids is None and embeds is None:
        raise PromptError("neither ids nor embeds are given; allowed: ids, or embeds, or both")
    known = None if ids is None else _read_ids(m, ids)
    rows = None if embeds is None else _read_embeds(m, embeds)
    if rows is not None:
        if known is None:
            if m.per_layer_embedding is not None:
                raise PromptError("embeds without ids: this bundle looks up per-layer inputs by id; give ids too")
            known = [NO_ID] * len(rows)
        if len(known) != len(rows):
            raise PromptError(f"{len(known)} ids and {len(rows)} embeds are given; allowed: as many of each")
    assert known is not None
    if not known:
        raise PromptError("empty prompt: there is no token to run")
    return Prompt(known, rows, None if positions is None else _read_positions(m, positions, len(known)))


def _read_ids(m: Manifest, ids: Sequence[int]) -> list[int]:
    try:
        if any(isinstance(i, bool) for i in ids):
            raise TypeError
        known = [operator.index(i) for i in ids]
    except (TypeError, ValueError, RuntimeError):  # the last two: tensors of other libraries
        raise PromptError(f"token ids must be whole numbers, got {type(ids).__name__} {str(ids)[:40]!r}") from None
    most = m.vocab_size if m.per_layer_embedding is None else m.per_layer_embedding.shape[0]
    for index, token in enumerate(known):
        if not 0 <= token < m.vocab_size:
            raise PromptError(f"id {token} at index {index} is not in the vocabulary, allowed: 0 .. {m.vocab_size - 1}")
        if token >= most:
            raise PromptError(f"id {token} at index {index} has no per-layer input, allowed: 0 .. {most - 1}")
    return known


def _read_embeds(m: Manifest, embeds: ArrayLike) -> NDArray[np.floating]:
    """(n, H) in the type of the graphs' input."""
    if m.image_attention == "bidirectional":
        raise PromptError(
            "embeds are given, but this model lets the tokens of one image see each other both ways and the graphs are "
            "causal; allowed: text, as ids"
        )
    dtype = next((value.dtype for value in m.driven[0].inputs if value.role == "embeds"), None)
    if dtype is None:
        raise PromptError("embeds are given, but the graphs of this bundle take ids; export with --input embeds")
    return _finite(
        _array("embeds", embeds, np.floating, f"(n, {m.hidden_size}) floats", "float32"), m.hidden_size, dtype
    )


def _finite(array: NDArray[Any], width: int, dtype: DTypeLike) -> NDArray[np.floating]:
    if array.ndim != 2 or array.shape[1] != width:
        raise PromptError(f"embeds have shape {array.shape}, allowed: (n, {width})")
    with np.errstate(over="ignore"):
        rows = array.astype(dtype)
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        raise PromptError(
            f"embeds hold a number that is not finite in {np.dtype(dtype)}, the first at index {finite.argmin()}"
        )
    return rows


def _read_positions(m: Manifest, positions: ArrayLike, n: int) -> NDArray[np.int64]:
    if not m.three_part:
        raise PromptError("positions are given, but the rotary positions of this bundle have one part and count tokens")
    array = _array("positions", positions, np.integer, f"(3, {n}) whole numbers", "int64")
    if array.shape != (3, n):
        raise PromptError(f"positions have shape {array.shape}, allowed: (3, {n})")
    if array.min() < 0:
        raise PromptError(f"positions hold {array.min()}, allowed: 0 .. {m.max_position - 1}")
    if array.max() >= m.max_position:
        raise LimitError(f"positions hold {array.max()}, allowed: 0 .. {m.max_position - 1}, the model's positions")
    return array.astype(np.int64)


def _array(name: str, value: ArrayLike, kind: Any, allowed: str, dtype: str) -> NDArray[Any]:
    """value as NumPy reads it. dtype: what a caller whose values NumPy cannot read may convert them to."""
    try:
        array = np.asarray(value)
    except Exception as error:  # rows of different lengths; a tensor of bfloat16, with gradients, of another device
        why = " ".join(str(error).split())[:120]
        raise PromptError(
            f"{name} are no array; allowed: {allowed}. NumPy cannot read {type(value).__name__}: {why}. Convert a "
            f"tensor to {dtype} on the CPU first, without gradients"
        ) from None
    if not np.issubdtype(array.dtype, kind):
        raise PromptError(f"{name} have type {array.dtype}; allowed: {allowed}; convert them to {dtype}")
    return array
