"""Decoder layers: the orders in which attention, MLP and their norms follow each other, a class each.

Knows no checkpoint and no ONNX. A layer takes its tensors by name (see `Decoder.calls`) and returns x, new key and new
value. Shapes as in `layers.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rollkv.models.attention import CacheForm
from rollkv.models.config import DecoderConfig, LayerConfig
from rollkv.models.joined_layers import JoinedAttention, JoinedMLP
from rollkv.models.layers import MLP, Attention, Experts, make_norm
from rollkv.models.projections import Projections

Outputs = tuple[Tensor, Tensor, Tensor]  # x (1, c, H), new key and value in kv_layout
SEPARATE = Projections()


class Layer(nn.Module):
    """What every order has: attention and MLP, or experts in its place."""

    scaled = False  # whether it applies the residual scale

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, cache: CacheForm, form: Projections = SEPARATE
    ) -> None:
        super().__init__()
        assert self.scaled or config.residual_scale == 1, f"no residual scale with order {config.order!r}"
        self.attention = JoinedAttention(config, layer, cache, form) if form.qkv else Attention(config, layer, cache)
        if layer.sparse:
            assert config.experts is not None
            self.mlp: nn.Module = Experts(config, config.experts)
        else:
            self.mlp = (JoinedMLP if form.gate_up else MLP)(config, layer.intermediate_size)

    def attend(self, x: Tensor, tensors: dict[str, Tensor]) -> Outputs:
        """Attention of x (1, c, H) with the rotation, mask and past among the layer's tensors."""
        rotation = tuple(tensors[name] for name in ("cos", "sin", "query_scale") if name in tensors)
        result: Outputs = self.attention(x, rotation, tensors["mask"], tensors["past_key"], tensors["past_value"])
        return result


class PreNorm(Layer):
    """x += s attention(norm(x)); x += s mlp(norm(x)), s the residual scale."""

    scaled = True

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, cache: CacheForm, form: Projections = SEPARATE
    ) -> None:
        super().__init__(config, layer, cache, form)
        self.attention_norm = make_norm(config, form.folds("attention_norm"))
        self.mlp_norm = make_norm(config, form.folds("mlp_norm"))
        self.scale = config.residual_scale

    def forward(self, x: Tensor, **tensors: Tensor) -> Outputs:
        """See the module."""
        y, key, value = self.attend(self.attention_norm(x), tensors)
        x = x + self._scaled(y)
        return x + self._scaled(self.mlp(self.mlp_norm(x))), key, value

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.scale == 1 else y * self.scale


class Parallel(Layer):
    """x += attention(norm(x)) + mlp(norm(x)): one norm, or with order "parallel-two" one for each."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, cache: CacheForm, form: Projections = SEPARATE
    ) -> None:
        super().__init__(config, layer, cache, form)
        self.attention_norm = make_norm(config, form.folds("attention_norm"))
        self.mlp_norm = make_norm(config, form.folds("mlp_norm")) if config.order == "parallel-two" else None

    def forward(self, x: Tensor, **tensors: Tensor) -> Outputs:
        """See the module."""
        normed = self.attention_norm(x)
        y, key, value = self.attend(normed, tensors)
        return x + y + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x)), key, value


class Sandwich(Layer):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, cache: CacheForm, form: Projections = SEPARATE
    ) -> None:
        super().__init__(config, layer, cache, form)
        self.attention_norm = make_norm(config, form.folds("attention_norm"))
        self.attention_post_norm = make_norm(config)
        self.mlp_norm = make_norm(config, form.folds("mlp_norm"))
        self.mlp_post_norm = make_norm(config)

    def forward(self, x: Tensor, **tensors: Tensor) -> Outputs:
        """See the module."""
        y, key, value = self.attend(self.attention_norm(x), tensors)
        x = x + self.attention_post_norm(y)
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x))), key, value


class PostNorm(Layer):
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, cache: CacheForm, form: Projections = SEPARATE
    ) -> None:
        super().__init__(config, layer, cache, form)
        self.attention_post_norm, self.mlp_post_norm = make_norm(config), make_norm(config)

    def forward(self, x: Tensor, **tensors: Tensor) -> Outputs:
        """See the module."""
        y, key, value = self.attend(x, tensors)
        x = x + self.attention_post_norm(y)
        return x + self.mlp_post_norm(self.mlp(x)), key, value


BLOCKS: dict[str, Any] = {
    "pre": PreNorm,
    "parallel": Parallel,
    "parallel-two": Parallel,
    "sandwich": Sandwich,
    "post": PostNorm,
}
