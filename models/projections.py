"""Which products of a decoder layer are one, and which norms and scales are part of their weights.

A statement about a config alone, which the decoder (`blocks.py`) and its weights (`joined.py`) both go by. Knows no
torch, no NumPy and no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollkv.models.config import DecoderConfig, LayerConfig

DEFAULT_PROJECTIONS = "separate"  # of an export, or "joined"


@dataclass(frozen=True)
class Projections:
    """The form of one layer; without arguments every weight is as the checkpoint has it.

    A norm that is folded has no weight in the graph: row i of the product behind it was multiplied by weight[i].
    """

    qkv: bool = False  # q, k and v are one product, attention.qkv
    gate_up: bool = False  # gate and up are one product, mlp.gate_up
    into_qkv: str | None = None  # the norm that is folded into q, k and v
    into_mlp: str | None = None  # the norm that is folded into gate and up, or up alone
    into_q: bool = False  # the scale of the scores is in the columns of q and in its bias

    def folds(self, norm: str) -> bool:
        """Whether a norm has no weight of its own any more."""
        return norm in (self.into_qkv, self.into_mlp)


def can_be_joined(config: DecoderConfig) -> bool:
    """Whether a model has the joined form; Gemma 4 has layers of its own."""
    return config.gemma4 is None


def default_projections(config: DecoderConfig, wanted: str | None = None) -> str:
    """The form of an export that names none: `wanted`, else DEFAULT_PROJECTIONS, where the model has it."""
    return (wanted or DEFAULT_PROJECTIONS) if can_be_joined(config) else "separate"


def joined_projections(config: DecoderConfig, layer: LayerConfig) -> Projections:
    """What is joined and folded in a layer of the joined form.

    A norm is folded when it is an RMSNorm and every reader of what it gives is a product that takes it: not one that
    a mixture of experts reads, whose router and shared gate read it too. A scale is folded when no norm of the queries
    stands between the product and the scores; rotation and the query scale of a position are linear, a soft-cap comes
    after it.
    """
    if not can_be_joined(config):
        return Projections()
    into_qkv = into_mlp = None
    if config.norm == "rms" and config.order != "post":
        shared = config.order == "parallel"  # one norm before attention and MLP
        into_qkv = None if shared and layer.sparse else "attention_norm"
        into_mlp = None if layer.sparse else "attention_norm" if shared else "mlp_norm"
    return Projections(
        qkv=True,
        gate_up=config.gated_mlp and not layer.sparse,
        into_qkv=into_qkv,
        into_mlp=into_mlp,
        into_q=config.qk_norm is None,
    )
