"""What a decoder is: its geometry and its features, as frozen data.

Knows nothing of any checkpoint format, of torch or of NumPy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ROPE_NAMES = ("full", "sliding")  # the second of layers with a window, where they have a rotation of their own
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
ORDERS = ("pre", "parallel", "parallel-two", "sandwich", "post")  # see blocks.py
NORMS = ("rms", "layer", "layer-bias")
QK_NORMS = ("rms-head", "rms-head-late", "rms-width", "layer-head", "layer-heads")  # see layers.make_qk_norm
ACTIVATIONS = ("silu", "gelu", "gelu-tanh", "relu", "relu2")
BIASES = ("qkv", "out", "mlp", "head")
FLOAT16_MAX = 65504.0  # nothing in a graph is larger: no weight, no table, no constant


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that asks for something this project does not compute."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one rope type; which fields a type has is said in `rope.py`."""

    name: str = "full"  # one of ROPE_NAMES, by which layers ask for it
    type: str  # one of ROPE_TYPES
    theta: float  # base of the geometric series of frequencies
    rotary_dim: int  # R: how many of a head's dimensions rotate, from the first on
    interleaved: bool = False  # the checkpoint rotates pairs (2i, 2i + 1), not (i, i + R / 2)
    sections: tuple[int, int, int] | None = None  # pairs that turn by the first, second, third position; sum R / 2
    attention_scaling: float = 1.0  # of cos and sin
    query_scale: tuple[float, int] | None = None  # (beta, length): queries grow by 1 + beta ln(1 + floor(p / length))
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    rotated_pairs: int | None = None  # of type "proportional": pairs after these stay as they are

    def __post_init__(self) -> None:
        assert self.name in ROPE_NAMES, self.name
        assert self.type in ROPE_TYPES, self.type
        assert self.rotary_dim > 0, self.rotary_dim
        assert self.rotary_dim % 2 == 0, self.rotary_dim
        assert self.sections is None or sum(self.sections) == self.rotary_dim // 2, self.sections

    @property
    def pairs(self) -> int:
        """How many pairs of dimensions turn, and how wide the tables of cos and sin are."""
        return self.rotary_dim // 2 if self.rotated_pairs is None else self.rotated_pairs


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer. Layers that compare equal have the same operations on the same shapes."""

    kv_heads: int  # K
    head_dim: int  # D; num_heads * head_dim need not be H
    intermediate_size: int  # width of the MLP
    window: int | None = None  # how many tokens a query sees, itself included; None: all
    rope: str | None = "full"  # name of its rotary embedding; None: queries and keys do not turn
    sparse: bool = False  # a mixture of experts instead of the MLP; in Gemma 4 beside it
    kv_from: int | None = None  # the layer whose keys and values it reads; None: it has its own

    def __post_init__(self) -> None:
        assert self.rope is None or self.rope in ROPE_NAMES, self.rope
        assert self.window is None or self.window > 0, self.window


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts: of `count` MLPs of width `width` the `top_k` with the largest softmax weight add up."""

    count: int
    top_k: int
    width: int
    normalise: bool  # the weights of the chosen ones are divided by their sum
    shared_width: int = 0  # of the MLP that every token takes, times a sigmoid gate of its own; 0: none


@dataclass(frozen=True, kw_only=True)
class Gemma4Config:
    """What only Gemma 4 has."""

    per_layer_width: int  # P: width of the embedding that a token has for each layer; 0: it has none
    per_layer_vocab: int  # rows of the table of these embeddings, each num_layers * P wide
    per_layer_scale: float  # of the rows of the per-layer table
    values_from_keys: bool  # layers without a window take their values from the projection of the keys


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder-only language model.

    The geometry has no defaults; a feature is off until the checkpoint asks for it.
    """

    family: str  # model_type of config.json
    vocab_size: int  # V
    hidden_size: int  # H
    num_heads: int  # query heads, a multiple of every layer's kv_heads
    norm_eps: float
    max_position: int  # positions 0 .. max_position - 1 exist
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    order: str = "pre"  # one of ORDERS: where the norms stand, and what is added to what
    norm: str = "rms"  # one of NORMS
    qk_norm: str | None = None  # one of QK_NORMS: norm of queries and keys
    biases: frozenset[str] = frozenset()  # of BIASES
    activation: str = "silu"  # one of ACTIVATIONS
    gated_mlp: bool = True  # down(act(gate(x)) * up(x)), else down(act(up(x)))
    experts: ExpertsConfig | None = None
    learned_positions: bool = False  # a table of positions is added to the embedding
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(D)
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    gemma4: Gemma4Config | None = None  # what only Gemma 4 has
    tied_head: bool = False  # the head is the embedding table, transposed

    def __post_init__(self) -> None:
        assert self.order in ORDERS, self.order
        assert self.norm in NORMS, self.norm
        assert self.qk_norm is None or self.qk_norm in QK_NORMS, self.qk_norm
        assert self.activation in ACTIVATIONS, self.activation
        assert self.biases <= set(BIASES), self.biases
        assert self.experts is not None or not any(layer.sparse for layer in self.layers), "no experts"

    @property
    def fed_rotations(self) -> dict[str, dict[str, str]]:
        """Of each rope: "cos", "sin" and, with a scale of the queries, "query_scale" -> name of the graph's input.

        That of graphs whose rotations are fed. With several ropes the name of each stands behind.
        """
        parts: dict[str, dict[str, str]] = {}
        for rope in self.ropes:
            behind = "" if len(self.ropes) == 1 else "_" + re.sub("[^A-Za-z0-9_]", "_", rope.name)
            names = ("cos", "sin") if rope.query_scale is None else ("cos", "sin", "query_scale")
            parts[rope.name] = {name: f"rope_{name}{behind}" for name in names}
        return parts

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def score_scale(self, layer: LayerConfig) -> float:
        """What the scores of a layer are multiplied by, before a soft-cap."""
        return layer.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def per_layer_width(self) -> int:
        """P, 0 for a model without embeddings for each layer."""
        return self.gemma4.per_layer_width if self.gemma4 is not None else 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer."""
        return tuple(layer.window for layer in self.layers)
