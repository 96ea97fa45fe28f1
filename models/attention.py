"""Attention of c rows over a fixed number of slots: past and new keys joined or apart, heads folded or repeated.

Every form gives the same numbers; `CacheForm` says which a decoder takes. No rank above 4, no Where, every shape a
constant. Knows no parameter, no checkpoint and no ONNX. Shapes as in `layers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# kv_layout -> slot axis of keys, slot axis of values
SLOT_AXES = {"bskd": (1, 1), "bksd": (2, 2), "bksd-kt": (3, 2)}
MOST_WIDE_HEADS = 32  # query heads up to which `attend_apart` in "bskd" costs less than laying keys and values out anew


@dataclass(frozen=True)
class CacheForm:
    """How attention takes its cache; every form gives the same numbers.

    layout: the kv_layout. apart: a run of one row takes past and new keys apart, and copies neither; hidden: what a
    mask adds to hide a slot, which such a run needs for the one that it drops. repeated: keys and values are repeated
    for every query head of their group, instead of query heads folded into rows.
    """

    layout: str = "bskd"
    apart: bool = False
    hidden: float = -32768.0
    repeated: bool = False


def store(k: Tensor, v: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values (1, c, K, D) in the layout of the cache."""
    if kv_layout == "bskd":
        return k, v
    return k.permute(0, 2, 1, 3) if kv_layout == "bksd" else k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)


def attend_cache(
    q: Tensor,
    past: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    mask: Tensor,
    scale: float,
    softcap: float | None,
    cache: CacheForm,
) -> Tensor:
    """q (1, c, N, D), past and new keys and values in kv_layout, mask (1, 1, c, C) -> (1, c, N D)."""
    wide = cache.layout == "bskd" and q.shape[2] > MOST_WIDE_HEADS
    if cache.apart and q.shape[1] == 1 and mask.shape[3] > 1 and not wide:
        return attend_apart(q, past, new, mask, scale, softcap, cache)
    keys, values = belts(past[0], new[0], past[1], new[1], cache.layout)
    return (attend_repeated if cache.repeated else attend)(q, keys, values, mask, scale, softcap)


def attend_apart(
    q: Tensor,
    past: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    mask: Tensor,
    scale: float,
    softcap: float | None,
    cache: CacheForm,
) -> Tensor:
    """What `attend` gives for one row, with the scores of past and new keys joined, and not the keys: (1, 1, N D).

    All C past slots are read where they lie; the oldest, which `belts` drops, is hidden by the mask. In "bskd" the
    heads of a slot lie side by side: each query stands in a row (K D) that is zero outside of its own head's place.
    """
    heads, head_dim, slots = q.shape[2], q.shape[3], mask.shape[3]
    kv_heads = past[0].shape[2 if cache.layout == "bskd" else 1]
    mask = torch.cat((torch.full((1, 1, 1, 1), cache.hidden, device=q.device), mask), -1)  # (1, 1, 1, 1 + C)
    if cache.layout == "bskd":
        width = kv_heads * head_dim
        rows, places = q.view(heads, head_dim), None
        if kv_heads > 1:
            index = torch.arange(kv_heads, device=q.device)
            owner = index.view(kv_heads, 1).expand(kv_heads, heads // kv_heads).reshape(heads, 1)
            places = (owner == index.view(1, kv_heads)).to(q.dtype)  # (N, K)
            rows = (q.view(heads, 1, head_dim) * places.view(heads, kv_heads, 1)).view(heads, width)
        scores = torch.cat((rows @ past[0].view(slots, width).t(), rows @ new[0].view(1, width).t()), -1)
        weights = torch.softmax(_scaled(scores, scale, softcap) + mask.view(1, 1 + slots), -1)  # (N, C + 1)
        mixed = weights.narrow(1, 0, slots) @ past[1].view(slots, width)
        mixed = mixed + weights.narrow(1, slots, 1) @ new[1].view(1, width)  # (N, K D)
        if places is not None:
            mixed = places.view(heads, 1, kv_heads) @ mixed.view(heads, kv_heads, head_dim)
        return mixed.reshape(1, 1, heads * head_dim)
    q = q.view(1, kv_heads, heads // kv_heads, head_dim)
    if cache.layout == "bksd":  # keys (1, K, C, D) as the left operand: they are not turned
        q = q.transpose(2, 3)
        scores = torch.cat((past[0] @ q, new[0] @ q), 2).transpose(2, 3)
    else:
        scores = torch.cat((q @ past[0], q @ new[0]), 3)
    weights = torch.softmax(_scaled(scores, scale, softcap) + mask, -1)  # (1, K, g, C + 1)
    mixed = weights.narrow(3, 0, slots) @ past[1] + weights.narrow(3, slots, 1) @ new[1]
    return mixed.reshape(1, 1, heads * head_dim)


def _scaled(scores: Tensor, scale: float, softcap: float | None) -> Tensor:
    if softcap is not None:
        return torch.tanh(scores * (scale / softcap)) * softcap
    return scores if scale == 1 else scores * scale


def belts(
    past_key: Tensor, new_key: Tensor, past_value: Tensor, new_value: Tensor, kv_layout: str
) -> tuple[Tensor, Tensor]:
    """The last C keys, as (1, K, D, C), and values, as (1, K, C, D), of past and new ones in kv_layout."""
    key_axis, value_axis = SLOT_AXES[kv_layout]
    keys = _belt(past_key, new_key, key_axis)
    values = _belt(past_value, new_value, value_axis)
    if kv_layout == "bskd":
        return keys.permute(0, 2, 3, 1), values.permute(0, 2, 1, 3)
    return keys.transpose(2, 3) if kv_layout == "bksd" else keys, values


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """q (1, c, N, D), keys (1, K, D, C), values (1, K, C, D), mask (1, 1, c, C) -> (1, c, N D).

    softmax(cap tanh(q k scale / cap) + mask) v; without a softcap softmax(q k scale + mask) v (Vaswani et al. 2017,
    arXiv:1706.03762, eq. 1; softcap: Gemma 2, arXiv:2408.00118, section 2). Query heads that share a key/value head are
    folded into its rows, so no key is repeated.
    """
    _, rows, heads, head_dim = q.shape
    kv_heads, slots = keys.shape[1], keys.shape[3]
    group = heads // kv_heads
    q = q.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)  # (K, g, c, D)
    q = q.reshape(1, kv_heads, group * rows, head_dim)
    scores = q @ keys  # (1, K, g c, C)
    scores = _scaled(scores, scale, softcap).view(kv_heads, group, rows, slots) + mask
    weights = torch.softmax(scores, -1).view(1, kv_heads, group * rows, slots)
    mixed = (weights @ values).view(kv_heads, group, rows, head_dim)
    return mixed.permute(2, 0, 1, 3).reshape(1, rows, heads * head_dim)


def attend_repeated(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """What `attend` gives, with keys and values repeated to all N heads: one product of four axes on either side.

    The form softmax(q @ kT * scale + mask) @ v, with Slice and Concat before it, that a compiler fuses to one op.
    """
    _, rows, heads, head_dim = q.shape
    keys, values = _repeat(keys, heads), _repeat(values, heads)  # (1, N, D, C), (1, N, C, D)
    scores = q.permute(0, 2, 1, 3) @ keys  # (1, N, c, C)
    weights = torch.softmax(_scaled(scores, scale, softcap) + mask, -1)
    return (weights @ values).permute(0, 2, 1, 3).reshape(1, rows, heads * head_dim)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """(1, K, ...) -> (1, N, ...): head k of K stands N / K times, one after the other."""
    kv_heads = x.shape[1]
    if kv_heads == heads:
        return x
    parts = [x] if kv_heads == 1 else [x.narrow(1, k, 1) for k in range(kv_heads)]
    return torch.cat([part for part in parts for _ in range(heads // kv_heads)], 1)


def _belt(past: Tensor, new: Tensor, axis: int) -> Tensor:
    """The last C slots of past and new together: concat(past, new)[c:] along the slot axis.

    The dropped head is cut before the joining, which copies less; with c == C nothing of the past is left, and it is
    joined first so that the graph still takes it.
    """
    rows, slots = new.shape[axis], past.shape[axis]
    if rows == slots:
        return torch.cat((past, new), axis).narrow(axis, rows, slots)
    return torch.cat((past.narrow(axis, rows, slots - rows), new), axis)
