"""Gemma 4: a layer of its own order, and the embeddings that a token has for each layer.

Beside the parts of `layers.py`: layers that read the keys and values of an earlier one, values that are normed and may
come from the projection of the keys, experts beside the MLP with a router of their own, and an input of each layer.
The order and every formula are those of transformers' `modeling_gemma4.py`. Knows no checkpoint and no ONNX.

Shapes as in `layers.py`; P width of a token's embedding for one layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollkv.models.attention import CacheForm, attend_cache, store
from rollkv.models.blocks import Outputs
from rollkv.models.config import DecoderConfig, ExpertsConfig, LayerConfig
from rollkv.models.layers import MLP, Experts, Linear, RMSNorm, activate, make_norm, scaled_to_one
from rollkv.models.rope import rotate_apart


class PerLayerInputs(nn.Module):
    """The row of each layer: (norm(projection(x) / sqrt(H)) + the row of the per-layer table) / sqrt(2)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.layers, self.width = config.num_layers, config.per_layer_width
        self.projection = Linear(config.hidden_size, self.layers * self.width, False)
        self.norm = RMSNorm(self.width, config.norm_eps)
        self.scale = config.hidden_size**-0.5

    def forward(self, x: Tensor, per_layer_inputs: Tensor) -> tuple[Tensor, ...]:
        """x (1, c, H), the rows of the table times their scale (1, c, layers P) -> for each layer (1, c, P)."""
        rows = x.shape[1]
        projected = (self.projection(x) * self.scale).view(1, rows, self.layers, self.width)
        joined = (self.norm(projected).view(1, rows, self.layers * self.width) + per_layer_inputs) * 2**-0.5
        return tuple(joined.narrow(2, i * self.width, self.width) for i in range(self.layers))


class Gemma4Attention(nn.Module):
    """Attention with normed queries, keys and values; keys and values are its own or those of an earlier layer."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, cache: CacheForm) -> None:
        super().__init__()
        assert config.gemma4 is not None
        assert config.attention_scale is not None
        assert config.attention_softcap is None, "Gemma 4 caps no scores"
        assert config.qk_norm == "rms-head", config.qk_norm
        assert all(rope.query_scale is None for rope in config.ropes), "Gemma 4 scales no queries by position"
        self.heads, self.kv_heads, self.head_dim = config.num_heads, layer.kv_heads, layer.head_dim
        self.scale, self.eps, self.cache = config.attention_scale, config.norm_eps, cache
        bias, kv_width = "qkv" in config.biases, self.kv_heads * self.head_dim
        self.q = Linear(config.hidden_size, self.heads * self.head_dim, bias)
        self.q_norm = RMSNorm(self.head_dim, self.eps)
        if layer.kv_from is None:
            self.k = Linear(config.hidden_size, kv_width, bias)
            self.k_norm = RMSNorm(self.head_dim, self.eps)
            both = config.gemma4.values_from_keys and layer.window is None
            self.v = None if both else Linear(config.hidden_size, kv_width, bias)
        self.out = Linear(self.heads * self.head_dim, config.hidden_size, "out" in config.biases)

    def keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The new key and value of x (1, c, H) in kv_layout."""
        shape = (1, x.shape[1], self.kv_heads, self.head_dim)
        k = self.k(x).view(shape)
        v = k if self.v is None else self.v(x).view(shape)
        return store(rotate_apart(self.k_norm(k), cos, sin), scaled_to_one(v, self.eps), self.cache.layout)

    def forward(self, x: Tensor, tensors: dict[str, Tensor], new_key: Tensor, new_value: Tensor) -> Tensor:
        """x (1, c, H), rotation, mask and past among the layer's tensors, new ones in kv_layout -> (1, c, H)."""
        q = self.q_norm(self.q(x).view(1, x.shape[1], self.heads, self.head_dim))
        q = rotate_apart(q, tensors["cos"], tensors["sin"])
        past, new = (tensors["past_key"], tensors["past_value"]), (new_key, new_value)
        out: Tensor = self.out(attend_cache(q, past, new, tensors["mask"], self.scale, None, self.cache))
        return out


class Gemma4Experts(Experts):
    """Experts whose router has a norm of its own, and a factor for each expert's weight."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__(config, experts)
        self.router_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.router_scale = config.hidden_size**-0.5
        self.factors = nn.Parameter(torch.empty(experts.count))

    def route(self, x: Tensor) -> Tensor:
        """See `Experts.route`."""
        return super().route(self.router_norm(x) * self.router_scale) * self.factors


class Gemma4Layer(nn.Module):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))); x += norm(out(act(gate(x)) * row)); x *= scalar.

    row: the token's own one of this layer, if the model has them. With experts the middle step is
    x += norm(norm(mlp(norm(x))) + norm(experts(norm(x)))), routed by x as it is.
    """

    def __init__(self, config: DecoderConfig, layer: LayerConfig, cache: CacheForm) -> None:
        super().__init__()
        assert config.order == "sandwich", config.order
        assert config.residual_scale == 1, "Gemma 4 has no residual scale"
        self.own_kv, self.activation = layer.kv_from is None, config.activation
        self.attention = Gemma4Attention(config, layer, cache)
        self.attention_norm, self.attention_post_norm = make_norm(config), make_norm(config)
        self.mlp = MLP(config, layer.intermediate_size)
        self.mlp_norm, self.mlp_post_norm = make_norm(config), make_norm(config)
        self.experts = None
        if layer.sparse:
            assert config.experts is not None
            self.experts = Gemma4Experts(config, config.experts)
            self.mlp_own_norm = make_norm(config)
            self.experts_norm, self.experts_post_norm = make_norm(config), make_norm(config)
        if config.per_layer_width:
            self.own_gate = Linear(config.hidden_size, config.per_layer_width, False)
            self.own_out = Linear(config.per_layer_width, config.hidden_size, False)
            self.own_norm = make_norm(config)
        self.scalar = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, **tensors: Tensor) -> Tensor | Outputs:
        """As the layers of `blocks.py`; with keys and values of another layer, which come as new_key and new_value, x.

        own_row: (1, c, P).
        """
        normed = self.attention_norm(x)
        if self.own_kv:
            key, value = self.attention.keys_and_values(normed, tensors["cos"], tensors["sin"])
        else:
            key, value = tensors["new_key"], tensors["new_value"]
        x = x + self.attention_post_norm(self.attention(normed, tensors, key, value))
        y = self.mlp(self.mlp_norm(x))
        if self.experts is not None:
            mixed = self.experts.mix(self.experts_norm(x), self.experts.route(x))
            y = self.mlp_own_norm(y) + self.experts_post_norm(mixed)
        x = x + self.mlp_post_norm(y)
        if "own_row" in tensors:
            x = x + self.own_norm(self.own_out(activate(self.own_gate(x), self.activation) * tensors["own_row"]))
        x = x * self.scalar
        return (x, key, value) if self.own_kv else x
