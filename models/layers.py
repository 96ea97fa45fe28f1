"""The parts of a static decoder: norm, rotary embedding, attention over a fixed number of slots, MLP.

Plain torch with every shape a constant, and only operations that become ONNX nodes which NPU compilers take: no rank
above 4, no rsqrt, no Where. Knows no checkpoint, no ONNX and no family: a part is built from numbers.

Shapes: c rows of one run, C key slots of one layer, H hidden size, N query heads, K key/value heads, g = N / K,
D head dimension, R rotary dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rollkv.models.config import RopeConfig

# kv_layout -> slot axis of keys, slot axis of values
SLOT_AXES = {"bskd": (1, 1), "bksd": (2, 2), "bksd-kt": (3, 2)}


class Linear(nn.Module):
    """x @ weight + bias, with the weight kept as (in, out): the graph needs no Transpose of it."""

    def __init__(self, width_in: int, width_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_in, width_out))
        self.bias = nn.Parameter(torch.empty(width_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Angle per position of each rotated pair, (R / 2,) float32.

    theta^(-2i / R) (Su et al. 2021, arXiv:2104.09864, section 3.2.2), divided by `factor` for type linear
    (arXiv:2306.15595); for type llama3 divided only where the wavelength is long, with a linear ramp between the two
    bounds (the Llama 3.1 release). In float32 step by step as transformers computes it: one unit in the last place is
    an angle of 1e-2 at position 100,000.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "default":
        return plain
    assert rope.factor is not None
    if rope.type == "linear":
        return plain / rope.factor
    assert rope.type == "llama3"
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position is not None
    wavelength = 2 * math.pi / plain
    ramp = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = (1 - ramp) * plain / rope.factor + ramp * plain
    long = wavelength > rope.original_max_position / rope.low_freq_factor
    short = wavelength < rope.original_max_position / rope.high_freq_factor
    return torch.where(long, plain / rope.factor, torch.where(short, plain, blend))


def rope_tables(rope: RopeConfig, max_position: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each (max_position, R / 2) float32; the angles are float32 products."""
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies(rope)[None, :]
    return angles.cos(), angles.sin()


class Rope(nn.Module):
    """Looks the rotation of each row's position up in tables that cover every position of the model."""

    def __init__(self, rope: RopeConfig, max_position: int) -> None:
        super().__init__()
        self.cos = nn.Parameter(torch.empty(max_position, rope.rotary_dim // 2))
        self.sin = nn.Parameter(torch.empty(max_position, rope.rotary_dim // 2))

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(1, c) -> cos and sin, (1, c, 1, R) each; the first half of sin is negated, see `rotate`."""
        cos = nn.functional.embedding(position_ids, self.cos)  # (1, c, R / 2)
        sin = nn.functional.embedding(position_ids, self.sin)
        return torch.cat((cos, cos), -1).unsqueeze(2), torch.cat((-sin, sin), -1).unsqueeze(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x[i], x[i + R / 2]) of x (1, c, heads, R).

    [a, b] cos + [-b, a] sin is written as [a, b] cos + [b, a] [-sin, sin]: the sign is paid once a run, not per layer.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat((x.narrow(-1, half, half), x.narrow(-1, 0, half)), -1)
    return x * cos + swapped * sin


class Attention(nn.Module):
    """Attention of c rows over the last C of past and new keys.

    Query heads that share a key/value head are folded into its rows, so no key is repeated. The mask alone decides
    what a row sees.
    """

    def __init__(
        self,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_eps: float | None,
        kv_layout: str,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.kv_layout = heads, kv_heads, head_dim, kv_layout
        self.q = Linear(hidden, heads * head_dim, qkv_bias)
        self.k = Linear(hidden, kv_heads * head_dim, qkv_bias)
        self.v = Linear(hidden, kv_heads * head_dim, qkv_bias)
        self.out = Linear(heads * head_dim, hidden, out_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past_key: Tensor, past_value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (1, c, H), cos, sin (1, c, 1, D), mask (1, 1, c, C), past in kv_layout -> (1, c, H), new key and value."""
        rows = x.shape[1]
        group = self.heads // self.kv_heads
        q = self.q(x).view(1, rows, self.heads, self.head_dim)
        k = self.k(x).view(1, rows, self.kv_heads, self.head_dim)
        v = self.v(x).view(1, rows, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)

        if self.kv_layout == "bskd":
            new_key, new_value = k, v  # (1, c, K, D)
        else:
            new_value = v.permute(0, 2, 1, 3)  # (1, K, c, D)
            new_key = k.permute(0, 2, 1, 3) if self.kv_layout == "bksd" else k.permute(0, 2, 3, 1)
        key_axis, value_axis = SLOT_AXES[self.kv_layout]
        keys = _belt(past_key, new_key, key_axis)
        values = _belt(past_value, new_value, value_axis)
        slots = mask.shape[-1]
        if self.kv_layout == "bskd":
            keys, values = keys.permute(0, 2, 3, 1), values.permute(0, 2, 1, 3)
        elif self.kv_layout == "bksd":
            keys = keys.transpose(2, 3)
        # keys (1, K, D, C), values (1, K, C, D)

        q = q.view(rows, self.kv_heads, group, self.head_dim).permute(1, 2, 0, 3)  # (K, g, c, D)
        q = q.reshape(1, self.kv_heads, group * rows, self.head_dim)
        scores = (q @ keys) * self.head_dim**-0.5  # (1, K, g c, C)
        scores = scores.view(self.kv_heads, group, rows, slots) + mask
        weights = torch.softmax(scores, -1).view(1, self.kv_heads, group * rows, slots)
        mixed = (weights @ values).view(self.kv_heads, group, rows, self.head_dim)
        mixed = mixed.permute(2, 0, 1, 3).reshape(1, rows, self.heads * self.head_dim)
        return self.out(mixed), new_key, new_value


def _belt(past: Tensor, new: Tensor, axis: int) -> Tensor:
    """The last C slots of past and new together: concat(past, new)[c:] along the slot axis.

    The dropped head is cut before the joining, which copies less; with c == C nothing of the past is left, and it is
    joined first so that the graph still takes it.
    """
    rows, slots = new.shape[axis], past.shape[axis]
    if rows == slots:
        return torch.cat((past, new), axis).narrow(axis, rows, slots)
    return torch.cat((past.narrow(axis, rows, slots - rows), new), axis)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate = Linear(hidden, width, bias)
        self.up = Linear(hidden, width, bias)
        self.down = Linear(width, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(1, c, H) -> (1, c, H)."""
        gate = self.gate(x)
        out: Tensor = self.down(gate * torch.sigmoid(gate) * self.up(x))
        return out
