"""Additive attention masks: 0 is visible, mask_value is hidden, nothing else.

Pure functions. `causal_mask` and `chunk_mask` are how a first prompt's masks come about; `run_mask` gives the mask of
any run, at any time, and equals them on a first prompt.

P tokens that went through before, p pads, c rows of the run, C key slots.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def causal_mask(real: NDArray[np.integer], mask_value: float, window: int | None = None) -> NDArray[np.float32]:
    """The full mask of a padded prompt, (n, n).

    real: (n,), 1 for a token and 0 for a pad. Row i sees column j when both are real, j <= i, and i - j < window.
    """
    index = np.arange(len(real))
    distance = index[:, None] - index[None, :]
    visible = (distance >= 0) & (real[:, None] == 1) & (real[None, :] == 1)
    if window is not None:
        visible &= distance < window
    return np.where(visible, 0.0, mask_value).astype(np.float32)


def chunk_mask(full: NDArray[np.float32], start: int, rows: int, kv_len: int, mask_value: float) -> NDArray[np.float32]:
    """Rows start .. start + rows - 1 of a full mask (n, n), right-aligned to (rows, kv_len).

    The last slot belongs to the run's last row; what lies left of the prompt is filled with mask_value.
    """
    end = start + rows
    part = full[start:end, max(0, end - kv_len) : end]
    mask = np.full((rows, kv_len), mask_value, np.float32)
    mask[:, kv_len - part.shape[1] :] = part
    return mask


def run_mask(
    past: int,
    pads: int,
    rows: int,
    kv_len: int,
    mask_value: float,
    *,
    window: int | None = None,
    dtype: DTypeLike = np.float32,
) -> NDArray[np.floating]:
    """The mask of one run after `past` tokens, (1, 1, rows, kv_len).

    Slots 0 .. C - c - 1 hold positions P - (C - c) + j (negative: never written), then p pads, then P, P + 1, ...
    Row p + i (position P + i) sees the slot of position k when 0 <= k <= P + i and P + i - k < window. A pad's row
    sees nothing.
    """
    mask = np.empty((rows, kv_len), dtype)
    fill_mask(mask, past, pads, mask_value, window)
    return mask[None, None]


def fill_mask(mask: NDArray[np.floating], past: int, pads: int, mask_value: float, window: int | None = None) -> None:
    """Write the mask of one run, see `run_mask`, into an array (rows, kv_len)."""
    rows, kv_len = mask.shape
    mask.fill(mask_value)
    stored = kv_len - rows  # slots of the cache that the run can see
    before = min(past, stored)  # cached tokens that are stored and visible without a window
    if window is None:
        mask[pads:, stored - before : stored] = 0.0
        size = rows - pads
        mask[pads:, stored + pads :] = _causal_block(rows, mask_value, mask.dtype)[:size, :size]
        return
    for row in range(pads, rows):
        last = stored + row  # this row's own slot
        within = max(0, min(before, window - 1 - (row - pads)))
        mask[row, stored - within : stored] = 0.0
        mask[row, max(stored + pads, last - window + 1) : last + 1] = 0.0


@lru_cache(maxsize=8)
def _causal_block(rows: int, mask_value: float, dtype: np.dtype[Any]) -> NDArray[np.floating]:
    """Visible on and below the diagonal, (rows, rows), kept for each number of rows; read-only."""
    block = np.full((rows, rows), mask_value, dtype)
    block[np.tri(rows, dtype=np.bool_)] = 0.0
    block.flags.writeable = False
    return block
