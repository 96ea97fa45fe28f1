"""Rotary position embedding: frequencies, tables of every position, their look-up or feeding, and the rotation itself.

Plain torch; knows no checkpoint and no family. The numbers come as a `RopeConfig`, and these of its fields are read:

| type | fields beside theta and rotary_dim |
|---|---|
| default | |
| linear | factor |
| dynamic | factor, original_max_position |
| llama3 | factor, low_freq_factor, high_freq_factor, original_max_position |
| yarn | factor, original_max_position, beta_fast, beta_slow, truncate |
| longrope | original_max_position, short_factor, long_factor |
| proportional | rotated_pairs, factor (None: 1) |

Any type may have sections, attention_scaling and query_scale, the last two applied to the tables.

Shapes: c rows of one run, C key slots, D head dimension, R rotary dimension (R <= D).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rollkv.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, slots: int) -> Tensor:
    """Angle per position of each rotated pair, (R / 2,) float32.

    slots: C. Types dynamic and longrope choose by the length of the text; a graph has one set, that of a full cache.

    theta^(-2i / R) (Su et al. 2021, arXiv:2104.09864, section 3.2.2), changed by the type: linear divides by `factor`
    (arXiv:2306.15595); dynamic raises theta; llama3 divides where the wavelength is long, with a linear ramp between
    two bounds (the Llama 3.1 release); yarn the same with other bounds (arXiv:2309.00071, section 3.2); longrope
    divides each by a number of its own (arXiv:2402.13753); proportional leaves the last pairs at rest. In float32 step
    by step as transformers computes it: one unit in the last place is an angle of 1e-2 at position 100,000.
    """
    powers = _powers(rope, rope.theta)
    if rope.type == "default":
        return 1.0 / powers
    if rope.type == "longrope":
        assert rope.original_max_position is not None
        factors = rope.long_factor if slots > rope.original_max_position else rope.short_factor
        assert factors is not None
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    if rope.type == "proportional":
        assert rope.rotated_pairs is not None
        resting = torch.zeros(rope.rotary_dim // 2 - rope.rotated_pairs, dtype=torch.float32)
        return torch.cat((1.0 / powers, resting)) / (1.0 if rope.factor is None else rope.factor)
    assert rope.factor is not None
    if rope.type == "linear":
        return 1.0 / powers / rope.factor
    assert rope.original_max_position is not None
    if rope.type == "dynamic":
        length = max(slots, rope.original_max_position)
        growth = (rope.factor * length / rope.original_max_position) - (rope.factor - 1)
        return 1.0 / _powers(rope, rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2)))
    if rope.type == "llama3":
        return _llama3(rope, 1.0 / powers)
    assert rope.type == "yarn"
    return _yarn(rope, powers)


def _powers(rope: RopeConfig, theta: float) -> Tensor:
    """theta^(2i / R) of the pairs that turn. The vector is no longer than needed: its last bits hang on its length."""
    exponents = torch.arange(0, 2 * rope.pairs, 2, dtype=torch.int64).to(torch.float32) / rope.rotary_dim
    powers: Tensor = theta**exponents
    return powers


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    assert rope.factor is not None
    assert rope.original_max_position is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    wavelength = 2 * math.pi / plain
    ramp = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = (1 - ramp) * plain / rope.factor + ramp * plain
    long = wavelength > rope.original_max_position / rope.low_freq_factor
    short = wavelength < rope.original_max_position / rope.high_freq_factor
    return torch.where(long, plain / rope.factor, torch.where(short, plain, blend))


def _yarn(rope: RopeConfig, powers: Tensor) -> Tensor:
    """Pairs that turn more than beta_fast times within the original length stay, those below beta_slow are divided."""
    assert rope.factor is not None
    assert rope.original_max_position is not None
    assert rope.beta_fast is not None
    assert rope.beta_slow is not None
    bounds = [
        rope.rotary_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    ]
    if rope.truncate:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def rope_tables(rope: RopeConfig, max_position: int, slots: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle times attention_scaling, each (max_position, pairs that turn) float32.

    The angles are float32 products. slots: C, see `inverse_frequencies`.
    """
    frequencies = inverse_frequencies(rope, slots)[None, : rope.pairs]
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().mul_(rope.attention_scaling), angles.sin().mul_(rope.attention_scaling)


def query_scales(rope: RopeConfig, max_position: int) -> Tensor | None:
    """What a query is multiplied by at each position, (max_position, 1) float32; None: queries are not scaled.

    1 + beta ln(1 + floor(p / length)): the attention temperature of Llama 4, which Ministral 3 has too.
    """
    if rope.query_scale is None:
        return None
    beta, length = rope.query_scale
    return 1 + beta * torch.log(1 + torch.floor(torch.arange(max_position)[:, None] / length))


class Rope(nn.Module):
    """Looks the rotation of each row's position up in tables that cover every position of the model.

    Its parameters are `cos` and `sin`, (max_position, pairs that turn), and with a query scale `query_scale`,
    (max_position, 1); their values are those of `rope_tables` and `query_scales`.
    """

    def __init__(self, rope: RopeConfig, max_position: int) -> None:
        super().__init__()
        assert rope.sections is None or rope.query_scale is None, "of three positions none is that of the query scale"
        self.sections = rope.sections
        self.cos = nn.Parameter(torch.empty(max_position, rope.pairs))
        self.sin = nn.Parameter(torch.empty(max_position, rope.pairs))
        self.query_scale = nn.Parameter(torch.empty(max_position, 1)) if rope.query_scale is not None else None

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """(1, c), with sections (3, 1, c) -> cos and sin, and the query scale (1, c, 1, 1) if any.

        cos and sin are (1, c, 1, twice the pairs that turn); the first half of sin is negated, see `rotate`.
        """
        cos, sin = self._rows(self.cos, position_ids), self._rows(self.sin, position_ids)  # (1, c, R / 2)
        rotation = torch.cat((cos, cos), -1).unsqueeze(2), torch.cat((-sin, sin), -1).unsqueeze(2)
        if self.query_scale is None:
            return rotation
        return *rotation, nn.functional.embedding(position_ids, self.query_scale).unsqueeze(2)

    def _rows(self, table: Tensor, position_ids: Tensor) -> Tensor:
        """The table's rows at the positions, (1, c, R / 2).

        With sections the first pairs are taken at the first of the three positions, and so on (Qwen2-VL,
        arXiv:2409.12191, section 2.1).
        """
        rows = nn.functional.embedding(position_ids, table)
        if self.sections is None:
            return rows
        parts, start = [], 0  # rows (3, 1, c, R / 2)
        for i, pairs in enumerate(self.sections):
            parts.append(rows[i].narrow(-1, start, pairs))
            start += pairs
        return torch.cat(parts, -1)


class FedRope(nn.Module):
    """What `Rope` gives, out of the plain cos and sin of each row that the host feeds. It has no parameters."""

    def forward(self, cos: Tensor, sin: Tensor, query_scale: Tensor | None = None) -> tuple[Tensor, ...]:
        """cos and sin (1, c, R), both halves alike, and the query scale (1, c, 1) if any -> as `Rope.forward`.

        Pairs at rest (type proportional) come with cos 1 and sin 0, and turn with the others.
        """
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin.narrow(-1, 0, half), sin.narrow(-1, half, half)), -1)
        rotation = cos.unsqueeze(2), signed.unsqueeze(2)
        return rotation if query_scale is None else (*rotation, query_scale.unsqueeze(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x[i], x[i + R / 2]) of x (1, c, heads, D); dimensions from R on pass.

    cos, sin: (1, c, 1, R), as `Rope` gives them. [a, b] cos + [-b, a] sin is written as
    [a, b] cos + [b, a] [-sin, sin]: the sign is paid once a run, not per layer.
    """
    width, turning = x.shape[-1], cos.shape[-1]
    half = turning // 2
    swapped = torch.cat((x.narrow(-1, half, half), x.narrow(-1, 0, half)), -1)
    if turning == width:
        return x * cos + swapped * sin
    turned = x.narrow(-1, 0, turning) * cos + swapped * sin
    return torch.cat((turned, x.narrow(-1, turning, width - turning)), -1)


def rotate_apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first pairs (x[i], x[i + D / 2]) of x (1, c, heads, D); the others pass (type proportional).

    cos, sin: (1, c, 1, twice the pairs that turn), as `Rope` gives them.
    """
    half, pairs = x.shape[-1] // 2, cos.shape[-1] // 2
    if pairs == half:
        return rotate(x, cos, sin)
    a, b = x.narrow(-1, 0, pairs), x.narrow(-1, half, pairs)
    turned = torch.cat((a, b), -1) * cos + torch.cat((b, a), -1) * sin
    still = half - pairs
    parts = (turned.narrow(-1, 0, pairs), x.narrow(-1, pairs, still), turned.narrow(-1, pairs, pairs))
    return torch.cat((*parts, x.narrow(-1, half + pairs, still)), -1)
