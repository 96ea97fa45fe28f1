"""The weights of a decoder of the joined form, made of the checkpoint's while they stream.

What is joined and folded is said in `projections.py`. Factors are multiplied in float32, value by value, so that a
weight is the same however it is cut into blocks. Knows no torch, no file format and no family.

Shapes: H hidden size, N query heads, K key/value heads, D head dimension, W width of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollkv.models.config import DecoderConfig, LayerConfig
from rollkv.models.projections import Projections, joined_projections
from rollkv.models.tensors import Parameter


@dataclass(frozen=True)
class JoinedWeight:
    """Parameters side by side along the last axis, perhaps with their rows and columns multiplied.

    Reading holds a block of a part, its product, and `rows`.
    """

    name: str  # in decoder.Decoder
    parts: tuple[Parameter, ...]  # matrices (in, out), or biases (out,), which agree in `in`
    factors: tuple[float, ...]  # of all values of each part
    rows: Parameter | None = None  # (in,): a factor for each row

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the decoder: that of the parts, their last sizes added up."""
        return (*self.parts[0].shape[:-1], sum(part.shape[-1] for part in self.parts))

    @property
    def origin(self) -> str:
        """Where its values come from, for messages."""
        sources = [*self.parts, *([] if self.rows is None else [self.rows])]
        where = self.parts[0].origin.rpartition(": ")[0]
        return f"{where}: " + " or ".join(source.origin.rpartition(": ")[2] for source in sources)

    def blocks(self) -> Iterator[tuple[tuple[slice, ...], NDArray[np.float32]]]:
        """The values as `Weight.blocks` gives them, one part after the other."""
        rows = None if self.rows is None else _whole(self.rows)
        before = 0  # columns of the parts until now
        for part, factor in zip(self.parts, self.factors, strict=True):
            width = part.shape[-1]
            for place, block in part.blocks():
                *outer, columns = place if len(place) == len(part.shape) else (*place, slice(0, width))
                with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused where it is written
                    if rows is not None:
                        block = block * rows[outer[0], None]
                    if factor != 1:
                        block = block * np.float32(factor)
                yield (*outer, slice(before + columns.start, before + columns.stop)), block
            before += width

    def copy_to(self, target: NDArray[np.float32]) -> None:
        """Fill target, of this shape, block by block."""
        for place, block in self.blocks():
            target[place] = block


def joined_weights(config: DecoderConfig, weights: Sequence[Parameter]) -> list[Parameter]:
    """The parameters of the joined decoder out of those of the separate one, in the same order.

    weights: of a whole model. A norm that is folded is left out.
    """
    held = {weight.name: weight for weight in weights}
    instead: dict[str, Parameter | None] = {}  # name -> what stands in its place, None: nothing
    for i, layer in enumerate(config.layers):
        place, form = f"layers.{i}.", joined_projections(config, layer)
        for joined in _products(held, config, layer, place, form):
            instead |= {part.name: None for part in joined.parts}
            instead[joined.parts[0].name] = joined
        instead |= {f"{place}{norm}.weight": None for norm in (form.into_qkv, form.into_mlp) if norm is not None}
    kept = (instead.get(weight.name, weight) for weight in weights)
    return [weight for weight in kept if weight is not None]


def _products(
    held: Mapping[str, Parameter], config: DecoderConfig, layer: LayerConfig, place: str, form: Projections
) -> Iterator[JoinedWeight]:
    """What is made of several parameters in one layer. place: what its names begin with."""
    products: list[tuple[str, tuple[str, ...], str | None, float]] = []  # name, parts, norm, factor of the first part
    if form.qkv:
        scale = config.score_scale(layer) if form.into_q else 1.0
        products.append(("attention.qkv", ("attention.q", "attention.k", "attention.v"), form.into_qkv, scale))
    if form.gate_up:
        products.append(("mlp.gate_up", ("mlp.gate", "mlp.up"), form.into_mlp, 1.0))
    elif form.into_mlp is not None:
        products.append(("mlp.up", ("mlp.up",), form.into_mlp, 1.0))
    for name, parts, norm, scale in products:
        for kind in ("weight", "bias"):
            if f"{place}{parts[0]}.{kind}" not in held:
                continue
            yield JoinedWeight(
                f"{place}{name}.{kind}",
                tuple(held[f"{place}{part}.{kind}"] for part in parts),
                (scale, *(1.0 for _ in parts[1:])),
                held[f"{place}{norm}.weight"] if norm is not None and kind == "weight" else None,
            )


def _whole(weight: Parameter) -> NDArray[np.float32]:
    values = np.empty(weight.shape, np.float32)
    weight.copy_to(values)
    return values
