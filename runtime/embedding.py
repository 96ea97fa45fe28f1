"""Tables that stay on the host, of embeddings or a head: a memory-mapped file in its storage type, float32 out.

Knows no graph and no session.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.align import PromptError
from rollkv.runtime.manifest import BundleError, TableInfo

_STORED = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}  # NumPy has no bfloat16: its bits


class EmbeddingTable:
    """One table of a bundle. Only the rows that are asked for are read from the disk."""

    def __init__(self, path: Path, info: TableInfo) -> None:
        """path: the file. Raises BundleError when it is missing or cannot be mapped."""
        self.info = info
        try:
            self._table: NDArray[Any] = np.memmap(path, _STORED[info.dtype], "r", shape=(info.shape[0], info.shape[1]))
        except (OSError, ValueError) as error:  # ValueError: shorter than its shape
            raise BundleError(f"{path}: cannot be mapped as {info.shape} of {info.dtype}: {error}") from None

    def rows(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """The rows of ids (n,), times the table's scale: (n, width). Raises PromptError for an id without a row.

        A bfloat16 is the upper half of a float32, so widening it is exact.
        """
        index = np.asarray(ids, np.int64)
        outside = (index < 0) | (index >= self.info.shape[0])
        if outside.any():
            at = int(outside.argmax())
            raise PromptError(
                f"id {index[at]} at index {at} has no row in {self.info.file}, allowed: 0 .. {self.info.shape[0] - 1}"
            )
        stored = self._table[index]
        if self.info.dtype == "bfloat16":
            rows = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            rows = stored.astype(np.float32)
        rows *= np.float32(self.info.scale)
        return rows

    def block(self, start: int, stop: int, scratch: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows start .. stop - 1 as stored, without the scale, (stop - start, width): a view of the file or of scratch.

        scratch: (at least stop - start, width).
        """
        stored, wide = self._table[start:stop], scratch[: stop - start]
        if self.info.dtype == "float32":
            return stored
        if self.info.dtype == "bfloat16":
            bits = wide.view(np.uint32)
            np.copyto(bits, stored)
            np.left_shift(bits, 16, out=bits)
        else:
            np.copyto(wide, stored)
        return wide
