"""The parts of a decoder against torch's own functions and plain NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_trace import config
from torch import Tensor, nn

from rollkv.models.attention import MOST_WIDE_HEADS, SLOT_AXES, CacheForm, attend, attend_cache, belts, store
from rollkv.models.config import ACTIVATIONS, ExpertsConfig
from rollkv.models.layers import MLP, Attention, Experts, LayerNorm, RMSNorm, activate
from rollkv.models.rope import rotate

Array = np.ndarray[Any, Any]


def filled(module: nn.Module, seed: int = 1) -> Any:
    """The module with random parameters."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.2, 0.5)
    return module.eval()


def close(got: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.detach().abs().max()))


# Norms


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_an_rms_norm_equals_torchs(scale: float) -> None:
    norm, x = filled(RMSNorm(20, 1e-5)), torch.randn(1, 4, 20) * scale
    close(norm(x), F.rms_norm(x, (20,), norm.weight, 1e-5))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_norm_equals_torchs(scale: float, bias: bool) -> None:
    norm, x = filled(LayerNorm((20,), 1e-5, bias)), torch.randn(1, 4, 20) * scale + 0.3 * scale
    close(norm(x), F.layer_norm(x, (20,), norm.weight, norm.bias, 1e-5), 1e-5)


def test_a_layer_norm_of_heads_has_a_weight_for_each() -> None:
    norm, x = filled(LayerNorm((3, 6), 1e-5, bias=False)), torch.randn(1, 4, 3, 6)
    for head in range(3):
        close(norm(x)[:, :, head], F.layer_norm(x[:, :, head], (6,), norm.weight[head], None, 1e-5), 1e-5)


# Activations and the MLP

TORCHS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_equals_torchs(kind: str) -> None:
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, -60.0, 60.0])))
    torch.testing.assert_close(activate(x, kind), TORCHS[kind](x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_an_mlp_is_two_or_three_linear_maps(gated: bool, bias: bool) -> None:
    cfg = config(gated_mlp=gated, activation="gelu", biases=frozenset({"mlp"} if bias else ()))
    mlp, x = filled(MLP(cfg, 24)), torch.randn(1, 4, 20)

    def linear(part: Any, x: Tensor) -> Tensor:
        return F.linear(x, part.weight.T, part.bias)

    hidden = F.gelu(linear(mlp.gate, x)) * linear(mlp.up, x) if gated else F.gelu(linear(mlp.up, x))
    close(mlp(x), linear(mlp.down, hidden))
    assert {name.partition(".")[2] for name, _ in mlp.named_parameters()} == (
        {"weight", "bias"} if bias else {"weight"}
    )


# Attention


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (4, 1)])
def test_attention_equals_torchs_with_every_key_repeated(heads: int, kv_heads: int) -> None:
    q, k, v = torch.randn(1, 3, heads, 8), torch.randn(1, 7, kv_heads, 8), torch.randn(1, 7, kv_heads, 8)
    mask = torch.where(torch.rand(1, 1, 3, 7) < 0.5, 0.0, -32768.0)
    mask[..., 0] = 0.0
    got = attend(q, k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3), mask, 0.3, None)
    wide = [x.repeat_interleave(heads // kv_heads, 2) for x in (k, v)]
    wanted = F.scaled_dot_product_attention(heads_first(q), *map(heads_first, wide), mask, scale=0.3)
    close(got, heads_first(wanted).reshape(1, 3, heads * 8), 1e-5)


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_a_softcap_bends_the_scores_before_the_mask(cap: float) -> None:
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((n, 8)) * 3 for n in (3, 7, 7))
    mask = np.where(np.tri(3, 7, 4), 0.0, -32768.0)
    scores = cap * np.tanh(q @ k.T * 0.3 / cap) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ v

    def tensor(x: Array, *shape: int) -> Tensor:
        return torch.from_numpy(x.astype(np.float32)).view(shape)

    got = attend(
        tensor(q, 1, 3, 1, 8), tensor(k.T.copy(), 1, 1, 8, 7), tensor(v, 1, 1, 7, 8), tensor(mask, 1, 1, 3, 7), 0.3, cap
    )
    np.testing.assert_allclose(got[0].numpy(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_attention_sees_the_last_slots_of_past_and_new(layout: str, rows: int) -> None:
    to_cache = {
        "bskd": lambda x, _: x,
        "bksd": lambda x, _: x.permute(0, 2, 1, 3),
        "bksd-kt": lambda x, key: x.permute(0, 2, 3, 1) if key else x.permute(0, 2, 1, 3),
    }[layout]
    past, new = ([torch.randn(1, n, 2, 4) for _ in "kv"] for n in (5, rows))
    stored = store(new[0], new[1], layout)
    assert all(torch.equal(a, to_cache(b, key)) for a, b, key in zip(stored, new, (True, False), strict=True))
    keys, values = belts(to_cache(past[0], True), stored[0], to_cache(past[1], False), stored[1], layout)
    wanted = [torch.cat(pair, 1)[:, rows:] for pair in zip(past, new, strict=True)]  # the last 5
    assert torch.equal(keys, wanted[0].permute(0, 2, 3, 1))
    assert torch.equal(values, wanted[1].permute(0, 2, 1, 3))


@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (4, 1), (1, 1), (MOST_WIDE_HEADS + 2, 2)])
@pytest.mark.parametrize(("scale", "cap"), [(0.3, None), (1.0, None), (0.3, 5.0)])
def test_one_row_with_past_and_new_keys_apart_equals_it_with_them_joined(
    layout: str, heads: int, kv_heads: int, scale: float, cap: float | None
) -> None:
    q = torch.randn(1, 1, heads, 8)
    past = store(torch.randn(1, 7, kv_heads, 8), torch.randn(1, 7, kv_heads, 8), layout)
    new = store(torch.randn(1, 1, kv_heads, 8), torch.randn(1, 1, kv_heads, 8), layout)
    mask = torch.tensor([0.0, -32768.0, 0, -32768.0, -32768.0, 0, 0]).view(1, 1, 1, 7)
    joined, apart = (attend_cache(q, past, new, mask, scale, cap, CacheForm(layout, form)) for form in (False, True))
    close(apart, joined, 1e-5)
    past = tuple(x.clone() for x in past)
    for x, axis in zip(past, (SLOT_AXES[layout]), strict=True):
        for hidden in (0, 2, 4, 5):  # the slot that is dropped, and those that the mask hides, one to the left in it
            x.narrow(axis, hidden, 1).fill_(100.0)  # no score reaches the mask's size
    assert torch.equal(attend_cache(q, past, new, mask, scale, cap, CacheForm(layout, True)), apart)


@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize(("rows", "cap"), [(1, None), (3, None), (3, 5.0)])
def test_repeated_heads_give_what_torchs_grouped_attention_gives(
    layout: str, heads: int, kv_heads: int, rows: int, cap: float | None
) -> None:
    q, slots = torch.randn(1, rows, heads, 8), 7
    past, new = ([torch.randn(1, n, kv_heads, 8) for _ in "kv"] for n in (slots, rows))
    mask = torch.where(torch.rand(1, 1, rows, slots) < 0.6, 0.0, -32768.0)
    mask[..., -1] = 0
    form = CacheForm(layout, repeated=True)
    got = attend_cache(q, store(*past, layout), store(*new, layout), mask, 0.3, cap, form)
    k, v = (torch.cat(pair, 1)[:, rows:].transpose(1, 2) for pair in zip(past, new, strict=True))  # (1, K, C, D)
    if cap is None:
        wanted = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, scale=0.3, enable_gqa=True)
    else:
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.tanh(torch.einsum("bcnd,bnsd->bncs", q, k) * 0.3 / cap) * cap
        wanted = torch.softmax(scores + mask, -1) @ v
    close(got, wanted.transpose(1, 2).reshape(1, rows, heads * 8), 1e-5)


def test_several_rows_and_a_single_slot_are_joined_whatever_the_form() -> None:
    for rows, slots in ((3, 7), (1, 1)):
        q, mask = torch.randn(1, rows, 4, 8), torch.zeros(1, 1, rows, slots)
        past, new = ((torch.randn(1, n, 2, 8), torch.randn(1, n, 2, 8)) for n in (slots, rows))
        joined, apart = (attend_cache(q, past, new, mask, 0.3, None, CacheForm("bskd", form)) for form in (False, True))
        assert torch.equal(joined, apart)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


@pytest.mark.parametrize("kind", [None, "rms-head", "rms-head-late", "rms-width", "layer-head", "layer-heads"])
def test_norms_of_queries_and_keys_stand_where_their_kind_says(kind: str | None) -> None:
    cfg = config(qk_norm=kind, biases=frozenset({"qkv"}))
    attention, x = filled(Attention(cfg, cfg.layers[0], CacheForm())), torch.randn(1, 4, 20)
    cos, sin = torch.rand(1, 4, 1, 6), torch.rand(1, 4, 1, 6)
    scale = torch.tensor([1.0, 1.0, 1.5, 2.0]).view(1, 4, 1, 1)
    mask = torch.zeros(1, 1, 4, 4)
    out, key, value = attention(x, (cos, sin, scale), mask, torch.zeros(1, 4, 2, 6), torch.zeros(1, 4, 2, 6))

    def expected(part: Any, norm: Any, heads: int) -> Tensor:
        y = F.linear(x, part.weight.T, part.bias)
        if kind == "rms-width":
            y = plain_norm(y, norm.weight)
        y = y.view(1, 4, heads, 6)
        if kind == "rms-head":
            y = plain_norm(y, norm.weight)
        if kind == "layer-head":
            y = F.layer_norm(y, (6,), norm.weight, norm.bias, 1e-5)
        if kind == "layer-heads":
            y = torch.stack([F.layer_norm(y[:, :, h], (6,), norm.weight[h], None, 1e-5) for h in range(heads)], 2)
        y = rotate(y, cos, sin)
        return plain_norm(y, norm.weight) if kind == "rms-head-late" else y

    q, k = expected(attention.q, attention.q_norm, 4), expected(attention.k, attention.k_norm, 2)
    v = F.linear(x, attention.v.weight.T, attention.v.bias).view(1, 4, 2, 6)
    close(key, k, 1e-5)
    close(value, v)
    wide = [y.repeat_interleave(2, 2) for y in (k, v)]
    mixed = F.scaled_dot_product_attention(heads_first(q * scale), *map(heads_first, wide), scale=6**-0.5)
    close(out, heads_first(mixed).reshape(1, 4, 24) @ attention.out.weight, 1e-5)


# Experts


def loop_over_tokens(experts: Any, cfg: ExpertsConfig, x: Tensor, chosen: Array) -> Array:
    """A mixture of experts as one computes it by hand: each token through its own experts. chosen: (c, k)."""
    value = {name: parameter.detach().double().numpy() for name, parameter in experts.named_parameters()}

    def silu(x: Array) -> Array:
        return np.asarray(x / (1 + np.exp(-x)))

    rows = []
    for token, picks in zip(x[0].double().numpy(), chosen, strict=True):
        scores = token @ value["router.weight"]
        share = np.exp(scores - scores.max())
        share /= share.sum()
        total = share[picks].sum() if cfg.normalise else 1.0
        out = np.zeros(len(token))
        for e in picks:
            own = slice(e * cfg.width, (e + 1) * cfg.width)
            hidden = silu(token @ value["gate.weight"][:, own]) * (token @ value["up.weight"][:, own])
            out += share[e] / total * (hidden @ value["down.weight"][own])
        if cfg.shared_width:
            hidden = silu(token @ value["shared.gate.weight"]) * (token @ value["shared.up.weight"])
            gate = 1 / (1 + np.exp(-(token @ value["shared_gate.weight"])))
            out += gate * (hidden @ value["shared.down.weight"])
        rows.append(out)
    return np.stack(rows)


@pytest.mark.parametrize("shared", [0, 5])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("count", "top_k"), [(5, 2), (4, 1), (3, 3)])
def test_experts_equal_a_loop_over_tokens(count: int, top_k: int, normalise: bool, shared: int) -> None:
    cfg = ExpertsConfig(count=count, top_k=top_k, width=7, normalise=normalise, shared_width=shared)
    experts, x = filled(Experts(config(experts=cfg), cfg)), torch.randn(1, 9, 20)
    scores = (x[0].double() @ experts.router.weight.double()).detach().numpy()
    chosen = np.argsort(-scores, -1)[:, :top_k]
    wanted = loop_over_tokens(experts, cfg, x, chosen)
    with torch.no_grad():
        np.testing.assert_allclose(experts(x)[0].numpy(), wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_that_tie_in_the_router_never_make_more_than_k(normalise: bool) -> None:
    cfg = ExpertsConfig(count=6, top_k=2, width=7, normalise=normalise)
    experts, x = filled(Experts(config(experts=cfg), cfg)), torch.randn(1, 9, 20)
    with torch.no_grad():
        experts.router.weight[:, 1:5] = experts.router.weight[:, :1]  # five of six alike
        x[:, 0] = 0  # and a token for which all are
        weights = experts.route(x)[0, :, 0].numpy()
        share = torch.softmax(experts.router(x), -1)[0].numpy()
        out = experts(x)[0].numpy()
    assert ((weights > 0).sum(-1) == 2).all()
    chosen = np.stack([np.flatnonzero(row) for row in weights])
    for row, own, picks in zip(weights, share, chosen, strict=True):
        assert sorted(own[picks]) == sorted(own)[-2:]
        np.testing.assert_allclose(row[picks], own[picks] / (own[picks].sum() if normalise else 1), rtol=1e-6)
    wanted = loop_over_tokens(experts, cfg, x, chosen)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-6 * max(1.0, np.abs(wanted).max()))


def test_a_chosen_expert_that_weighs_nothing_does_not_spoil_the_row() -> None:
    cfg = ExpertsConfig(count=4, top_k=2, width=7, normalise=True)
    experts, x = filled(Experts(config(experts=cfg), cfg)), torch.ones(1, 1, 20)
    with torch.no_grad():
        experts.router.weight[:] = torch.tensor([60.0, -60.0, -70.0, -80.0])  # e^-2400 is 0 in float32
        weights = experts.route(x)
    assert torch.equal(weights.flatten(), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert math.isfinite(float(experts(x).detach().abs().max()))
