"""A bundle on disk: the manifest as dataclasses, its validation, the hashes of the files.

The format belongs to this file; the exporter writes with it. Knows nothing of ONNX or of what the graphs compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
DTYPES = ("float32", "float16", "int32", "int64")
SLOT_AXES = {"bskd": (1, 1), "bksd": (2, 2), "bksd-kt": (3, 2)}  # kv_layout -> slot axis of keys, of values
KV_LAYOUTS = tuple(SLOT_AXES)
INPUT_ROLES = ("ids", "attention_mask", "sliding_attention_mask", "position_ids", "past_key", "past_value")
OUTPUT_ROLES = ("logits", "new_key", "new_value")
MASK_MAX = 65504.0  # the largest float16
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
HASHED_AT_OPEN = 16 << 20  # bytes; larger files are hashed by Bundle.check only


class BundleError(ValueError):
    """A bundle that is missing, damaged, or of a format that this version does not read."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class ValueInfo:
    """One input or output of a graph.

    role: ids, attention_mask, sliding_attention_mask, position_ids, past_key, past_value; logits, new_key, new_value.
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
    """Cache of one layer: kv_len slots of (kv_heads, head_dim); a query sees the last `window` tokens, null: all."""

    kv_len: int
    window: int | None
    kv_heads: int
    head_dim: int
    rope: str | None  # key into Manifest.rope; null: queries and keys do not turn
    kv_from: int | None = None  # has no cache of its own: it reads that layer's keys and values


@dataclass(frozen=True, kw_only=True)
class RopeInfo:
    """Angle of pair i at position p: p * inv_freq[i]; cos and sin of it times attention_scaling."""

    inv_freq: list[float]
    rotary_dim: int
    interleaved: bool
    attention_scaling: float


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

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest was read and checked, the sizes of all files and the hashes of small ones too."""

    path: Path
    manifest: Manifest

    def check(self) -> None:
        """Hash every file. Raises BundleError that names the first one that differs from the manifest."""
        for name, info in self.manifest.files.items():
            _check_hash(self.path / name, info)


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle's folder.

    Raises BundleError: no folder, no or a damaged manifest, a newer format, a file that is missing or changed.
    """
    folder = Path(path)
    file = folder / "manifest.json"
    if not os.path.isfile(file):  # unlike Path's own, these raise for no name
        why = (
            "no such folder"
            if not os.path.exists(folder)
            else "not a folder"
            if not os.path.isdir(folder)
            else "no manifest.json in it"
        )
        raise BundleError(f"{folder}: {why}; give the folder that `rollkv export` wrote")
    manifest = _read_manifest(file)
    for name, info in manifest.files.items():
        item = folder / name
        if not os.path.isfile(item):
            raise BundleError(_missing(item))
        if item.stat().st_size != info.size:
            raise BundleError(f"{item}: {item.stat().st_size} bytes, the manifest says {info.size}; export it again")
        if info.size <= HASHED_AT_OPEN:
            _check_hash(item, info)
    for name in TEXT_FILES:
        if name not in manifest.files and (folder / name).exists():
            raise BundleError(f"{folder / name}: the manifest does not list it; remove it, or export the bundle again")
    return Bundle(folder, manifest)


def hash_file(path: Path) -> str:
    """sha256 of a file's content, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _check_hash(path: Path, info: FileInfo) -> None:
    try:
        found = hash_file(path)
    except FileNotFoundError:
        raise BundleError(_missing(path)) from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    if found != info.sha256:
        raise BundleError(f"{path}: its content is not what the manifest's sha256 says; export the bundle again")


def _missing(path: Path) -> str:
    return f"{path}: missing from the bundle; export it again"


def _read_manifest(file: Path) -> Manifest:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: not JSON: {error}") from None
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error.strerror}") from None
    if not isinstance(raw, dict):
        raise BundleError(f"{file}: not a JSON object")
    version = raw.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleError(f"{file}: format is {version!r}, must be a positive integer")
    if version > FORMAT:
        raise BundleError(
            f"{file}: format {version} is newer than {FORMAT}, the newest this rollkv reads; upgrade rollkv"
        )
    manifest: Manifest = _build(Manifest, raw, str(file))
    _check_manifest(manifest, str(file))
    return manifest


def _build(kind: Any, value: Any, where: str) -> Any:
    """A value of the type `kind` out of parsed JSON; unknown keys are ignored, anything else is a BundleError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise BundleError(f"{where}: must be an object, got {_short(value)}")
        hints, given = typing.get_type_hints(kind), {}
        for item in dataclasses.fields(kind):
            if item.name in value:
                given[item.name] = _build(hints[item.name], value[item.name], f"{where}: {item.name}")
            elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise BundleError(f"{where}: {item.name} is missing")
        return kind(**given)
    if origin is list and isinstance(value, list):
        return [_build(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _build(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _build(arguments[0], value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # JSON's integers have no end
            return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise BundleError(f"{where}: must be {getattr(kind, '__name__', kind)}, got {_short(value)}")


def _short(value: Any) -> str:
    return repr(value)[:60]


def _check_manifest(m: Manifest, where: str) -> None:
    """What the runtime relies on and types do not say."""

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
    need(bool(m.layers), "layers is empty")
    for i, layer in enumerate(m.layers):
        need(
            layer.window is None or layer.window >= 1,
            f"layers[{i}]: window is {layer.window}, must be positive or null",
        )
    for name in [*m.files, m.weights.file, *(graph.file for graph in m.graphs)]:
        need(
            "\\" not in name and Path(name).name == name and name not in ("", ".", ".."),
            f"file name {name!r} is not a bare name",
        )
        need(name in m.files, f"file {name!r} is not listed in files")
    roles = [graph.role for graph in m.graphs]
    need("prefill" in roles and "decode" in roles, "graphs must hold a prefill and a decode graph")
    windows = {layer.window for layer in m.layers if layer.window is not None}
    need(len(windows) <= 1, f"layers have the windows {sorted(windows)}; one is supported")
    need(all(len(pair) == 2 for pair in m.kv_pairs), "kv_pairs must hold pairs of names")
    for graph in m.graphs:
        _check_values(m, graph, graph.inputs, need)
        _check_values(m, graph, graph.outputs, need)
        if graph.role in ("prefill", "decode"):
            most, rows = m.max_kvcache_len, graph.rows
            need(1 <= rows <= most, f"graph {graph.file}: rows is {rows}, must be in 1 .. {most}")
            need(graph.role == "prefill" or rows == 1, f"graph {graph.file}: rows is {rows}, decode has 1")
            _check_roles(m, graph, need)
            _check_pairs(m, graph, need)


def _check_values(m: Manifest, graph: GraphInfo, values: Iterable[ValueInfo], need: Any) -> None:
    for value in values:
        what = f"graph {graph.file}: {value.name}"
        need(value.dtype in DTYPES, f"{what} has dtype {value.dtype!r}; supported: {', '.join(DTYPES)}")
        need(all(size > 0 for size in value.shape), f"{what} has shape {value.shape}, every size must be positive")
        known = value.role in INPUT_ROLES + OUTPUT_ROLES
        need(known, f"{what} has the role {value.role!r}, unknown to this rollkv; upgrade it")
        keyed = value.role in ("past_key", "past_value", "new_key", "new_value")
        need(not keyed or (value.layer is not None and 0 <= value.layer < len(m.layers)), f"{what} names no layer")
        need(not keyed or len(value.shape) == 4, f"{what} has shape {value.shape}, a cache has four axes")
        if value.layer is not None and value.role in ("past_key", "past_value"):
            slots = value.shape[SLOT_AXES[m.kv_layout][value.role == "past_value"]]
            kv_len = m.layers[value.layer].kv_len
            need(slots == kv_len, f"{what} has {slots} slots, layers[{value.layer}] says kv_len {kv_len}")


def _check_roles(m: Manifest, graph: GraphInfo, need: Any) -> None:
    """What the driver feeds and takes is there once, in the shape that it makes."""
    values = [*graph.inputs, *graph.outputs]
    names = [value.name for value in values]
    need(len(set(names)) == len(names), f"graph {graph.file}: a name occurs twice")
    for role, shape in (("ids", [1, graph.rows]), ("position_ids", [1, graph.rows]), ("logits", None)):
        found = [value for value in values if value.role == role]
        need(len(found) == 1, f"graph {graph.file}: {len(found)} values have the role {role}, must be one")
        need(shape in (None, found[0].shape), f"graph {graph.file}: {role} has shape {found[0].shape}, must be {shape}")
    for role, windowed in (("attention_mask", False), ("sliding_attention_mask", True)):
        lengths = {layer.kv_len for layer in m.layers if (layer.window is not None) == windowed}
        masks = [value.shape for value in graph.inputs if value.role == role]
        wanted = [[1, 1, graph.rows, length] for length in sorted(lengths)]
        need(masks == wanted, f"graph {graph.file}: {role} has the shapes {masks}, the layers need {wanted}")


def _check_pairs(m: Manifest, graph: GraphInfo, need: Any) -> None:
    """Every cache is rolled: each past input has its new output."""
    inputs, outputs = {value.name for value in graph.inputs}, {value.name for value in graph.outputs}
    for past, new in m.kv_pairs:
        need(past in inputs, f"kv_pairs names {past!r}, no input of graph {graph.file}")
        need(new in outputs, f"kv_pairs names {new!r}, no output of graph {graph.file}")
    paired = {past for past, _ in m.kv_pairs}
    for value in graph.inputs:
        need(value.role not in ("past_key", "past_value") or value.name in paired, f"{value.name} is in no kv_pairs")
