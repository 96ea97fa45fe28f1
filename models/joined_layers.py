"""Attention and MLP of the joined form: one product where `layers.py` has several, for the same numbers.

Knows no checkpoint and no ONNX. Shapes as in `layers.py`; W width of the MLP.
"""

from __future__ import annotations

from torch import Tensor, nn

from rollkv.models.attention import CacheForm
from rollkv.models.config import DecoderConfig, LayerConfig
from rollkv.models.layers import Attention, Linear, activate
from rollkv.models.projections import Projections
from rollkv.models.rope import rotate


class JoinedAttention(Attention):
    """Attention whose queries, keys and values are one product (H, (N + 2 K) D), and turn side by side."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, cache: CacheForm, form: Projections) -> None:
        super().__init__(config, layer, cache)
        if form.into_q:
            self.scale = 1.0

    def make_products(self, hidden: int, bias: bool) -> None:
        """See `Attention.make_products`."""
        self.qkv = Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, bias)

    def turned(self, x: Tensor, rotation: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention.turned`. A norm before the rotation needs queries and keys apart."""
        rows, heads, both = x.shape[1], (self.heads, self.kv_heads, self.kv_heads), self.heads + self.kv_heads
        joined = self.qkv(x)
        if self.norm_kind not in (None, "rms-head-late"):
            q, k, v = split(joined, 2, tuple(count * self.head_dim for count in heads))
            return self.arranged(q, k, v, rotation)
        joined = joined.view(1, rows, sum(heads), self.head_dim)
        if rotation:
            turning, v = split(joined, 2, (both, self.kv_heads))
            q, k = split(rotate(turning, *rotation[:2]), 2, heads[:2])
        else:
            q, k, v = split(joined, 2, heads)
        if self.norm_kind is not None:
            q, k = self._norm(q, k)
        return q, k, v


class JoinedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up one product (H, 2 W)."""

    def __init__(self, config: DecoderConfig, width: int) -> None:
        super().__init__()
        bias = "mlp" in config.biases
        self.activation, self.width = config.activation, width
        self.gate_up = Linear(config.hidden_size, 2 * width, bias)
        self.down = Linear(width, config.hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(1, c, H) -> (1, c, H)."""
        gate, up = split(self.gate_up(x), 2, (self.width, self.width))
        out: Tensor = self.down(activate(gate, self.activation) * up)
        return out


def split(x: Tensor, axis: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Parts of x of these sizes, which lie one behind the other along the axis."""
    parts, start = [], 0
    for size in sizes:
        parts.append(x.narrow(axis, start, size))
        start += size
    return tuple(parts)
