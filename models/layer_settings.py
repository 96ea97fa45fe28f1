"""What a config.json says of single layers: which have a window, which turn, which have experts.

Each rule that a family's row may name (`family.WINDOWS`, `family.TURNS`) is a small function here. Knows no file format
and no torch. `got` is a family's settings with absent ones filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollkv.models.config import CheckpointError, ExpertsConfig
from rollkv.models.family import Family
from rollkv.models.setting_values import count, is_index

_KINDS = ("full_attention", "sliding_attention")
Windows = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a rule about windows reads."""

    got: Mapping[str, Any]
    layers: int
    window: int  # of the layers that have one
    pattern: int  # the family's own period
    where: str  # the file's name

    def those(self, has: Sequence[bool]) -> Windows:
        """The window where `has` is true."""
        return tuple(self.window if own else None for own in has)

    def first(self) -> int:
        """max_window_layers."""
        value = self.got["max_window_layers"]
        if not is_index(value):
            raise CheckpointError(f"{self.where}: max_window_layers is {value!r}, must be a number of layers")
        return int(value)


def _every(asked: Asked) -> Windows:
    return asked.those([True] * asked.layers)


def _pattern(asked: Asked) -> Windows:
    """All but every n-th layer, or as the pattern spells it: EXAONE writes LLLG."""
    given = (asked.got.get(key) for key in ("sliding_window_pattern", "_sliding_window_pattern"))
    period = next((value for value in given if value is not None), asked.pattern)
    if isinstance(period, str) and period and set(period) <= {"L", "G"}:
        return asked.those([period[i % len(period)] == "L" for i in range(asked.layers)])
    count(period, "sliding_window_pattern", asked.where)
    return asked.those([(i + 1) % period != 0 for i in range(asked.layers)])


def _still(asked: Asked) -> Windows:
    """The layers that do not turn."""
    return asked.those([not turn for turn in _listed(asked.got, asked.layers, asked.where)])


def _upper(asked: Asked) -> Windows:
    """From max_window_layers on."""
    first = asked.first()
    return asked.those([i >= first for i in range(asked.layers)])


def _odd(asked: Asked) -> Windows:
    """The first, third ... layer below max_window_layers."""
    first = asked.first()
    return asked.those([i % 2 == 0 and i < first for i in range(asked.layers)])


# By Family.windows: which layers have a window when neither layer_types nor a switch says so.
WINDOW_RULES: Mapping[str, Callable[[Asked], Windows]] = {
    "none": lambda asked: (None,) * asked.layers,
    "all": _every,
    "pattern": _pattern,
    "still": _still,
    "upper": _upper,
    "odd": _odd,
}


def read_windows(family: Family, got: Mapping[str, Any], layers: int, where: str) -> Windows:
    """Window of each layer; null means none.

    use_sliding_window, where the family has it, switches all of them off; layer_types goes before the family's rule,
    save where every layer has a window. smollm3 takes layer_types whatever the switch says.
    Raises CheckpointError: a setting that is no such thing, a window of 0 (no query would see anything), layer_types
    that contradict the switch.
    """
    kinds = got.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == layers and all(kind in _KINDS for kind in kinds)
    ):
        raise CheckpointError(f"{where}: layer_types {str(kinds)[:80]} must be {layers} of {', '.join(_KINDS)}")
    window = got.get("sliding_window")
    named = kinds is not None and family.windows not in ("none", "all") and "sliding_attention" in kinds
    if not got.get("use_sliding_window", True) and not (named and family.windows == "still"):
        if named:
            raise CheckpointError(f"{where}: layer_types has sliding_attention, but use_sliding_window is not true")
        return (None,) * layers
    if named and window is None:
        raise CheckpointError(f"{where}: layer_types has sliding_attention, but sliding_window is null")
    if family.windows == "none" or window is None:
        return (None,) * layers
    count(window, "sliding_window", where, what="a positive integer or null")
    asked = Asked(got=got, layers=layers, window=window, pattern=family.pattern, where=where)
    if kinds is not None and family.windows != "all":
        return asked.those([kind == "sliding_attention" for kind in kinds])
    return WINDOW_RULES[family.windows](asked)


# By Family.turns: whether queries and keys of each layer rotate; of the settings, the windows and the file's name.
TURN_RULES: Mapping[str, Callable[[Mapping[str, Any], Windows, str], list[bool]]] = {
    "all": lambda got, windows, where: [True] * len(windows),
    "none": lambda got, windows, where: [False] * len(windows),
    "windowed": lambda got, windows, where: [window is not None for window in windows],
    "windowed-if-any": lambda got, windows, where: [
        window is not None or got["sliding_window"] is None for window in windows
    ],
    "listed": lambda got, windows, where: _listed(got, len(windows), where),
}


def _listed(got: Mapping[str, Any], layers: int, where: str) -> list[bool]:
    """no_rope_layers, where 1 means that the layer does turn; or all but every n-th."""
    listed, interval = got["no_rope_layers"], got["no_rope_layer_interval"]
    if listed is None:
        count(interval, "no_rope_layer_interval", where)
        return [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or not all(value in (0, 1) for value in listed):
        raise CheckpointError(f"{where}: no_rope_layers {str(listed)[:80]} must be {layers} of 0 and 1")
    return [bool(value) for value in listed]


def read_experts(
    family: Family, got: Mapping[str, Any], layers: int, where: str
) -> tuple[ExpertsConfig | None, list[bool]]:
    """The mixture of experts, and which layers have one. Raises CheckpointError: a setting that is no such thing."""
    keys = family.experts
    if keys is None:
        return None, [False] * layers
    count_key = next((key for key in keys.count if got[key] is not None), keys.count[0])
    number, top_k, width = (count(got[key], key, where, 2**16) for key in (count_key, keys.top_k, keys.width))
    if top_k > number:
        raise CheckpointError(f"{where}: {keys.top_k} is {top_k}, allowed: up to {count_key} {number}")
    shared: int = got.get("shared_expert_intermediate_size") or 0
    if shared != 0:
        count(shared, "shared_expert_intermediate_size", where)
    experts = ExpertsConfig(
        count=number,
        top_k=top_k,
        width=width,
        normalise=True if keys.normalise is None else bool(got[keys.normalise]),
        shared_width=shared,
    )
    step, dense = got.get("decoder_sparse_step", 1), got.get("mlp_only_layers") or []
    count(step, "decoder_sparse_step", where)
    if not isinstance(dense, list) or not all(map(is_index, dense)):
        raise CheckpointError(f"{where}: mlp_only_layers is {str(dense)[:80]}, must be a list of layers")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    return (experts if any(sparse) else None), sparse
