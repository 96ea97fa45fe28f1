"""Files of a Hugging Face folder: JSON objects, and safetensors whose tensors are read in slices.

Knows nothing of what the settings and the tensors mean.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollkv.models.config import CheckpointError
from rollkv.models.tensors import StoredTensor, refuse_lfs_pointer

_FLOATS = ("F32", "F16", "BF16", "F64")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError: not JSON, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def open_safetensors(
    path: Path, aside: tuple[str, ...] = (), unused: re.Pattern[str] | None = None
) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file by name; only the header is read.

    aside: prefixes of names that are passed over, and so are names that `unused` matches, whatever their type.
    Raises CheckpointError: no such file, a Git LFS pointer, damage, a tensor that is not of floating point.
    """
    import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 that safetensors then returns)
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):  # unlike Path's own, false for a name that is too long
        raise CheckpointError(f"{path}: this shard is missing")
    refuse_lfs_pointer(path)
    try:
        file = safe_open(path, framework="np")
        names: list[str] = file.keys()  # type: ignore[no-untyped-call]
        read = [name for name in names if not name.startswith(aside) and not (unused and unused.fullmatch(name))]
        return {name: _SafeTensor(file, name, str(path)) for name in read}
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged or cut short: {error}") from None


class _SafeTensor:
    """One tensor of a safetensors file. The file stays mapped while its tensors live."""

    def __init__(self, file: Any, name: str, where: str) -> None:
        self._slice = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())
        if self._slice.get_dtype() not in _FLOATS:
            raise CheckpointError(
                f"{where}: tensor {name} is {self._slice.get_dtype()}; allowed: {', '.join(_FLOATS)} "
                "(a quantised checkpoint must be dequantised first)"
            )
        self.storage = {"F16": "float16", "BF16": "bfloat16"}.get(self._slice.get_dtype(), "float32")

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start .. stop - 1, float32."""
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which is refused by its name
            return np.asarray(self._slice[start:stop]).astype(np.float32, copy=False)
