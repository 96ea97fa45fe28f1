"""The static decoder: cache in, new keys and values out.

Parts in a row - embedding, positions, rotary tables, layers, head - each a module that can be traced alone, and
`Decoder.calls`, the list of which part takes and makes which value: torch runs it here, and `export/trace.py` strings
the traced parts together by it. Knows no checkpoint and no ONNX. Parameters are uninitialised:
`checkpoint.load_decoder` fills them, and `torch.device("meta")` makes a decoder that has shapes only.

Shapes: c rows of one run, C slots (Cs in a sliding layer), H hidden size, V vocabulary; kv_layout as in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rollkv.models.attention import CacheForm
from rollkv.models.blocks import BLOCKS, SEPARATE
from rollkv.models.config import DecoderConfig, LayerConfig
from rollkv.models.gemma4 import Gemma4Layer, PerLayerInputs
from rollkv.models.layers import make_norm
from rollkv.models.projections import joined_projections
from rollkv.models.rope import FedRope, Rope, query_scales, rope_tables


@dataclass(frozen=True)
class Call:
    """One use of a part."""

    kind: str  # parts of one kind have the same operations on the same shapes
    module: str  # its name in the decoder
    inputs: Mapping[str, str]  # argument -> name of the value
    outputs: tuple[str, ...]  # names of the values


class Embedding(nn.Module):
    """Token ids to hidden rows."""

    def __init__(self, vocab: int, hidden: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.scale = scale

    def forward(self, input_ids: Tensor) -> Tensor:
        """(1, c) -> (1, c, H)."""
        x = nn.functional.embedding(input_ids, self.weight)
        return x if self.scale == 1 else x * self.scale


class Positions(nn.Module):
    """Adds a learned row for each position."""

    def __init__(self, max_position: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_position, hidden))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """(1, c, H), (1, c) -> (1, c, H)."""
        return x + nn.functional.embedding(position_ids, self.weight)


class Product(nn.Module):
    """The product of normed hidden rows with the vocabulary, and what is done to it: bias, scale, soft-cap.

    The weight is (H, V); a tied head shares the embedding's (V, H) and multiplies by its transpose.
    """

    def __init__(self, config: DecoderConfig, table: nn.Parameter) -> None:
        super().__init__()
        self.tied, self.scale, self.softcap = config.tied_head, config.logit_scale, config.logit_softcap
        if config.tied_head:
            self.weight = table
        else:
            self.weight = nn.Parameter(torch.empty(config.hidden_size, config.vocab_size))
        self.bias = nn.Parameter(torch.empty(config.vocab_size)) if "head" in config.biases else None

    def forward(self, x: Tensor) -> Tensor:
        """(1, n, H) -> (1, n, V)."""
        logits: Tensor = x @ (self.weight.t() if self.tied else self.weight)
        if self.bias is not None:
            logits = logits + self.bias
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Head(Product):
    """Final norm and product, of the last row or of all; or the norm of the last row alone."""

    def __init__(self, config: DecoderConfig, rows: str, table: nn.Parameter) -> None:
        super().__init__(config, table)
        self.norm, self.rows = make_norm(config), rows

    def forward(self, x: Tensor) -> Tensor:
        """(1, c, H) -> (1, 1, V) for rows == "last", (1, c, V) for "all", (1, 1, H) for "none"."""
        if self.rows != "all":
            x = x.narrow(1, x.shape[1] - 1, 1)
        normed: Tensor = self.norm(x)
        return normed if self.rows == "none" else self.logits(normed)

    def logits(self, normed: Tensor) -> Tensor:
        """The product alone: (1, n, H) -> (1, n, V)."""
        return super().forward(normed)


class Decoder(nn.Module):
    """All of a model between token ids, or hidden rows in their place, and logits: one run of c rows at a time."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        cache: CacheForm = CacheForm(),  # noqa: B008  (frozen)
        head: str = "last",
        source: str = "ids",
        rope: str = "graph",
        joined: bool = False,
    ) -> None:
        """head: rows of logits, "last" or "all"; "none": hidden states in their place.

        source: what a run takes, "ids" or "embeds". rope: rotations are looked up in the "graph", or "feed" gives them.
        joined: its layers are of the joined form, as far as the model has one (`projections.py`).
        """
        super().__init__()
        self.config, self.source, self.fed, self.joined = config, source, rope == "feed", joined
        self.embedding = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.positions = Positions(config.max_position, config.hidden_size) if config.learned_positions else None
        self.rope = nn.ModuleDict(
            {rope.name: FedRope() if self.fed else Rope(rope, config.max_position) for rope in config.ropes}
        )
        self.per_layer = PerLayerInputs(config) if config.per_layer_width else None
        self.layers = nn.ModuleList(_make_layer(config, layer, cache, joined) for layer in config.layers)
        self.head = Head(config, head, self.embedding.weight)

    def calls(self) -> Iterator[Call]:
        """Every part in the order in which it runs.

        Values from outside and those that leave have the names of the graph's inputs and outputs (docs/contract.md).
        """
        if self.source == "ids":
            yield Call("embedding", "embedding", {"input_ids": "input_ids"}, ("embedding/x",))
            x = "embedding/x"
        else:
            x = "inputs_embeds"
        if self.positions is not None:
            yield Call("positions", "positions", {"x": x, "position_ids": "position_ids"}, ("positions/x",))
            x = "positions/x"
        own_rows = tuple(f"per_layer/{i}" for i in range(self.config.num_layers))
        if self.per_layer is not None:
            inputs = {"x": x, "per_layer_inputs": "per_layer_inputs"}
            yield Call("per_layer", "per_layer", inputs, own_rows)
        rotations = {}
        for rope in self.config.ropes:
            place = f"rope.{rope.name}"
            rotations[rope.name] = {name: f"{place}/{name}" for name in ("cos", "sin")}
            if rope.query_scale is not None:
                rotations[rope.name]["query_scale"] = f"{place}/query_scale"
            taken = self.config.fed_rotations[rope.name] if self.fed else {"position_ids": "position_ids"}
            yield Call(place, place, taken, tuple(rotations[rope.name].values()))
        # Whose keys and values a layer reads makes no difference to its operations, that it has none of its own does.
        kinds = [layer if layer.kv_from is None else replace(layer, kv_from=0) for layer in self.config.layers]
        for i, layer in enumerate(self.config.layers):
            inputs = {"x": x, **(rotations[layer.rope] if layer.rope is not None else {})}
            inputs["mask"] = "attention_mask" if layer.window is None else "sliding_attention_mask"
            owner = i if layer.kv_from is None else layer.kv_from
            past, new = ({part: f"{age}_{part}_{owner}" for part in ("key", "value")} for age in ("past", "new"))
            inputs |= {"past_key": past["key"], "past_value": past["value"]}
            if layer.kv_from is not None:
                inputs |= {"new_key": new["key"], "new_value": new["value"]}
            if self.per_layer is not None:
                inputs["own_row"] = own_rows[i]
            x = f"layers.{i}/x"
            made = (x, *new.values()) if layer.kv_from is None else (x,)
            yield Call(f"layer {kinds.index(kinds[i])}", f"layers.{i}", inputs, made)
        yield Call("head", "head", {"x": x}, ("hidden_states" if self.head.rows == "none" else "logits",))

    def forward(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One run: the graph's inputs by name -> every value by name, the graph's outputs among them."""
        values = dict(feeds)
        for call in self.calls():
            made = self.get_submodule(call.module)(**{arg: values[name] for arg, name in call.inputs.items()})
            values.update(zip(call.outputs, made if isinstance(made, tuple) else (made,), strict=True))
        return values


class HeadAlone(nn.Module):
    """The product of the head as a graph of its own, behind a `Decoder` whose head gives hidden states.

    Its parameters have the names that they have in a `Decoder`.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.head = Product(config, self.embedding.weight)

    def calls(self) -> Iterator[Call]:
        """See `Decoder.calls`."""
        yield Call("head", "head", {"x": "hidden_states"}, ("logits",))


def _make_layer(config: DecoderConfig, layer: LayerConfig, cache: CacheForm, joined: bool) -> nn.Module:
    if config.gemma4 is not None:
        return Gemma4Layer(config, layer, cache)
    form = joined_projections(config, layer) if joined else SEPARATE
    made: nn.Module = BLOCKS[config.order](config, layer, cache, form)
    return made


def table_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each of `position_tables`."""
    with torch.device("meta"):
        ropes = {rope.name: Rope(rope, config.max_position) for rope in config.ropes}
    return {f"rope.{n}.{p}": tuple(table.shape) for n, rope in ropes.items() for p, table in rope.named_parameters()}


def position_tables(config: DecoderConfig, slots: int) -> dict[str, Tensor]:
    """The decoder's parameters that no checkpoint holds: tables of its rotary embeddings, by parameter name.

    slots: C, which the factors of the rope types dynamic and longrope depend on.
    """
    tables = {}
    for rope in config.ropes:
        place = f"rope.{rope.name}"
        tables[f"{place}.cos"], tables[f"{place}.sin"] = rope_tables(rope, config.max_position, slots)
        scales = query_scales(rope, config.max_position)
        if scales is not None:
            tables[f"{place}.query_scale"] = scales
    return tables
