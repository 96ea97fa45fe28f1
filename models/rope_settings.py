"""Rotary settings of a config.json, as Hugging Face writes them, to `RopeConfig`.

`merge_rope` brings the old and the new form to one dict, `read_rope` reads that. A setting that would change the
numbers and is not understood is refused. Knows no family, no file format and no torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from rollkv.models.config import FLOAT16_MAX, ROPE_TYPES, CheckpointError, RopeConfig
from rollkv.models.setting_values import MAX_POSITIONS

KINDS = ("full_attention", "sliding_attention")  # of layers, where the rotary embedding hangs on it

_ORIGINAL = "original_max_position_embeddings"
_ALIASES = {"su": "longrope", "mrope": "default"}
_ANY_TYPE = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
_HARMLESS = ("rope_type", "type", "finetuned", "max_position_embeddings")


def merge_rope(
    raw: Mapping[str, Any], *, theta_default: float, kind: str | None = None, where: str = "config.json"
) -> dict[str, Any]:
    """The rotary settings of a config.json as one flat dict, with `rope_theta` always there.

    They stand in `rope_scaling` (older) or `rope_parameters`, beside them `rope_theta`, `partial_rotary_factor` and
    `original_max_position_embeddings`. What stands inside goes before what stands beside, save the last, as in
    transformers.

    kind: one of KINDS for a family whose layers with a window have a rotary embedding of their own: its dict, where
    there is one for each kind; where there is not, the settings are those of "full_attention", and "sliding_attention"
    is of type default with theta from `rope_local_base_freq` or theta_default. None for a family with one for all.
    Raises CheckpointError: no objects, both forms with different content, a dict for each kind where there must be one.
    """
    forms = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{where}: {key} is {_shown(value)}, must be an object or null")
        if value:
            forms[key] = value
    if len(forms) == 2 and forms["rope_scaling"] != forms["rope_parameters"]:
        raise CheckpointError(f"{where}: rope_scaling and rope_parameters differ; allowed: one of them")
    key, given = next(iter(forms.items()), ("rope_parameters", {}))
    nested = any(name in given for name in KINDS)
    if nested and kind is None:
        raise CheckpointError(f"{where}: {key} differs by layer type; allowed for this model: one for all layers")
    if kind is not None and given and not nested:
        if key == "rope_parameters":
            raise CheckpointError(f"{where}: rope_parameters must hold an object each for {' and '.join(KINDS)}")
        if given.get("rope_type") is None and given.get("type", "default") != "default":
            raise CheckpointError(f"{where}: rope_scaling says its type as 'type'; write 'rope_type'")
    if nested:
        own = given.get(kind)
        if not isinstance(own, dict):
            raise CheckpointError(f"{where}: {key}.{kind} is {_shown(own)}, must be an object")
        given = own
    elif kind == "sliding_attention":
        given = {"rope_type": "default"}
    if kind is not None and given.get("truncate", True) is not True:
        raise CheckpointError(f"{where}: {key}: 'truncate' is not true, which transformers passes over by layer type")
    theta = raw.get("rope_local_base_freq" if kind == "sliding_attention" else "rope_theta")
    beside = {
        "rope_theta": theta_default if theta is None else theta,
        "partial_rotary_factor": raw.get("partial_rotary_factor"),
    }
    merged = {**given}
    for name, value in beside.items():
        if merged.get(name) is None and value is not None:
            merged[name] = value
    rope_type = _type(merged)
    if not nested and raw.get(_ORIGINAL) is not None and rope_type in ("llama3", "yarn", "longrope"):
        merged[_ORIGINAL] = raw[_ORIGINAL]
    return merged


def read_rope(
    settings: Mapping[str, Any],
    *,
    head_dim: int,
    rotary_dim: int,
    max_position: int,
    interleaved: bool,
    where: str,
    name: str = "full",
) -> tuple[RopeConfig, int]:
    """The rotary embedding of a merged dict (see `merge_rope`), and how many positions the model has.

    rotary_dim: R, how many dimensions of a head the family turns, with `partial_rotary_factor` worked in; type
    proportional sets it to head_dim and takes `rotated_pairs` from that factor instead.
    max_position: positions without scaling. Types yarn and dynamic extend them to the whole part of factor times the
    original length if that is more; the other types say nothing, or (longrope, llama3) count the extension in already.
    where: the file's name, for messages.
    Raises CheckpointError: a type or a setting that is not understood, a number that is missing or out of range.
    """
    given = _Settings(settings, where)
    kind = _type(settings)
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    own = _TYPES[kind]
    for key, value in settings.items():
        known = key in own.required + own.optional + own.other + _ANY_TYPE + _HARMLESS
        if not known and value is not None:
            raise CheckpointError(
                f"{where}: rope setting {key!r} = {_shown(value)} is not understood for rope type {kind!r}"
            )
    numbers = {key: given.positive(key) for key in own.required + ("rope_theta",)}
    numbers.update({key: given.positive(key) for key in own.optional if settings.get(key) is not None})
    if kind == "proportional":
        rotary_dim = head_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(f"{where}: rotary dimension {rotary_dim} must be even, from 2 to head_dim {head_dim}")
    part = given.part(head_dim, None if kind == "proportional" else rotary_dim)
    sections = given.sections(rotary_dim // 2, needed=settings.get("rope_type", settings.get("type")) == "mrope")
    rope = RopeConfig(
        name=name,
        type=kind,
        theta=numbers["rope_theta"],
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        sections=sections,
        **own.read(_Asked(given, numbers, rotary_dim, int(part * head_dim // 2), max_position)),
    )
    if not rope.attention_scaling <= FLOAT16_MAX:
        raise CheckpointError(
            f"{where}: rope settings scale cos and sin by {rope.attention_scaling:.6g}; allowed: up to {FLOAT16_MAX:g}"
        )
    positions = _extended(rope, max_position, where) if own.extends else max_position
    beta = given.weight("llama_4_scaling_beta")
    if not beta:
        return rope, positions
    length = given.length(None if kind == "dynamic" else rope.original_max_position)
    if sections is not None:
        raise CheckpointError(f"{where}: rope settings 'mrope_section' and 'llama_4_scaling_beta' do not go together")
    if 1 + beta * math.log(1 + positions // length) > FLOAT16_MAX:
        raise CheckpointError(
            f"{where}: rope setting 'llama_4_scaling_beta' {beta} makes a scale above {FLOAT16_MAX:.0f}"
        )
    return replace(rope, query_scale=(beta, length)), positions


def _extended(rope: RopeConfig, max_position: int, where: str) -> int:
    """Positions of a type that extends them: the whole part of factor times the original length, if that is more."""
    factor, original = rope.factor, rope.original_max_position
    assert factor is not None
    assert original is not None
    if factor * original > MAX_POSITIONS:
        raise CheckpointError(
            f"{where}: rope setting 'factor' {factor} times {original} positions, allowed: up to {MAX_POSITIONS}"
        )
    return max(max_position, int(factor * original))


def _type(settings: Mapping[str, Any]) -> Any:
    """The rope type that is written there, under its present name."""
    kind = settings.get("rope_type", settings.get("type", "default"))
    return _ALIASES.get(kind, kind) if isinstance(kind, str) else kind


def _is_number(value: Any) -> TypeGuard[int | float]:
    """A finite number; JSON as Python reads it may hold Infinity and NaN, and integers of any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class _Settings:
    """The dict with a reader for each kind of value; each raises CheckpointError that names the setting."""

    values: Mapping[str, Any]
    where: str  # the file's name

    def refuse(self, key: str, must: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: rope setting {key!r} is {_shown(self.values.get(key))}, must be {must}")

    def positive(self, key: str) -> float:
        value = self.values.get(key)
        if not _is_number(value) or value <= 0:
            raise self.refuse(key, "a positive number")
        return float(value)

    def weight(self, key: str) -> float:
        """0 or more; 0 too when it is not there."""
        value = self.values.get(key)
        if value is None:
            return 0.0
        if not _is_number(value) or value < 0:
            raise self.refuse(key, "a number from 0 on")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)  # null is refused: transformers takes it for false
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def length(self, default: int | None = None) -> int:
        """The original length; 1 has no logarithm to divide by."""
        value = self.values.get(_ORIGINAL)
        value = default if value is None else value
        if not _is_number(value) or value != int(value) or not 2 <= value <= MAX_POSITIONS:
            raise self.refuse(_ORIGINAL, f"an integer from 2 to {MAX_POSITIONS}")
        return int(value)

    def factors(self, key: str, pairs: int) -> tuple[float, ...]:
        value = self.values.get(key)
        listed = isinstance(value, list | tuple) and all(_is_number(x) and x > 0 for x in value)
        if value is None or not listed or len(value) != pairs:
            raise self.refuse(key, f"a list of {pairs} positive numbers")
        return tuple(map(float, value))

    def part(self, head_dim: int, rotary_dim: int | None) -> float:
        """The part of a head that turns; it must be the one that the family turns, if that is given."""
        value = self.values.get("partial_rotary_factor")
        if value is None:
            return 1.0
        if not _is_number(value) or not 0 < value <= 1:
            raise self.refuse("partial_rotary_factor", "a number above 0, up to 1")
        if rotary_dim is not None and int(head_dim * value) != rotary_dim:
            raise CheckpointError(
                f"{self.where}: rope setting 'partial_rotary_factor' = {value} turns {int(head_dim * value)} dimensions"
                f" of a head; this model turns {rotary_dim} of {head_dim}"
            )
        return float(value)

    def sections(self, pairs: int, needed: bool) -> tuple[int, int, int] | None:
        """How many pairs turn by each of three positions, one section after the other."""
        if self.flag("mrope_interleaved", False):
            raise self.refuse("mrope_interleaved", "false: interleaved sections are not supported")
        value = self.values.get("mrope_section")
        if value is None and not needed:
            return None
        three = isinstance(value, list | tuple) and len(value) == 3 and all(type(x) is int and x > 0 for x in value)
        if value is None or not three or sum(value) != pairs:
            raise self.refuse("mrope_section", f"three positive integers with the sum {pairs}")
        return value[0], value[1], value[2]


@dataclass(frozen=True)
class _Asked:
    """What the fields of one rope type are made of."""

    given: _Settings
    numbers: Mapping[str, float]  # the type's positive numbers that are there
    rotary_dim: int
    rotated_pairs: int  # by partial_rotary_factor
    max_position: int

    def refuse(self, said: str) -> CheckpointError:
        return CheckpointError(f"{self.given.where}: {said}")


def _default(asked: _Asked) -> dict[str, Any]:
    return {}


def _linear(asked: _Asked) -> dict[str, Any]:
    return {"factor": asked.numbers["factor"]}


def _dynamic(asked: _Asked) -> dict[str, Any]:
    if asked.rotary_dim == 2:
        raise asked.refuse("rotary dimension 2; rope type 'dynamic' needs more")
    return {"factor": asked.numbers["factor"], "original_max_position": asked.max_position}


def _llama3(asked: _Asked) -> dict[str, Any]:
    original, high, low = asked.given.length(), asked.numbers["high_freq_factor"], asked.numbers["low_freq_factor"]
    if high <= low:
        raise asked.refuse(f"rope setting 'high_freq_factor' {high} must be above 'low_freq_factor' {low}")
    fields = {"factor": asked.numbers["factor"], "low_freq_factor": low, "high_freq_factor": high}
    return {**fields, "original_max_position": original}


def _yarn(asked: _Asked) -> dict[str, Any]:
    """Without a factor it is what lies between the lengths.

    attention_scaling: 0.1 ln(factor) + 1 (Peng et al. 2023, arXiv:2309.00071). `mscale` and `mscale_all_dim` together
    make it a quotient of two such terms, the logarithm of each weighted (DeepSeek-V2); `attention_factor` goes before
    both. Of an mscale of 0 or alone nothing is taken, as in transformers.
    """
    given, numbers = asked.given, asked.numbers
    original = given.length(asked.max_position if "factor" in numbers else None)
    factor = numbers.get("factor", asked.max_position / original)

    def term(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = given.weight("mscale"), given.weight("mscale_all_dim")
    scaling = numbers.get("attention_factor", term(above) / term(below) if above and below else term(1))
    fields = {
        "attention_scaling": scaling,
        "factor": factor,
        "original_max_position": original,
        "beta_fast": numbers.get("beta_fast", 32.0),
        "beta_slow": numbers.get("beta_slow", 1.0),
        "truncate": given.flag("truncate", True),
    }
    if numbers["rope_theta"] == 1:
        raise asked.refuse("rope setting 'rope_theta' is 1; rope type 'yarn' needs another")
    return fields


def _longrope(asked: _Asked) -> dict[str, Any]:
    """attention_scaling: sqrt(1 + ln factor / ln original) (Ding et al. 2024, arXiv:2402.13753), if not given."""
    given, numbers = asked.given, asked.numbers
    original = given.length()
    factor = numbers.get("factor", asked.max_position / original)
    scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "attention_scaling": numbers.get("attention_factor", scaling),
        "original_max_position": original,
        **{key: given.factors(key, asked.rotary_dim // 2) for key in ("short_factor", "long_factor")},
    }


def _proportional(asked: _Asked) -> dict[str, Any]:
    return {"factor": asked.numbers.get("factor"), "rotated_pairs": asked.rotated_pairs}


@dataclass(frozen=True, kw_only=True)
class _Type:
    """One rope type: how its fields are made, and which settings it has."""

    read: Callable[[_Asked], dict[str, Any]]
    required: tuple[str, ...] = ()  # positive numbers
    optional: tuple[str, ...] = ()  # positive numbers that need not be there
    other: tuple[str, ...] = ()
    extends: bool = False  # the model has factor times the original length of positions, if that is more


_TYPES: Mapping[str, _Type] = {
    "default": _Type(read=_default, other=(_ORIGINAL,)),  # the length of a query scale; else it says nothing
    "linear": _Type(read=_linear, required=("factor",)),
    "dynamic": _Type(read=_dynamic, required=("factor",), extends=True),
    "llama3": _Type(read=_llama3, required=("factor", "low_freq_factor", "high_freq_factor"), other=(_ORIGINAL,)),
    "yarn": _Type(
        read=_yarn,
        optional=("factor", "attention_factor", "beta_fast", "beta_slow"),
        other=(_ORIGINAL, "mscale", "mscale_all_dim", "truncate"),
        extends=True,
    ),
    "longrope": _Type(
        read=_longrope,
        optional=("factor", "attention_factor"),
        other=(_ORIGINAL, "short_factor", "long_factor"),
    ),
    "proportional": _Type(read=_proportional, optional=("factor",)),
}
assert tuple(_TYPES) == ROPE_TYPES


def _shown(value: Any) -> str:
    """A value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
