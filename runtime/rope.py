"""Rotations for graphs that take cos and sin: from positions and a bundle's `RopeInfo`, in NumPy.

Knows no graph and no session. Nothing is made ahead: a table of every position of a model may be larger than the
model's caches, while a run needs `rows` lines of it, which take microseconds. R rotary dimension, n rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.manifest import RopeInfo

Rows = NDArray[np.float32]


def cos_and_sin(rope: RopeInfo, positions: NDArray[np.integer]) -> tuple[Rows, Rows]:
    """cos and sin of each position's angles, (n, R) each: both halves alike, times attention_scaling.

    positions: (n,), or (3, n) where tokens have three; see `Rotation.fill`.
    """
    rotation = Rotation(rope, positions.shape[-1])
    cos, sin = (np.empty((positions.shape[-1], rope.rotary_dim), np.float32) for _ in range(2))
    rotation.fill(positions, cos, sin)
    return cos, sin


def query_scale(rope: RopeInfo, positions: NDArray[np.integer]) -> Rows:
    """1 + beta ln(1 + floor(p / length)) of each position (n,), as (n, 1); of three positions (3, n) the first counts.

    The attention temperature of Llama 4, which Ministral 3 has too.
    """
    assert rope.query_scale is not None
    beta, length = rope.query_scale
    first = positions.reshape(-1, positions.shape[-1])[0].astype(np.float32)
    steps = np.floor(first / np.float32(length)).astype(np.float64)
    logarithm = np.log(1 + steps).astype(np.float32)
    scales: Rows = (logarithm * np.float32(beta) + np.float32(1))[:, None]
    return scales


class Rotation:
    """Fills cos and sin of one rope for runs of n rows, in scratch memory of its own."""

    def __init__(self, rope: RopeInfo, rows: int) -> None:
        half = len(rope.inv_freq)
        # a line for each row: where shapes differ NumPy takes memory for a buffer
        self._inv_freq = np.tile(np.asarray(rope.inv_freq, np.float32), (rows, 1))  # (n, R / 2)
        self._scaling = np.float32(rope.attention_scaling)
        sections = [half] if rope.sections is None else rope.sections
        ends = np.cumsum(sections).tolist()
        # which of the positions turns which pairs
        self._parts = [(k, slice(end - size, end)) for k, (end, size) in enumerate(zip(ends, sections, strict=True))]
        self._positions = np.empty((3, rows, 1), np.float32)
        self._narrow = np.empty((rows, half), np.float32)
        self._angles = np.empty(self._narrow.shape, np.float64)
        self._wide = np.empty(self._narrow.shape, np.float64)

    def fill(self, positions: NDArray[np.integer], cos: NDArray[Any], sin: NDArray[Any]) -> None:
        """Write cos and sin (n, R), of any floating type, for positions (n,) or (3, n).

        The angle of pair i is the float32 product of the position and inv_freq[i], as in transformers: at position
        100,000 an exact product would be another angle by up to 4e-3. Its cos and sin are computed in float64, rounded
        to float32, multiplied by attention_scaling in float32, and cast to the type of `cos` and `sin` last. With
        sections the first pairs turn by the first of three positions, and so on (Qwen2-VL, arXiv:2409.12191, section
        2.1); without, all by the first.
        """
        lines = positions.reshape(-1, positions.shape[-1])
        self._positions[: len(lines), :, 0] = lines
        for k, pairs in self._parts:
            np.copyto(self._narrow[:, pairs], self._positions[k])
        np.multiply(self._narrow, self._inv_freq, out=self._narrow)
        np.copyto(self._angles, self._narrow)
        half = self._narrow.shape[1]
        for function, out in ((np.cos, cos), (np.sin, sin)):
            function(self._angles, out=self._wide)
            np.copyto(self._narrow, self._wide, casting="same_kind")
            np.multiply(self._narrow, self._scaling, out=self._narrow)
            np.copyto(out[:, :half], self._narrow, casting="same_kind")
            np.copyto(out[:, half:], self._narrow, casting="same_kind")
