"""The parts of a static decoder: linear maps, norms, attention over a fixed number of slots, MLP, mixture of experts.

Plain torch with every shape a constant, and only operations that become ONNX nodes which NPU compilers take: no rank
above 4, no rsqrt, no Where. Knows no checkpoint, no ONNX and no family.

Shapes: c rows of one run, C key slots of one layer, H hidden size, N query heads, K key/value heads, g = N / K,
D head dimension, R rotary dimension, E experts of width W.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rollkv.models.attention import CacheForm, attend_cache, store
from rollkv.models.config import DecoderConfig, ExpertsConfig, LayerConfig
from rollkv.models.rope import rotate


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
        return scaled_to_one(x, self.eps) * self.weight


def scaled_to_one(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis: an RMSNorm without a weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


class ScaledToOne(nn.Module):
    """An RMSNorm whose weight is in the product behind it."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return scaled_to_one(x, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, shape: tuple[int, ...], eps: float, bias: bool) -> None:
        """shape of the weight: (width,), or (heads, width) where each head has its own."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        x = x - x.mean(-1, keepdim=True)
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight
        return y if self.bias is None else y + self.bias


def make_norm(config: DecoderConfig, folded: bool = False) -> nn.Module:
    """A norm of the residual stream. folded: its weight is in the product behind it, which only an RMSNorm's can be."""
    if folded:
        assert config.norm == "rms", config.norm
        return ScaledToOne(config.norm_eps)
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return LayerNorm((config.hidden_size,), config.norm_eps, bias=config.norm == "layer-bias")


def make_qk_norm(config: DecoderConfig, heads: int, head_dim: int) -> nn.Module | None:
    """The norm of queries or keys, by config.QK_NORMS; None when they have none.

    "rms-head": an RMSNorm over each head, with one weight for all; "rms-head-late": the same, after the rotation;
    "rms-width": over all heads as one row; "layer-head": a layer norm over each head, with one weight and bias for all;
    "layer-heads": with a weight for each head and no bias.
    """
    kind, eps = config.qk_norm, config.norm_eps
    if kind is None:
        return None
    if kind == "rms-width":
        return RMSNorm(heads * head_dim, eps)
    if kind in ("rms-head", "rms-head-late"):
        return RMSNorm(head_dim, eps)
    if kind == "layer-head":
        return LayerNorm((head_dim,), eps, bias=True)
    assert kind == "layer-heads"
    return LayerNorm((heads, head_dim), eps, bias=False)


class Attention(nn.Module):
    """Attention of c rows over the last C of past and new keys; the mask alone decides what a row sees."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, cache: CacheForm) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.cache = config.num_heads, layer.kv_heads, layer.head_dim, cache
        self.norm_kind, self.softcap = config.qk_norm, config.attention_softcap
        self.scale = config.score_scale(layer)
        self.make_products(config.hidden_size, "qkv" in config.biases)
        self.out = Linear(self.heads * self.head_dim, config.hidden_size, "out" in config.biases)
        self.q_norm = make_qk_norm(config, self.heads, self.head_dim)
        self.k_norm = make_qk_norm(config, self.kv_heads, self.head_dim)

    def make_products(self, hidden: int, bias: bool) -> None:
        """Make the linear maps to queries, keys and values."""
        self.q = Linear(hidden, self.heads * self.head_dim, bias)
        self.k = Linear(hidden, self.kv_heads * self.head_dim, bias)
        self.v = Linear(hidden, self.kv_heads * self.head_dim, bias)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, ...], mask: Tensor, past_key: Tensor, past_value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (1, c, H), rotation as from `Rope`, mask (1, 1, c, C), past in kv_layout -> (1, c, H), new key and value.

        rotation: cos and sin (1, c, 1, R), perhaps a scale of the queries (1, c, 1, 1); empty: nothing turns.
        """
        q, k, v = self.turned(x, rotation)
        if len(rotation) == 3:
            q = q * rotation[2]
        new = store(k, v, self.cache.layout)
        mixed = attend_cache(q, (past_key, past_value), new, mask, self.scale, self.softcap, self.cache)
        return self.out(mixed), *new

    def turned(self, x: Tensor, rotation: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """x (1, c, H) -> queries (1, c, N, D) and keys (1, c, K, D), normed and turned, and values (1, c, K, D)."""
        return self.arranged(self.q(x), self.k(x), self.v(x), rotation)

    def arranged(self, q: Tensor, k: Tensor, v: Tensor, rotation: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the products (1, c, N D), (1, c, K D) and (1, c, K D)."""
        rows = q.shape[1]
        if self.norm_kind == "rms-width":
            q, k = self._norm(q, k)
        q = q.view(1, rows, self.heads, self.head_dim)
        k = k.view(1, rows, self.kv_heads, self.head_dim)
        v = v.view(1, rows, self.kv_heads, self.head_dim)
        if self.norm_kind in ("rms-head", "layer-head", "layer-heads"):
            q, k = self._norm(q, k)
        if rotation:
            q, k = rotate(q, *rotation[:2]), rotate(k, *rotation[:2])
        if self.norm_kind == "rms-head-late":
            q, k = self._norm(q, k)
        return q, k, v

    def _norm(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)


def activate(x: Tensor, kind: str) -> Tensor:
    """An activation by its name, see config.ACTIVATIONS.

    gelu and its tanh form: Hendrycks & Gimpel 2016, arXiv:1606.08415; relu2 = max(x, 0)^2: arXiv:2109.08668.
    """
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "gelu":
        return x * (torch.erf(x * math.sqrt(0.5)) + 1) * 0.5
    if kind == "gelu-tanh":
        return x * (torch.tanh((x * x * x * 0.044715 + x) * math.sqrt(2 / math.pi)) + 1) * 0.5
    positive = torch.relu(x)
    if kind == "relu":
        return positive
    assert kind == "relu2"
    return positive * positive


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202), or without a gate down(act(up(x)))."""

    def __init__(self, config: DecoderConfig, width: int) -> None:
        super().__init__()
        bias = "mlp" in config.biases
        self.activation = config.activation
        self.gate = Linear(config.hidden_size, width, bias) if config.gated_mlp else None
        self.up = Linear(config.hidden_size, width, bias)
        self.down = Linear(width, config.hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(1, c, H) -> (1, c, H)."""
        if self.gate is None:
            out: Tensor = self.down(activate(self.up(x), self.activation))
        else:
            out = self.down(activate(self.gate(x), self.activation) * self.up(x))
        return out


class Experts(nn.Module):
    """Mixture of experts with static routing: every expert is computed, and weighs 0 where it was not chosen.

    All experts together are one wide MLP whose hidden values are weighted by expert before `down` adds them up; its
    columns e W .. (e + 1) W - 1 are expert e. So a row costs count / top_k times the multiplications of a routed one.
    Routing: softmax, then the top k (Fedus et al. 2021, arXiv:2101.03961; Jiang et al. 2024, arXiv:2401.04088).
    """

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.experts, self.activation = experts, config.activation
        self.router = Linear(config.hidden_size, experts.count, False)
        self.gate = Linear(config.hidden_size, experts.count * experts.width, False)
        self.up = Linear(config.hidden_size, experts.count * experts.width, False)
        self.down = Linear(experts.count * experts.width, config.hidden_size, False)
        self.shared = MLP(config, experts.shared_width) if experts.shared_width else None
        self.shared_gate = Linear(config.hidden_size, 1, False) if experts.shared_width else None

    def forward(self, x: Tensor) -> Tensor:
        """(1, c, H) -> (1, c, H)."""
        out = self.mix(x, self.route(x))
        if self.shared is not None and self.shared_gate is not None:
            out = out + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return out

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum of all experts of x (1, c, H), each times its weight (1, c, 1, E): (1, c, H)."""
        rows, count, width = x.shape[1], self.experts.count, self.experts.width
        hidden = activate(self.gate(x), self.activation) * self.up(x)  # (1, c, E W)
        hidden = hidden.view(1, rows, count, width) * weights.view(1, rows, count, 1)
        out: Tensor = self.down(hidden.view(1, rows, count * width))
        return out

    def route(self, x: Tensor) -> Tensor:
        """(1, c, H) -> weight of each expert (1, c, 1, E), 0 for those that are not among the top k."""
        share = torch.softmax(self.router(x), -1)
        top, index = torch.topk(share, self.experts.top_k, -1)  # (1, c, k)
        if self.experts.normalise:
            top = top / top.sum(-1, keepdim=True)
        chosen = index.unsqueeze(-1) == torch.arange(self.experts.count, device=x.device)  # (1, c, k, E)
        return top.unsqueeze(2) @ chosen.to(x.dtype)
