"""What the tensors of a decoder are called in a checkpoint, and how each is made of what is stored there.

The usual names are llama's. A family's row (`families_*.py`; `family.py` says what a row can hold) has those that
differ, and the layout, one of those below, of a tensor that is stored otherwise. Knows no file format and no torch.

Layouts: "conv" (in, out), transposed; "qkv" the rows of q, k and v one behind the other, "conv-qkv" their columns;
"qkv-by-head" q, k and v of each head together; "gate-up" the rows of gate, then of up; "per-head" a vector for each
head.

Shapes: H hidden size, N query heads, K key/value heads, D head dimension, R rotary dimension, E experts of width W.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollkv.models.config import CheckpointError, DecoderConfig, ExpertsConfig, Gemma4Config, LayerConfig
from rollkv.models.families import FAMILIES
from rollkv.models.family import Source
from rollkv.models.tensor_views import Flattened, Joined, Picked, Plus, Stacked, Swapped, grouped, half_order
from rollkv.models.tensors import StoredTensor

HF = {
    "embedding": "model.embed_tokens",
    "layers": "model.layers",
    "head.norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
GGUF = {
    "embedding": "token_embd",
    "layers": "blk",
    "head.norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.out": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}

PER_LAYER_TABLE = "per_layer_embedding.weight"  # by its name in the decoder; it stays outside of every graph


@dataclass(frozen=True, eq=False)
class TensorName:
    """One parameter of the decoder, and the tensors of a checkpoint that it is made of."""

    decoder: str  # in decoder.Decoder
    stored: tuple[str, ...]
    stored_shape: tuple[int, ...]  # of each of them
    transposed: bool = False  # the decoder keeps (in, out) where the checkpoint keeps (out, in)
    joined: int | None = None  # the axis along which several are one behind the other
    stacked: bool = False  # several vectors are the rows of a matrix
    flat: str | None = None  # of three stored axes the first two are one: "abc" as (ab, c), or "acb" as (ac, b)
    pick: NDArray[np.int64] | None = None  # which rows (columns for pick_axis 1) of the stored tensor, in order
    pick_axis: int = 0
    plus: float = 0.0  # added to every value

    def assemble(self, found: Mapping[str, StoredTensor], where: str) -> StoredTensor:
        """The tensor of this name out of those found. Raises CheckpointError: one is missing, or has another shape."""
        parts = []
        for name in self.stored:
            if name not in found:
                raise CheckpointError(f"{where}: tensor {name} is missing")
            if found[name].shape != self.stored_shape:
                raise CheckpointError(
                    f"{where}: tensor {name} has shape {found[name].shape}, the config asks for {self.stored_shape}"
                )
            parts.append(found[name])
        tensor: StoredTensor = parts[0]
        if self.stacked:
            tensor = Stacked(tuple(parts))
        elif self.joined is not None:
            tensor = Joined(tuple(parts), self.joined)
        if self.flat is not None:
            tensor = Flattened(tensor if self.flat == "abc" else Swapped(tensor))
        if self.pick is not None:
            tensor = Picked(tensor, self.pick, self.pick_axis)
        return Plus(tensor, self.plus) if self.plus else tensor


def tensor_names(config: DecoderConfig, column: str = "hf") -> Iterator[TensorName]:
    """Every parameter that a checkpoint of this config must hold, in the order in which the decoder uses them.

    column: "hf" or "gguf". A tied head has none of its own.
    """
    namer = _Namer(config, column)
    hidden, vocab = config.hidden_size, config.vocab_size
    yield namer.table("embedding", (vocab, hidden))
    if config.learned_positions:
        yield namer.table("positions", (config.max_position, hidden))
    if config.gemma4 is not None and config.gemma4.per_layer_width:
        yield from namer.per_layer_inputs(config.gemma4)
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layers.{i}.", f"{namer.name('layers')}.{i}."
        for tensor in namer.layer(layer):
            yield replace(tensor, decoder=ours + tensor.decoder, stored=tuple(theirs + name for name in tensor.stored))
    yield from namer.norm("head.norm", (hidden,), config.norm == "layer-bias")
    if not config.tied_head:
        yield TensorName("head.weight", (f"{namer.name('head')}.weight",), (vocab, hidden), True)
    if "head" in config.biases:
        yield TensorName("head.bias", (f"{namer.name('head')}.bias",), (vocab,))


def unread_names(config: DecoderConfig) -> set[str]:
    """Tensors that a checkpoint may hold and the model does not read: keys and values of a layer that has none.

    Gemma 4 was trained with them in every layer, and published so; transformers leaves them out by the same names.
    """
    layers = _Namer(config, "hf").name("layers")
    return {
        f"{layers}.{i}.self_attn.{part}.{kind}"
        for i, layer in enumerate(config.layers)
        if layer.kv_from is not None
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        for kind in ("weight", "bias")
    }


def head_name(config: DecoderConfig, column: str = "hf") -> str:
    """What a head that is not tied is called."""
    return f"{_Namer(config, column).name('head')}.weight"


class _Namer:
    """The tensors of one config in one kind of checkpoint."""

    def __init__(self, config: DecoderConfig, column: str) -> None:
        family = FAMILIES[config.family]
        self._config = config
        self._names: dict[str, str | Source] = {**(HF if column == "hf" else GGUF)}
        self._names |= family.names if column == "hf" else family.gguf or {}
        self._plus = family.norm_plus if column == "hf" else 0.0  # llama.cpp's converter has added it
        self._rotary = {rope.name: rope.rotary_dim if rope.interleaved else 0 for rope in config.ropes}

    def name(self, part: str) -> str:
        """The name of a part that is stored as it is."""
        name = self._names[part]
        assert isinstance(name, str), name
        return name

    def table(self, part: str, shape: tuple[int, ...]) -> TensorName:
        """A lookup table."""
        return TensorName(f"{part}.weight", (f"{self.name(part)}.weight",), shape)

    def layer(self, layer: LayerConfig) -> Iterator[TensorName]:
        """Every tensor of a layer, its names relative to it."""
        config = self._config
        norm = ((config.hidden_size,), config.norm == "layer-bias")
        pre, post = config.order != "post", config.order in ("sandwich", "post")
        queries, kv = config.num_heads * layer.head_dim, layer.kv_heads * layer.head_dim
        if pre:
            yield from self.norm("attention_norm", *norm)
        sizes, bias = {"q": queries, "k": kv, "v": kv}, "qkv" in config.biases
        own = "q" if layer.kv_from is not None else "qk" if _values_from_keys(config, layer) else "qkv"
        for x in own:
            heads = config.num_heads if x == "q" else layer.kv_heads
            order = None if x == "v" else self._half_order(layer, heads)
            yield from self.fused(f"attention.{x}", config.hidden_size, sizes, x, bias, order)
        yield from self.linear("attention.out", queries, config.hidden_size, "out" in config.biases)
        if config.qk_norm is not None:
            for x, heads in (("q", config.num_heads), ("k", layer.kv_heads)):
                if x in own:
                    yield from self.qk_norm(f"attention.{x}_norm", heads, layer)
        if post:
            yield from self.norm("attention_post_norm", *norm)
        if pre and config.order != "parallel":
            yield from self.norm("mlp_norm", *norm)
        if layer.sparse and config.gemma4 is None:
            assert config.experts is not None
            yield from self.experts(config.experts)
        else:
            yield from self.mlp("mlp", layer.intermediate_size)
        if post:
            yield from self.norm("mlp_post_norm", *norm)
        if config.gemma4 is not None:
            yield from self.gemma4(layer, config.gemma4)

    def per_layer_inputs(self, gemma4: Gemma4Config) -> Iterator[TensorName]:
        """The table of embeddings for each layer, which stays outside of the graph, and what joins it there."""
        hidden, width = self._config.hidden_size, self._config.num_layers * gemma4.per_layer_width
        yield self.table("per_layer_embedding", (gemma4.per_layer_vocab, width))
        yield from self.linear("per_layer.projection", hidden, width, False)
        yield from self.norm("per_layer.norm", (gemma4.per_layer_width,), False)

    def gemma4(self, layer: LayerConfig, gemma4: Gemma4Config) -> Iterator[TensorName]:
        """What a layer of Gemma 4 has beside attention, MLP and their norms, see `gemma4.Gemma4Layer`."""
        hidden, experts = self._config.hidden_size, self._config.experts
        yield TensorName("scalar", (self.name("scalar"),), (1,))
        if gemma4.per_layer_width:
            yield from self.linear("own_gate", hidden, gemma4.per_layer_width, False)
            yield from self.linear("own_out", gemma4.per_layer_width, hidden, False)
            yield from self.norm("own_norm", (hidden,), False)
        if not layer.sparse:
            return
        assert experts is not None
        for part in ("mlp_own_norm", "experts_norm", "experts_post_norm"):
            yield from self.norm(part, (hidden,), False)
        yield TensorName("experts.router_norm.weight", (self.name("experts.router_norm"),), (hidden,))
        yield from self.linear("experts.router", hidden, experts.count, False)
        yield TensorName("experts.factors", (self.name("experts.factors"),), (experts.count,))
        both, shape = (self.name("experts.gate-up"),), (experts.count, 2 * experts.width, hidden)
        for which, part in enumerate(("gate", "up")):
            pick = grouped(experts.count, 2, which, experts.width)
            yield TensorName(f"experts.{part}.weight", both, shape, True, flat="abc", pick=pick)
        shape = (experts.count, hidden, experts.width)
        yield TensorName("experts.down.weight", (self.name("experts.down"),), shape, flat="acb")

    def norm(self, part: str, shape: tuple[int, ...], bias: bool) -> Iterator[TensorName]:
        """A norm that is stored as it is."""
        yield TensorName(f"{part}.weight", (f"{self.name(part)}.weight",), shape, plus=self._plus)
        if bias:
            yield TensorName(f"{part}.bias", (f"{self.name(part)}.bias",), shape)

    def qk_norm(self, part: str, heads: int, layer: LayerConfig) -> Iterator[TensorName]:
        """The norm of queries or keys: over all heads, over each with one weight, or with a weight for each."""
        kind, head_dim, name = self._config.qk_norm, layer.head_dim, self._names[part]
        if isinstance(name, Source):
            assert name.layout == "per-head"
            stored = tuple(f"{name.name.format(head)}.weight" for head in range(heads))
            yield TensorName(f"{part}.weight", stored, (head_dim,), stacked=True, plus=self._plus)
            return
        shapes = {"rms-width": (heads * head_dim,), "layer-heads": (heads, head_dim)}
        tensors = list(self.norm(part, shapes.get(str(kind), (head_dim,)), kind == "layer-head"))
        order = self._half_order(layer, heads if kind == "rms-width" else 1)
        yield from (replace(tensor, pick=order, pick_axis=len(tensor.stored_shape) - 1) for tensor in tensors)

    def mlp(self, part: str, width: int) -> Iterator[TensorName]:
        """An MLP. part: "mlp", or "mlp.shared" for the one beside the experts."""
        hidden, bias = self._config.hidden_size, "mlp" in self._config.biases
        sizes = {"gate": width, "up": width}
        for which in ("gate", "up") if self._config.gated_mlp else ("up",):
            yield from self.fused(f"{part}.{which}", hidden, sizes, which, bias)
        yield from self.linear(f"{part}.down", width, hidden, bias)

    def experts(self, experts: ExpertsConfig) -> Iterator[TensorName]:
        """A mixture of experts: the tensors of all experts joined, see `layers.Experts`."""
        hidden, width = self._config.hidden_size, experts.width
        yield from self.linear("mlp.router", hidden, experts.count, False)
        for leaf, shape, axis in (
            ("gate", (width, hidden), 0),
            ("up", (width, hidden), 0),
            ("down", (hidden, width), 1),
        ):
            pattern = self.name(f"mlp.{leaf}.experts")
            stored = tuple(f"{pattern.format(e)}.weight" for e in range(experts.count))
            yield TensorName(f"mlp.{leaf}.weight", stored, shape, True, joined=axis)
        if experts.shared_width:
            yield from self.mlp("mlp.shared", experts.shared_width)
            yield from self.linear("mlp.shared_gate", hidden, 1, False)

    def linear(
        self, part: str, width: int, rows: int, bias: bool, order: NDArray[np.int64] | None = None
    ) -> Iterator[TensorName]:
        """A linear map of `width` to `rows` that is stored by itself. order: in which the decoder keeps its rows."""
        source = self._names[part]
        if isinstance(source, str):
            return self._map(part, source, width, rows, bias, order, False)
        assert source.layout == "conv", source
        return self._map(part, source.name, width, rows, bias, order, True)

    def fused(
        self,
        part: str,
        width: int,
        sizes: Mapping[str, int],
        which: str,
        bias: bool,
        order: NDArray[np.int64] | None = None,
    ) -> Iterator[TensorName]:
        """A linear map of `width` to sizes[which] that some families store together with the others of `sizes`."""
        source = self._names[part]
        if isinstance(source, str) or source.layout == "conv":
            return self.linear(part, width, sizes[which], bias, order)
        if source.layout == "qkv-by-head":
            heads = self._config.num_heads
            pick = grouped(heads, 3, "qkv".index(which), sizes[which] // heads)
        else:
            assert source.layout in ("qkv", "conv-qkv", "gate-up"), source
            kinds = list(sizes)
            start = sum(sizes[kind] for kind in kinds[: kinds.index(which)])
            pick = start + np.arange(sizes[which])
        pick = pick if order is None else pick[order]
        return self._map(part, source.name, width, sum(sizes.values()), bias, pick, source.layout == "conv-qkv")

    @staticmethod
    def _map(
        part: str, name: str, width: int, rows: int, bias: bool, pick: NDArray[np.int64] | None, by_column: bool
    ) -> Iterator[TensorName]:
        """Weight and bias of `rows` stored rows, or columns, of which the decoder takes those that are picked."""
        shape, axis = ((width, rows), 1) if by_column else ((rows, width), 0)
        yield TensorName(f"{part}.weight", (f"{name}.weight",), shape, not by_column, pick=pick, pick_axis=axis)
        if bias:
            yield TensorName(f"{part}.bias", (f"{name}.bias",), (rows,), pick=pick)

    def _half_order(self, layer: LayerConfig, heads: int) -> NDArray[np.int64] | None:
        """The order of rows that turns interleaved pairs into halves, or None when they are halves already."""
        rotary = self._rotary.get(layer.rope or "", 0)
        return half_order(heads, layer.head_dim, rotary) if rotary else None


def _values_from_keys(config: DecoderConfig, layer: LayerConfig) -> bool:
    return config.gemma4 is not None and config.gemma4.values_from_keys and layer.window is None
