"""What `rollkv info` says of a bundle: its manifest in a few lines."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from rollkv.runtime.bundle import open_bundle
from rollkv.runtime.manifest import GraphInfo, LayerInfo, Manifest, TableInfo

_MIB = 1 << 20


def info_command(options: argparse.Namespace) -> int:
    """`rollkv info`."""
    m = open_bundle(options.bundle).manifest
    if options.json:
        print(m.to_json(), end="")
        return 0
    for name, text in describe(m):
        print(f"{name:10} {text}")
    return 0


def describe(m: Manifest) -> list[tuple[str, str]]:
    """Lines of a name and a text."""
    graph = next(graph for graph in m.graphs if graph.role == "prefill")
    cache = sum(_bytes(v.shape, v.dtype) for v in graph.inputs if v.role in ("past_key", "past_value"))
    tokens = next(value for value in graph.inputs if value.role in ("ids", "embeds"))
    sizes = ", ".join(map(str, m.prefill_rows))
    several = len(m.prefill_rows) > 1
    shape = ", ".join("c" if several and axis == 1 else str(size) for axis, size in enumerate(tokens.shape))
    fixed = [f", {name} rotation scaled for {rope.fixed_for}" for name, rope in m.rope.items() if rope.fixed_for]
    fed = ", cos and sin are fed" if any(value.role == "rope_cos" for value in graph.inputs) else ""
    seen = "" if m.image_attention == "causal" else ", text only: the model's image attention is bidirectional"
    return [
        (
            "model",
            f"{m.source.id} ({m.source.family}), {len(m.layers)} layers, H = {m.hidden_size}, V = {m.vocab_size}",
        ),
        (
            "lengths",
            f"L = {m.max_lm_input_len} prompt tokens, c = {sizes} rows a run, C = {m.max_kvcache_len} slots",
        ),
        ("input", f"{tokens.role}, ({shape}) {tokens.dtype}{seen}"),
        *(
            (name, _table(m, table))
            for name, table in (
                ("embedding", m.embedding),
                ("per layer", m.per_layer_embedding),
                ("head", m.head_table),
                ("head bias", m.head_bias),
            )
            if table is not None
        ),
        ("positions", f"{m.max_position}" + (", three-part" if m.three_part else "") + fed + "".join(fixed)),
        *(("layers", text) for text in _layers(m.layers)),
        ("cache", f"{m.kv_layout}, {m.dtype}, {cache / _MIB:.1f} MiB"),
        ("mask", f"0 visible, {m.mask_value:g} hidden"),
        ("EOS ids", ", ".join(map(str, m.eos_token_ids)) or "none"),
        *(("graph", f"{g.file}: {g.role}, {_work(g)}, opset {g.opset}, IR {g.ir_version}") for g in m.graphs),
        ("weights", f"{m.weights.file}: {m.files[m.weights.file].size / _MIB:.1f} MiB"),
    ]


def _work(graph: GraphInfo) -> str:
    if graph.role == "head":
        return "logits of a hidden state"
    end = "hidden state of last" if graph.head == "none" else f"logits of {graph.head}"
    return f"{graph.rows} rows, {graph.kv_len} slots, {end}"


def _table(m: Manifest, table: TableInfo) -> str:
    rows, width = table.shape
    return f"{table.file}: {rows} x {width}, {table.dtype}, {_size(m.files[table.file].size)}"


def _layers(layers: Sequence[LayerInfo]) -> list[str]:
    """Layers that are alike, counted, in the order in which they first occur."""
    counts: dict[str, int] = {}
    for layer in layers:
        text = (
            f"C = {layer.kv_len}, {'no window' if layer.window is None else f'window {layer.window}'}, "
            f"K = {layer.kv_heads}, D = {layer.head_dim}"
        )
        if layer.kv_from is not None:
            text += f", no cache: reads layer {layer.kv_from}"
        counts[text] = counts.get(text, 0) + 1
    return [f"{count} x {text}" for text, count in counts.items()]


def _size(count: int) -> str:
    return f"{count / _MIB:.1f} MiB" if count >= _MIB else f"{count / 1024:.1f} KiB"


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * (2 if dtype == "float16" else 4)
