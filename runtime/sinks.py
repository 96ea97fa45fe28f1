"""Attention sinks: where the pinned first tokens stand, and how their cached keys are turned to get there.

Pure functions on NumPy arrays; knows no session and no cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.manifest import RopeInfo


def pinned_delta(end: int, kv_len: int) -> int:
    """How many positions the pinned tokens move for a run whose last token is at position end - 1.

    Of `kv_len` slots the run sees positions end - kv_len .. end - 1. Pinned token s takes the slot of position
    end - kv_len + s: left of the oldest token that is still seen, as near as if nothing lay between them, which is how
    StreamingLLM counts positions (Xiao et al. 2023, arXiv:2309.17453, section 3.2). 0 while nothing is forgotten.
    """
    return max(0, end - kv_len)


def turn_keys(keys: NDArray[Any], delta: int, rope: RopeInfo | None) -> NDArray[Any]:
    """Keys (..., D) as the graph returned them, turned by `delta` more positions: a new array of their dtype.

    A rotation by position p and then by d is the rotation by p + d (RoFormer, Su et al. 2021, arXiv:2104.09864,
    section 3.2.2), so a stored key needs no original. Pair i turns by delta * inv_freq[i], in float64, and the keys in
    float32 at least; dimensions from rotary_dim on pass. attention_scaling is in the keys already, once. Three-part
    positions move by delta together. rope None: the layer's keys do not turn.

    A graph's own angles are float32 products, so the result differs from its key at p + delta by what those are
    rounded: up to 6e-8 (p + delta) of the key's size.
    """
    if rope is None or delta == 0 or not rope.inv_freq:
        return keys.copy()
    angles = delta * np.asarray(rope.inv_freq, np.float64)  # (R / 2,)
    work = np.promote_types(keys.dtype, np.float32)
    cos, sin = np.cos(angles).astype(work), np.sin(angles).astype(work)
    half = rope.rotary_dim // 2
    if rope.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = keys[..., first].astype(work), keys[..., second].astype(work)  # (..., R / 2)
    turned = keys.copy()
    turned[..., first] = a * cos - b * sin
    turned[..., second] = b * cos + a * sin
    return turned
