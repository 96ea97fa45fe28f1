"""The static decoder: cache in, new keys and values out.

Four kinds of part in a row - embedding, rotary tables, layers, head - each a module that can be traced alone.
Knows no checkpoint and no ONNX. Parameters are uninitialised: `checkpoint.load_decoder` fills them, and
`torch.device("meta")` makes a decoder that has shapes only.

Shapes: c rows of one run, C slots (Cs in a sliding layer), H hidden size, V vocabulary; kv_layout as in `layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rollkv.models.config import DecoderConfig
from rollkv.models.layers import MLP, Attention, RMSNorm, Rope


class Embedding(nn.Module):
    """Token ids to hidden rows."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, input_ids: Tensor) -> Tensor:
        """(1, c) -> (1, c, H)."""
        return nn.functional.embedding(input_ids, self.weight)


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, kv_layout: str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            kv_layout=kv_layout,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past_key: Tensor, past_value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (1, c, H), cos and sin (1, c, 1, D), mask (1, 1, c, C), past in kv_layout -> x, new key, new value."""
        y, key, value = self.attention(self.attention_norm(x), cos, sin, mask, past_key, past_value)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), key, value


class Head(nn.Module):
    """Final norm and the product with the vocabulary, of the last row or of all rows.

    The weight is (H, V); a tied head shares the embedding's (V, H) and multiplies by its transpose.
    """

    def __init__(self, config: DecoderConfig, rows: str, table: nn.Parameter) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.tied, self.rows = config.tied_head, rows
        if config.tied_head:
            self.weight = table
        else:
            self.weight = nn.Parameter(torch.empty(config.hidden_size, config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """(1, c, H) -> (1, 1, V) for rows == "last", (1, c, V) for "all"."""
        if self.rows == "last":
            x = x.narrow(1, x.shape[1] - 1, 1)
        logits: Tensor = self.norm(x) @ (self.weight.t() if self.tied else self.weight)
        return logits


class Decoder(nn.Module):
    """All of a model between token ids and logits, one run of c rows at a time."""

    def __init__(self, config: DecoderConfig, *, kv_layout: str = "bskd", head: str = "last") -> None:
        """head: rows of logits, "last" or "all"."""
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rope(config.rope, config.max_position)
        self.layers = nn.ModuleList(Layer(config, kv_layout) for _ in config.windows)
        self.head = Head(config, head, self.embedding.weight)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        sliding_mask: Tensor | None,
        past: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """One run.

        input_ids, position_ids (1, c); mask (1, 1, c, C) for layers without a window, sliding_mask (1, 1, c, Cs) for
        those with one; past: key and value per layer. Returns logits, and new key and value per layer.
        """
        x = self.embedding(input_ids)
        cos, sin = self.rope(position_ids)
        new = []
        for layer, window, (past_key, past_value) in zip(self.layers, self.config.windows, past, strict=True):
            x, key, value = layer(x, cos, sin, mask if window is None else sliding_mask, past_key, past_value)
            new.append((key, value))
        return self.head(x), new
