"""What docs/contract.md has the host compute where a graph does not: rotations, and the product with the head.

Written from those words for `verify`, in float64, and shares no function with the session that it is compared with.
n rows, R rotary dimension, H and V as in the contract.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.bundle import Bundle, RopeInfo, TableInfo, ValueInfo

Wide = NDArray[np.float64]
# Of cos, sin and query scale in float32: the rounding of the number itself, of the scaling, and of the product.
ROUNDING = 2.0**-22
_ROWS = 4096  # of a head that are widened at a time


def fed_rotation(value: ValueInfo, rope: RopeInfo, positions: NDArray[np.integer]) -> Wide:
    """What the input `value` is fed at positions (n,), or (3, n): (n, R), or (n, 1) for the scale of queries."""
    by_part = np.atleast_2d(np.asarray(positions))
    if value.role == "rope_query_scale":
        assert rope.query_scale is not None
        beta, length = rope.query_scale
        return np.array([[1 + beta * np.log1p(p // length)] for p in by_part[0].tolist()])
    sections = rope.sections or [rope.rotary_dim // 2]
    part_of = [part for part, size in enumerate(sections) for _ in range(size)]  # of each pair
    turns = np.empty((by_part.shape[1], rope.rotary_dim // 2))
    for pair, (part, frequency) in enumerate(zip(part_of, rope.inv_freq, strict=True)):
        exact = by_part[part].astype(np.float64) * float(np.float32(frequency))  # of two float32: 48 bits
        turns[:, pair] = exact.astype(np.float32)  # the angle is a float32
    half = (np.cos if value.role == "rope_cos" else np.sin)(turns) * rope.attention_scaling
    return np.hstack((half, half))


def rotation_fault(value: ValueInfo, rope: RopeInfo, positions: NDArray[np.integer], fed: NDArray[Any]) -> str | None:
    """What is wrong with a fed rotation (1, n, R) or scale (1, n, 1): it is off by more than its type rounds."""
    wanted = fed_rotation(value, rope, positions)
    bound = ROUNDING + (2.0**-10 if fed.dtype == np.float16 else 0.0)
    error = np.abs(fed[0].astype(np.float64) - wanted)
    bad = ~(error <= bound * max(1.0, float(np.abs(wanted).max())))
    if not bad.any():
        return None
    row = int(np.flatnonzero(bad.any(1))[0])
    return f"row {row} of {value.name} is off by {error[row].max():.1e}, rounding allows {bound:.0e}"


def head_product(bundle: Bundle, hidden: NDArray[Any]) -> NDArray[np.float32]:
    """Logits (n, V) of hidden rows (n, H)."""
    m = bundle.manifest
    assert m.head_table is not None
    table = np.memmap(bundle.path / m.head_table.file, np.uint8, "r").reshape(m.vocab_size, -1)
    rows = hidden.astype(np.float64)
    parts = [rows @ _widened(table[i : i + _ROWS], m.head_table).T for i in range(0, m.vocab_size, _ROWS)]
    logits = np.concatenate(parts, axis=1)
    if m.head_bias is not None:
        bias = np.fromfile(bundle.path / m.head_bias.file, np.uint8).reshape(1, -1)
        logits = logits + _widened(bias, m.head_bias)
    logits = logits * m.logit_scale
    if m.logit_softcap is not None:
        logits = m.logit_softcap * np.tanh(logits / m.logit_softcap)
    return logits.astype(np.float32)


def _widened(stored: NDArray[np.uint8], info: TableInfo) -> Wide:
    """Rows of bytes as numbers: a bfloat16 is the first 16 bits of a float32."""
    if info.dtype != "bfloat16":
        return np.ascontiguousarray(stored).view({"float32": "<f4", "float16": "<f2"}[info.dtype]).astype(np.float64)
    whole = np.zeros((*stored.shape[:-1], 2 * stored.shape[-1]), np.uint8)
    whole[..., 2::4], whole[..., 3::4] = stored[..., 0::2], stored[..., 1::2]
    return whole.view("<f4").astype(np.float64)
