"""The manifest of a bundle, as dataclasses.

Knows nothing of files, of ONNX or of what the graphs compute; `manifest_checks.py` says what the values must satisfy,
`bundle.py` reads and hashes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

FORMAT = 1
DTYPES = ("float32", "float16", "int32", "int64")
SLOT_AXES = {"bskd": (1, 1), "bksd": (2, 2), "bksd-kt": (3, 2)}  # kv_layout -> slot axis of keys, of values
KV_LAYOUTS = tuple(SLOT_AXES)
TOKEN_ROLES = ("ids", "embeds")  # how tokens enter a graph
CACHE_ROLES = ("past_key", "past_value", "new_key", "new_value")
ROTATION_ROLES = ("rope_cos", "rope_sin", "rope_query_scale")  # where they are fed, of each rope
INPUT_ROLES = (
    *TOKEN_ROLES,
    "per_layer_inputs",
    "attention_mask",
    "sliding_attention_mask",
    "position_ids",
    *ROTATION_ROLES,
    *CACHE_ROLES[:2],
)
HEAD_ROLES = ("logits", "hidden_states")  # what comes out at the end, either
OUTPUT_ROLES = (*HEAD_ROLES, *CACHE_ROLES[2:])
HEADS = ("last", "all", "none")  # rows of logits; none: the hidden state of the last row
DRIVEN_ROLES = ("prefill", "decode")  # of graphs that take tokens and caches
MASK_MAX = 65504.0  # the largest float16
TABLE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # storage type of an embedding table -> bytes of a number
DECODE_ATTENTIONS = ("joined", "apart")
NORMS = ("plain", "rowmax", "native", "rsqrt")
GQAS = ("fold", "repeat")
PROJECTIONS = ("separate", "joined")
IMAGE_ATTENTIONS = ("causal", "bidirectional")


class BundleError(ValueError):
    """A bundle that is missing, damaged, or of a format that this version does not read."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class ValueInfo:
    """One input or output of a graph.

    role: one of INPUT_ROLES or OUTPUT_ROLES.
    """

    name: str
    shape: list[int]
    dtype: str
    role: str
    layer: int | None = None  # of a key or value
    rope: str | None = None  # of one of ROTATION_ROLES: key into Manifest.rope


@dataclass(frozen=True, kw_only=True)
class GraphInfo:
    """One .onnx file: `rows` tokens a run, `kv_len` slots that a query of a layer without a window can see.

    kv_len is C, or less: such a graph takes the last min(kv_len, Cs) slots of each layer, and runs while P + rows is
    at most kv_len. The graph of the head takes the hidden state of one row and no slot: its kv_len is 0.
    """

    file: str
    role: str  # "prefill" or "decode"; "head": makes logits of the hidden states that the others give
    rows: int
    kv_len: int
    head: str  # rows of logits: "last" or "all"; "none": hidden_states in their place
    opset: int
    ir_version: int
    inputs: list[ValueInfo]
    outputs: list[ValueInfo]


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """Cache of one layer: kv_len slots of (kv_heads, head_dim); a query sees the last `window` tokens, null: all.

    A layer with `kv_from` reads the cache of that earlier layer, whose sizes it repeats, and has none of its own.
    """

    kv_len: int
    window: int | None
    kv_heads: int
    head_dim: int
    rope: str | None  # key into Manifest.rope; null: queries and keys do not turn
    kv_from: int | None = None  # the layer whose keys and values it reads; null: its own


@dataclass(frozen=True, kw_only=True)
class RopeInfo:
    """Angle of pair i at position p: p * inv_freq[i]; cos and sin of it times attention_scaling.

    With `sections` a token has three positions (time, height, width): the first sections[0] pairs turn by the first,
    the next sections[1] by the second, the last sections[2] by the third.
    """

    inv_freq: list[float]
    rotary_dim: int
    interleaved: bool
    attention_scaling: float
    sections: list[int] | None = None  # their sum is rotary_dim / 2
    fixed_for: int | None = None  # the C for which factors that depend on the length (dynamic, longrope) were fixed
    query_scale: list[float] | None = None  # beta, length: queries grow by 1 + beta ln(1 + floor(p / length))


@dataclass(frozen=True, kw_only=True)
class TableInfo:
    """A table on the host, of embeddings or a head: a file of rows x width numbers, row after row, little-endian."""

    file: str
    shape: list[int]  # rows, width
    dtype: str  # how it is stored: a key of TABLE_BYTES
    scale: float  # a row is multiplied by it, in float32


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """The checkpoint: kind is preset, hub, folder or file; id is its name without a path."""

    id: str
    family: str
    sha256: str
    kind: str = "folder"


@dataclass(frozen=True, kw_only=True)
class WeightsInfo:
    """The external data of all graphs; unique_bytes counts every tensor once."""

    file: str
    unique_bytes: int


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """Size in bytes and sha256 of a file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json. Lengths are in tokens (slots), named as in the contract: L, c, C."""

    format: int
    rollkv: str
    source: SourceInfo
    max_lm_input_len: int
    chunk_size: int  # the most rows of a prefill graph
    max_kvcache_len: int
    kv_layout: str
    dtype: str
    mask_value: float
    vocab_size: int
    hidden_size: int
    max_position: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    layers: list[LayerInfo]
    rope: dict[str, RopeInfo]
    graphs: list[GraphInfo]
    kv_pairs: list[list[str]]
    weights: WeightsInfo
    files: dict[str, FileInfo] = field(default_factory=dict)
    chunk_sizes: list[int] = field(default_factory=list)  # rows of the prefill graphs, ascending; empty: chunk_size
    decode_attention: str = "joined"  # whether the decode graphs join past and new keys, or the scores of either
    norm: str = "plain"  # form of the RMSNorms
    gqa: str = "fold"  # form of grouped attention
    target: str | None = None  # the profile whose form was the default
    projections: str = "separate"  # whether q, k, v are one product and gate, up are one, norms and scales folded in
    embedding: TableInfo | None = None  # where the graphs take embeddings: (V, H)
    per_layer_embedding: TableInfo | None = None  # where they take per-layer inputs
    head_table: TableInfo | None = None  # where the graphs give hidden states and none is the head: (V, H)
    head_bias: TableInfo | None = None  # of such a head: (1, V)
    logit_scale: float = 1.0  # of such a head's products and bias
    logit_softcap: float | None = None  # of such a head: logits become cap tanh(logit / cap)
    image_attention: str = "causal"  # how the model lets tokens of one image see each other; the graphs are causal

    @property
    def driven(self) -> list[GraphInfo]:
        """The graphs that take tokens and caches."""
        return [graph for graph in self.graphs if graph.role in DRIVEN_ROLES]

    @property
    def head_graph(self) -> GraphInfo | None:
        """The graph that makes logits of hidden states, where the head is one of its own."""
        return next((graph for graph in self.graphs if graph.role == "head"), None)

    @property
    def prefill_rows(self) -> list[int]:
        """Rows of every prefill graph, ascending."""
        return self.chunk_sizes or [self.chunk_size]

    @property
    def kv_lens(self) -> list[int]:
        """Visible lengths of the decode graphs, ascending; the last is C."""
        return sorted(graph.kv_len for graph in self.graphs if graph.role == "decode")

    @property
    def three_part(self) -> bool:
        """Whether a token has three rotary positions."""
        return any(rope.sections is not None for rope in self.rope.values())

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"
