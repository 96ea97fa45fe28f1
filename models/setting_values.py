"""Values of a config.json's settings, checked; each check raises CheckpointError that names the setting.

Knows no family, no file format and no torch.
"""

from __future__ import annotations

import math
from typing import Any

from rollkv.models.config import CheckpointError

MAX_POSITIONS = 2**24  # float32 skips whole numbers above, and no model is near


def count(
    value: Any, key: str, where: str, most: int = 2**31, *, least: int = 1, what: str = "a positive integer"
) -> int:
    """An integer from `least` to `most`. what: how a message calls it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"{where}: {key} is {value!r}, must be {what}")
    if value > most:
        raise CheckpointError(f"{where}: {key} is {value}, allowed: up to {most}")
    return value


def positive(value: Any, key: str, where: str) -> float:
    """A finite number above 0."""
    if not is_positive(value):
        raise CheckpointError(f"{where}: {key} is {value!r}, must be a positive number")
    return float(value)


def items(value: Any, where: str) -> list[tuple[str, Any]]:
    """What an object holds. where: the file and the setting."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is {str(value)[:80]!r}, must be an object")
    return list(value.items())


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """A token id setting: null, an id, or a list of ids. where: the file and the setting."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(map(is_index, ids)):
        raise CheckpointError(f"{where} is {value!r}, must be a token id or a list of them")
    return ids


def is_index(value: Any) -> bool:
    """An integer from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_positive(value: Any) -> bool:
    """A finite number above 0; JSON as Python reads it may hold Infinity and NaN."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # JSON's integers have no end
        return False
