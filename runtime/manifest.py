"""The manifest of a bundle: its dataclasses, and what their values must satisfy.

Knows nothing of files, of ONNX or of what the graphs compute; `bundle.py` reads and hashes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

FORMAT = 1
DTYPES = ("float32", "float16", "int32", "int64")
SLOT_AXES = {"bskd": (1, 1), "bksd": (2, 2), "bksd-kt": (3, 2)}  # kv_layout -> slot axis of keys, of values
KV_LAYOUTS = tuple(SLOT_AXES)
TOKEN_ROLES = ("ids", "embeds")  # how tokens enter a graph
CACHE_ROLES = ("past_key", "past_value", "new_key", "new_value")
INPUT_ROLES = (
    *TOKEN_ROLES,
    "per_layer_inputs",
    "attention_mask",
    "sliding_attention_mask",
    "position_ids",
    *CACHE_ROLES[:2],
)
OUTPUT_ROLES = ("logits", *CACHE_ROLES[2:])
MASK_MAX = 65504.0  # the largest float16
TABLE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # storage type of an embedding table -> bytes of a number
IMAGE_ATTENTIONS = ("causal", "bidirectional")

Need = Callable[[bool, str], None]  # raises BundleError with the text when the condition does not hold


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


@dataclass(frozen=True, kw_only=True)
class GraphInfo:
    """One .onnx file: `rows` tokens a run, `kv_len` slots that a query of a layer without a window can see."""

    file: str
    role: str  # "prefill" or "decode"
    rows: int
    kv_len: int
    head: str  # rows of logits: "last" or "all"
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
    """An embedding table on the host: a file of rows x width numbers, row after row, little-endian."""

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
    chunk_size: int
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
    embedding: TableInfo | None = None  # where the graphs take embeddings: (V, H)
    per_layer_embedding: TableInfo | None = None  # where they take per-layer inputs
    image_attention: str = "causal"  # how the model lets tokens of one image see each other; the graphs are causal

    @property
    def three_part(self) -> bool:
        """Whether a token has three rotary positions."""
        return any(rope.sections is not None for rope in self.rope.values())

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"


def check_manifest(m: Manifest, where: str) -> None:
    """What the runtime relies on and types do not say. Raises BundleError; `where` is the file, for the message."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise BundleError(f"{where}: {what}")

    need(m.kv_layout in KV_LAYOUTS, f"kv_layout {m.kv_layout!r} is not supported; supported: {', '.join(KV_LAYOUTS)}")
    need(m.dtype in DTYPES[:2], f"dtype {m.dtype!r} is not supported; supported: {', '.join(DTYPES[:2])}")
    need(1 <= m.chunk_size <= m.max_kvcache_len, f"chunk_size {m.chunk_size} is not in 1 .. max_kvcache_len")
    need(
        1 <= m.max_lm_input_len <= m.max_kvcache_len,
        f"max_lm_input_len {m.max_lm_input_len} is not in 1 .. max_kvcache_len",
    )
    need(
        m.max_kvcache_len <= m.max_position,
        f"max_kvcache_len {m.max_kvcache_len} is above max_position {m.max_position}",
    )
    need(-MASK_MAX <= m.mask_value < 0, f"mask_value {m.mask_value} is not in -{MASK_MAX:.0f} .. 0, 0 excluded")
    need(
        m.image_attention in IMAGE_ATTENTIONS,
        f"image_attention {m.image_attention!r} is not supported; supported: {', '.join(IMAGE_ATTENTIONS)}",
    )
    _check_layers(m, need)
    for name, rope in m.rope.items():
        _check_rope(rope, f"rope[{name!r}]", need)
    tables = [table for table in (m.embedding, m.per_layer_embedding) if table is not None]
    for name in [*m.files, m.weights.file, *(graph.file for graph in m.graphs), *(table.file for table in tables)]:
        need(
            "\\" not in name and Path(name).name == name and name not in ("", ".", ".."),
            f"file name {name!r} is not a bare name",
        )
        need(name in m.files, f"file {name!r} is not listed in files")
    for table in tables:
        _check_table(m, table, need)
    roles = [graph.role for graph in m.graphs]
    need("prefill" in roles and "decode" in roles, "graphs must hold a prefill and a decode graph")
    need(all(len(pair) == 2 for pair in m.kv_pairs), "kv_pairs must hold pairs of names")
    driven = [graph for graph in m.graphs if graph.role in ("prefill", "decode")]
    for graph in m.graphs:
        _check_values(m, graph, graph.inputs, need)
        _check_values(m, graph, graph.outputs, need)
        if graph in driven:
            most, rows = m.max_kvcache_len, graph.rows
            need(1 <= rows <= most, f"graph {graph.file}: rows is {rows}, must be in 1 .. {most}")
            need(graph.role == "prefill" or rows == 1, f"graph {graph.file}: rows is {rows}, decode has 1")
            _check_roles(m, graph, need)
            _check_tokens(m, graph, need)
            _check_pairs(m, graph, need)
    for role in (*TOKEN_ROLES, "per_layer_inputs"):
        lacking = [graph.file for graph in driven if all(value.role != role for value in graph.inputs)]
        need(
            len(lacking) in (0, len(driven)),
            f"graph {', '.join(lacking)}: no input has the role {role}, but other graphs have one",
        )


def _check_layers(m: Manifest, need: Need) -> None:
    need(bool(m.layers), "layers is empty")
    for i, layer in enumerate(m.layers):
        need(
            layer.window is None or layer.window >= 1,
            f"layers[{i}]: window is {layer.window}, must be positive or null",
        )
        if layer.kv_from is None:
            continue
        need(0 <= layer.kv_from < i, f"layers[{i}]: kv_from is {layer.kv_from}, must be an earlier layer")
        owner = m.layers[layer.kv_from]
        need(owner.kv_from is None, f"layers[{i}]: kv_from is {layer.kv_from}, but that layer has no cache of its own")
        for name in ("kv_len", "window", "kv_heads", "head_dim"):
            here, there = getattr(layer, name), getattr(owner, name)
            need(here == there, f"layers[{i}]: {name} is {here}, layers[{layer.kv_from}] that it reads has {there}")
    windows = {layer.window for layer in m.layers if layer.window is not None}
    need(len(windows) <= 1, f"layers have the windows {sorted(windows)}; one is supported")


def _check_rope(rope: RopeInfo, where: str, need: Need) -> None:
    sections, scale = rope.sections, rope.query_scale
    need(
        sections is None or (len(sections) == 3 and min(sections) >= 0 and 2 * sum(sections) == rope.rotary_dim),
        f"{where}: sections is {sections}, must be three numbers that add up to rotary_dim / 2, "
        f"rotary_dim is {rope.rotary_dim}",
    )
    need(
        rope.fixed_for is None or rope.fixed_for >= 1,
        f"{where}: fixed_for is {rope.fixed_for}, must be positive or null",
    )
    need(
        scale is None or (len(scale) == 2 and all(map(math.isfinite, scale)) and scale[1] > 0),
        f"{where}: query_scale is {scale}, must be two numbers, the second positive",
    )


def _check_table(m: Manifest, table: TableInfo, need: Need) -> None:
    what = f"table {table.file}"
    need(
        len(table.shape) == 2 and min(table.shape) > 0,
        f"{what}: shape is {table.shape}, must be two positive sizes: rows, width",
    )
    need(
        table.dtype in TABLE_BYTES,
        f"{what}: dtype {table.dtype!r} is not supported; supported: {', '.join(TABLE_BYTES)}",
    )
    need(math.isfinite(table.scale), f"{what}: scale is {table.scale}, must be finite")
    size, has = math.prod(table.shape) * TABLE_BYTES[table.dtype], m.files[table.file].size
    need(size == has, f"{what}: {table.shape} of {table.dtype} are {size} bytes, files says {has}")


def _check_values(m: Manifest, graph: GraphInfo, values: Iterable[ValueInfo], need: Need) -> None:
    for value in values:
        what = f"graph {graph.file}: {value.name}"
        need(value.dtype in DTYPES, f"{what} has dtype {value.dtype!r}; supported: {', '.join(DTYPES)}")
        need(all(size > 0 for size in value.shape), f"{what} has shape {value.shape}, every size must be positive")
        known = value.role in INPUT_ROLES + OUTPUT_ROLES
        need(known, f"{what} has the role {value.role!r}, unknown to this rollkv; upgrade it")
        keyed = value.role in CACHE_ROLES
        need(not keyed or (value.layer is not None and 0 <= value.layer < len(m.layers)), f"{what} names no layer")
        need(not keyed or len(value.shape) == 4, f"{what} has shape {value.shape}, a cache has four axes")
        if not keyed or value.layer is None:
            continue
        source = m.layers[value.layer].kv_from
        need(source is None, f"{what} belongs to layers[{value.layer}], which has no cache: it reads that of {source}")
        if value.role in ("past_key", "past_value"):
            slots = value.shape[SLOT_AXES[m.kv_layout][value.role == "past_value"]]
            kv_len = m.layers[value.layer].kv_len
            need(slots == kv_len, f"{what} has {slots} slots, layers[{value.layer}] says kv_len {kv_len}")


def _check_roles(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """What the driver feeds and takes is there once, in the shape that it makes."""
    values = [*graph.inputs, *graph.outputs]
    names = [value.name for value in values]
    need(len(set(names)) == len(names), f"graph {graph.file}: a name occurs twice")
    found = [value for value in values if value.role == "logits"]
    need(len(found) == 1, f"graph {graph.file}: {len(found)} values have the role logits, must be one")
    found = [value for value in values if value.role == "position_ids"]
    need(len(found) <= 1, f"graph {graph.file}: {len(found)} values have the role position_ids, must be one or none")
    shape = [3, 1, graph.rows] if m.three_part else [1, graph.rows]
    for value in found:
        need(value.shape == shape, f"graph {graph.file}: position_ids has shape {value.shape}, must be {shape}")
    for role, windowed in (("attention_mask", False), ("sliding_attention_mask", True)):
        lengths = {layer.kv_len for layer in m.layers if (layer.window is not None) == windowed}
        masks = [value.shape for value in graph.inputs if value.role == role]
        wanted = [[1, 1, graph.rows, length] for length in sorted(lengths)]
        need(masks == wanted, f"graph {graph.file}: {role} has the shapes {masks}, the layers need {wanted}")


def _check_tokens(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """Tokens enter once, as ids or as embeddings, and what is looked up on the host has its table."""
    found = [value.role for value in graph.inputs if value.role in TOKEN_ROLES]
    need(len(found) == 1, f"graph {graph.file}: {len(found)} values have the role ids or embeds, must be one")
    tables = {"embeds": ("embedding", m.embedding), "per_layer_inputs": ("per_layer_embedding", m.per_layer_embedding)}
    for role in ("ids", *tables):
        values = [value for value in graph.inputs if value.role == role]
        need(len(values) <= 1, f"graph {graph.file}: {len(values)} values have the role {role}, must be one")
        for value in values:
            shape = [1, graph.rows]
            if role in tables:
                key, table = tables[role]
                need(table is not None, f"graph {graph.file}: {value.name} needs {key}, which is missing")
                assert table is not None
                shape.append(table.shape[1])
                need(
                    value.dtype in DTYPES[:2],
                    f"graph {graph.file}: {value.name} has dtype {value.dtype!r}; supported: {', '.join(DTYPES[:2])}",
                )
            need(value.shape == shape, f"graph {graph.file}: {role} has shape {value.shape}, must be {shape}")
    if found == ["embeds"] and m.embedding is not None:
        need(
            m.embedding.shape == [m.vocab_size, m.hidden_size],
            f"table {m.embedding.file}: shape is {m.embedding.shape}, must be [vocab_size, hidden_size], "
            f"{[m.vocab_size, m.hidden_size]}",
        )


def _check_pairs(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """Every cache is rolled: each past input has its new output."""
    inputs, outputs = {value.name for value in graph.inputs}, {value.name for value in graph.outputs}
    for past, new in m.kv_pairs:
        need(past in inputs, f"kv_pairs names {past!r}, no input of graph {graph.file}")
        need(new in outputs, f"kv_pairs names {new!r}, no output of graph {graph.file}")
    paired = {past for past, _ in m.kv_pairs}
    for value in graph.inputs:
        need(value.role not in CACHE_ROLES[:2] or value.name in paired, f"{value.name} is in no kv_pairs")
    for i, layer in enumerate(m.layers):
        for role in CACHE_ROLES if layer.kv_from is None else ():
            count = sum(value.role == role and value.layer == i for value in (*graph.inputs, *graph.outputs))
            need(count == 1, f"graph {graph.file}: {count} values are the {role} of layers[{i}], must be one")
