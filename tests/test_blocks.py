"""The orders of a layer, each written out as the sum that its class names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_layers import close, filled
from test_trace import config, layers
from torch import Tensor

from rollkv.models.attention import CacheForm
from rollkv.models.blocks import BLOCKS
from rollkv.models.config import ORDERS, ExpertsConfig
from rollkv.models.layers import MLP, Experts

X = torch.randn(1, 4, 20, generator=torch.Generator().manual_seed(0))


def block(order: str, **more: Any) -> Any:
    cfg = config((None,), order=order, **more)
    return filled(BLOCKS[order](cfg, cfg.layers[0], CacheForm()))


def tensors(**more: Tensor) -> dict[str, Tensor]:
    cos, sin = torch.rand(1, 4, 1, 6), torch.rand(1, 4, 1, 6)
    past = {name: torch.randn(1, 9, 2, 6) for name in ("past_key", "past_value")}
    return {"cos": cos, "sin": sin, "mask": torch.zeros(1, 1, 4, 9), **past, **more}


def by_hand(order: str, made: Any, given: dict[str, Tensor], scale: float) -> Tensor:
    """x after the layer, from the layer's own attention, MLP and norms."""

    def attention(x: Tensor) -> Tensor:
        rotation = (given["cos"], given["sin"])
        out: Tensor = made.attention(x, rotation, given["mask"], given["past_key"], given["past_value"])[0]
        return out

    if order == "pre":
        x = X + scale * attention(made.attention_norm(X))
        return x + scale * made.mlp(made.mlp_norm(x))
    if order == "parallel":
        return X + attention(made.attention_norm(X)) + made.mlp(made.attention_norm(X))
    if order == "parallel-two":
        return X + attention(made.attention_norm(X)) + made.mlp(made.mlp_norm(X))
    if order == "sandwich":
        x = X + made.attention_post_norm(attention(made.attention_norm(X)))
        return x + made.mlp_post_norm(made.mlp(made.mlp_norm(x)))
    x = X + made.attention_post_norm(attention(X))
    return x + made.mlp_post_norm(made.mlp(x))


@pytest.mark.parametrize("norm", ["rms", "layer", "layer-bias"])
@pytest.mark.parametrize("order", ORDERS)
def test_each_order_is_the_sum_that_it_says(order: str, norm: str) -> None:
    made, given = block(order, norm=norm), tensors()
    x, key, value = made(X, **given)
    close(x, by_hand(order, made, given, 1.0))
    assert key.shape == value.shape == (1, 4, 2, 6)


def test_the_residual_scale_is_that_of_attention_and_mlp() -> None:
    made, given = block("pre", residual_scale=0.25), tensors()
    close(made(X, **given)[0], by_hand("pre", made, given, 0.25))


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "pre"])
def test_an_order_that_would_pass_over_a_residual_scale_takes_none(order: str) -> None:
    with pytest.raises(AssertionError, match=f"no residual scale with order '{order}'"):
        block(order, residual_scale=0.25)


def test_every_order_that_a_config_may_name_has_a_class() -> None:
    assert set(BLOCKS) == set(ORDERS)


def test_a_query_scale_reaches_the_attention_and_a_layer_that_does_not_turn_has_no_rotation() -> None:
    made, given = block("pre"), tensors()
    ones, twos = torch.ones(1, 4, 1, 1), torch.full((1, 4, 1, 1), 2.0)
    assert torch.equal(made(X, **given, query_scale=ones)[0], made(X, **given)[0])
    assert not torch.equal(made(X, **given, query_scale=twos)[0], made(X, **given)[0])
    assert torch.equal(made(X, **given, query_scale=twos)[1], made(X, **given)[1])  # of queries only
    still = {name: tensor for name, tensor in given.items() if name not in ("cos", "sin")}
    flat = {**given, "cos": torch.ones(1, 4, 1, 6), "sin": torch.zeros(1, 4, 1, 6)}
    close(made(X, **still)[0], made(X, **flat)[0])


def test_a_layer_has_experts_where_its_own_config_says_so() -> None:
    experts = ExpertsConfig(count=3, top_k=1, width=5, normalise=True)
    cfg = config(layers=(*layers(None), *layers(None, sparse=True)), experts=experts)
    dense, sparse = (BLOCKS["pre"](cfg, layer, CacheForm()).mlp for layer in cfg.layers)
    assert (type(dense), type(sparse)) == (MLP, Experts)
