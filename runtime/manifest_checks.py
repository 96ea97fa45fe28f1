"""What the values of a manifest must satisfy beyond their types, so that a wrong one is a message and no wrong number.

Knows nothing of files but their names and sizes, nothing of ONNX. L, c, C, K, D, H, V and W as in the contract.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rollkv.runtime.form_checks import Need, check_head, check_outer_head, check_rotations, check_rotations_agree
from rollkv.runtime.manifest import (
    CACHE_ROLES,
    DRIVEN_ROLES,
    DTYPES,
    HEAD_ROLES,
    HEADS,
    IMAGE_ATTENTIONS,
    INPUT_ROLES,
    KV_LAYOUTS,
    MASK_MAX,
    OUTPUT_ROLES,
    PROJECTIONS,
    SLOT_AXES,
    TABLE_BYTES,
    TOKEN_ROLES,
    BundleError,
    GraphInfo,
    LayerInfo,
    Manifest,
    RopeInfo,
    TableInfo,
    ValueInfo,
)

PAST_ROLES, NEW_ROLES = CACHE_ROLES[:2], CACHE_ROLES[2:]
TABLE_OF = {"embeds": "embedding", "per_layer_inputs": "per_layer_embedding"}  # role of an input -> the manifest's key


def check_manifest(m: Manifest, where: str) -> None:
    """What the runtime relies on and types do not say. Raises BundleError; `where` is the file, for the message.

    A graph whose role is neither prefill, decode nor head is not run, so only its names and types are looked at.
    """

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise BundleError(f"{where}: {what}")

    _check_fields(m, need)
    roles = [graph.role for graph in m.graphs]
    need("prefill" in roles and "decode" in roles, "graphs must hold a prefill and a decode graph")
    driven = m.driven
    for graph in driven:
        _check_sizes(m, graph, need)
    whole = [graph for graph in driven if graph.kv_len == m.max_kvcache_len]
    count = sum(graph.role == "decode" for graph in whole)
    need(count == 1, f"graphs hold {count} decode graphs of kv_len {m.max_kvcache_len}, must be one")
    rows = [graph.rows for graph in whole if graph.role == "prefill"]
    need(rows == m.prefill_rows, f"prefill graphs have the rows {rows}, must be chunk_sizes in order, {m.prefill_rows}")
    sizes = [(graph.role, graph.rows, graph.kv_len) for graph in driven]
    twice = next((graph for graph, size in zip(driven, sizes, strict=True) if sizes.count(size) > 1), None)
    need(twice is None, f"graph {twice and twice.file}: another one has the same role, rows and kv_len")
    _check_layers(m, need)
    for name, rope in m.rope.items():
        _check_rope(rope, f"rope[{name!r}]", need)
    _check_turns(m, need)
    held = (m.embedding, m.per_layer_embedding, m.head_table, m.head_bias)
    tables = [table for table in held if table is not None]
    for name in [*m.files, m.weights.file, *(graph.file for graph in m.graphs), *(table.file for table in tables)]:
        need(
            "\\" not in name and Path(name).name == name and name not in ("", ".", ".."),
            f"file name {name!r} is not a bare name",
        )
        need(name in m.files, f"file {name!r} is not listed in files")
    for table in tables:
        _check_table(m, table, need)
    check_outer_head(m, need)
    need(all(len(pair) == 2 for pair in m.kv_pairs), "kv_pairs must hold pairs of names")
    for graph in m.graphs:
        if graph is m.head_graph:
            continue  # it was looked at as a whole
        _check_values(m, graph, graph.inputs, INPUT_ROLES, need)
        _check_values(m, graph, graph.outputs, OUTPUT_ROLES, need)
        if graph in driven:
            _check_roles(m, graph, need)
            check_head(m, graph, need)
            check_rotations(m, graph, need)
            _check_tokens(m, graph, need)
            _check_types(m, graph, need)
            _check_caches(m, graph, need)
            _check_pairs(m, graph, need)
    check_rotations_agree(m, need)
    for role in (*TOKEN_ROLES, "per_layer_inputs"):
        lacking = [graph.file for graph in driven if all(value.role != role for value in graph.inputs)]
        need(
            len(lacking) in (0, len(driven)),
            f"graph {', '.join(lacking)}: no input has the role {role}, but other graphs have one",
        )
        key = TABLE_OF.get(role)
        need(
            key is None or getattr(m, key) is None or not lacking,
            f"{key} is there, but no graph has an input of the role {role}",
        )


def _check_fields(m: Manifest, need: Need) -> None:
    """Numbers and words of the manifest itself."""
    need(m.kv_layout in KV_LAYOUTS, f"kv_layout {m.kv_layout!r} is not supported; supported: {', '.join(KV_LAYOUTS)}")
    need(m.dtype in DTYPES[:2], f"dtype {m.dtype!r} is not supported; supported: {', '.join(DTYPES[:2])}")
    need(1 <= m.chunk_size <= m.max_kvcache_len, f"chunk_size {m.chunk_size} is not in 1 .. max_kvcache_len")
    sizes = m.prefill_rows
    need(sizes == sorted(set(sizes)) and sizes[0] >= 1, f"chunk_sizes is {sizes}, must be positive and ascend")
    need(sizes[-1] == m.chunk_size, f"chunk_size is {m.chunk_size}, must be {sizes[-1]}, the largest of chunk_sizes")
    need(
        1 <= m.max_lm_input_len <= m.max_kvcache_len,
        f"max_lm_input_len {m.max_lm_input_len} is not in 1 .. max_kvcache_len",
    )
    need(
        m.max_kvcache_len <= m.max_position,
        f"max_kvcache_len {m.max_kvcache_len} is above max_position {m.max_position}",
    )
    need(-MASK_MAX <= m.mask_value < 0, f"mask_value {m.mask_value} is not in -{MASK_MAX:.0f} .. 0, 0 excluded")
    for name, size in (("vocab_size", m.vocab_size), ("hidden_size", m.hidden_size)):
        need(size >= 1, f"{name} is {size}, must be positive")
    ids = [("bos_token_id", m.bos_token_id)] if m.bos_token_id is not None else []
    for name, token in [*ids, *((f"eos_token_ids[{i}]", token) for i, token in enumerate(m.eos_token_ids))]:
        need(0 <= token < m.vocab_size, f"{name} is {token}, must be in 0 .. {m.vocab_size - 1}, the vocabulary")
    need(
        m.image_attention in IMAGE_ATTENTIONS,
        f"image_attention {m.image_attention!r} is not supported; supported: {', '.join(IMAGE_ATTENTIONS)}",
    )
    need(
        m.projections in PROJECTIONS,
        f"projections {m.projections!r} is not supported; supported: {', '.join(PROJECTIONS)}",
    )


def _check_sizes(m: Manifest, graph: GraphInfo, need: Need) -> None:
    what, most = f"graph {graph.file}", m.max_kvcache_len
    need(1 <= graph.rows <= most, f"{what}: rows is {graph.rows}, must be in 1 .. {most}")
    need(graph.role == "prefill" or graph.rows == 1, f"{what}: rows is {graph.rows}, decode has 1")
    need(
        graph.role == "decode" or graph.rows in m.prefill_rows,
        f"{what}: rows is {graph.rows}, must be one of chunk_sizes, {m.prefill_rows}",
    )
    need(graph.rows <= graph.kv_len <= most, f"{what}: kv_len is {graph.kv_len}, must be in {graph.rows} .. {most}")
    need(graph.head in HEADS, f"{what}: head {graph.head!r} is not supported; supported: {', '.join(HEADS)}")


def _check_layers(m: Manifest, need: Need) -> None:
    need(bool(m.layers), "layers is empty")
    most = m.max_kvcache_len
    for i, layer in enumerate(m.layers):
        need(
            layer.window is None or layer.window >= 1,
            f"layers[{i}]: window is {layer.window}, must be positive or null",
        )
        if layer.kv_from is not None:
            need(0 <= layer.kv_from < i, f"layers[{i}]: kv_from is {layer.kv_from}, must be an earlier layer")
            _check_reader(i, layer, m.layers[layer.kv_from], need)
        elif layer.window is None:
            need(layer.kv_len == most, f"layers[{i}]: kv_len is {layer.kv_len}, must be max_kvcache_len, {most}")
        else:  # a run of the largest c rows needs the window of its first row, and the rows after it
            least = min(most, layer.window - 1 + m.chunk_size)
            need(
                least <= layer.kv_len <= most,
                f"layers[{i}]: kv_len is {layer.kv_len}, must be in {least} .. {most} for window {layer.window}",
            )
    windows = {layer.window for layer in m.layers if layer.window is not None}
    need(len(windows) <= 1, f"layers have the windows {sorted(windows)}; one is supported")


def _check_reader(i: int, layer: LayerInfo, owner: LayerInfo, need: Need) -> None:
    """A layer that reads the cache of another repeats its sizes."""
    need(owner.kv_from is None, f"layers[{i}]: kv_from is {layer.kv_from}, but that layer has no cache of its own")
    for name in ("kv_len", "window", "kv_heads", "head_dim"):
        here, there = getattr(layer, name), getattr(owner, name)
        need(here == there, f"layers[{i}]: {name} is {here}, layers[{layer.kv_from}] that it reads has {there}")


def _check_rope(rope: RopeInfo, where: str, need: Need) -> None:
    sections, scale, scaling, size = rope.sections, rope.query_scale, rope.attention_scaling, rope.rotary_dim
    need(size >= 2 and size % 2 == 0, f"{where}: rotary_dim is {size}, must be positive and even")
    need(
        len(rope.inv_freq) == size // 2,
        f"{where}: inv_freq has {len(rope.inv_freq)} numbers, must have rotary_dim / 2, {size // 2}",
    )
    for i, number in enumerate(rope.inv_freq):
        need(math.isfinite(number), f"{where}: inv_freq[{i}] is {number}, must be finite")
    need(
        math.isfinite(scaling) and scaling > 0,
        f"{where}: attention_scaling is {scaling}, must be finite and positive",
    )
    need(
        sections is None or (len(sections) == 3 and min(sections) >= 0 and 2 * sum(sections) == size),
        f"{where}: sections is {sections}, must be three numbers that add up to rotary_dim / 2, rotary_dim is {size}",
    )
    need(
        rope.fixed_for is None or rope.fixed_for >= 1,
        f"{where}: fixed_for is {rope.fixed_for}, must be positive or null",
    )
    need(
        scale is None or (len(scale) == 2 and all(map(math.isfinite, scale)) and scale[1] > 0),
        f"{where}: query_scale is {scale}, must be two numbers, the second positive",
    )


def _check_turns(m: Manifest, need: Need) -> None:
    """Every layer that turns has a rope that fits its heads."""
    for i, layer in enumerate(m.layers):
        if layer.rope is None:
            continue
        names = ", ".join(map(repr, m.rope)) or "none"
        need(layer.rope in m.rope, f"layers[{i}]: rope is {layer.rope!r}, must be null or a name in rope: {names}")
        size = m.rope[layer.rope].rotary_dim
        need(
            size <= layer.head_dim,
            f"rope[{layer.rope!r}]: rotary_dim is {size}, above the head_dim {layer.head_dim} of layers[{i}]",
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
    with np.errstate(over="ignore", under="ignore"):
        scale = np.float32(table.scale)
    need(
        bool(np.isfinite(scale)) and scale != 0,
        f"{what}: scale is {table.scale}, must be finite and not 0 as float32",
    )
    size, has = math.prod(table.shape) * TABLE_BYTES[table.dtype], m.files[table.file].size
    need(size == has, f"{what}: {table.shape} of {table.dtype} are {size} bytes, files says {has}")


def _check_values(m: Manifest, graph: GraphInfo, values: Iterable[ValueInfo], roles: Iterable[str], need: Need) -> None:
    """roles: those of this side of the graph."""
    for value in values:
        what = f"graph {graph.file}: {value.name}"
        need(value.dtype in DTYPES, f"{what} has dtype {value.dtype!r}; supported: {', '.join(DTYPES)}")
        need(all(size > 0 for size in value.shape), f"{what} has shape {value.shape}, every size must be positive")
        known = value.role in INPUT_ROLES + OUTPUT_ROLES
        need(known, f"{what} has the role {value.role!r}, unknown to this rollkv; upgrade it")
        sides = ("input", "output") if value.role in INPUT_ROLES else ("output", "input")
        need(value.role in roles, f"{what} has the role {value.role} of an {sides[0]}, but is an {sides[1]}")
        keyed = value.role in CACHE_ROLES
        need(not keyed or (value.layer is not None and 0 <= value.layer < len(m.layers)), f"{what} names no layer")
        need(not keyed or len(value.shape) == 4, f"{what} has shape {value.shape}, a cache has four axes")
        if not keyed or value.layer is None:
            continue
        source = m.layers[value.layer].kv_from
        need(source is None, f"{what} belongs to layers[{value.layer}], which has no cache: it reads that of {source}")
        if value.role in PAST_ROLES and graph.role in DRIVEN_ROLES:
            slots = value.shape[SLOT_AXES[m.kv_layout][value.role == "past_value"]]
            kv_len = min(m.layers[value.layer].kv_len, graph.kv_len)
            need(slots == kv_len, f"{what} has {slots} slots, layers[{value.layer}] says kv_len {kv_len}")


def _check_roles(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """What the driver feeds and takes is there once, in the shape that it makes."""
    values = [*graph.inputs, *graph.outputs]
    names = [value.name for value in values]
    need(len(set(names)) == len(names), f"graph {graph.file}: a name occurs twice")
    found = [value for value in values if value.role == "position_ids"]
    need(len(found) <= 1, f"graph {graph.file}: {len(found)} values have the role position_ids, must be one or none")
    shape = [3, 1, graph.rows] if m.three_part else [1, graph.rows]
    for value in found:
        need(value.shape == shape, f"graph {graph.file}: position_ids has shape {value.shape}, must be {shape}")
    for role, windowed in (("attention_mask", False), ("sliding_attention_mask", True)):
        lengths = {min(layer.kv_len, graph.kv_len) for layer in m.layers if (layer.window is not None) == windowed}
        masks = [value.shape for value in graph.inputs if value.role == role]
        wanted = [[1, 1, graph.rows, length] for length in sorted(lengths)]
        need(masks == wanted, f"graph {graph.file}: {role} has the shapes {masks}, the layers need {wanted}")


def _check_tokens(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """Tokens enter once, as ids or as embeddings, and what is looked up on the host has its table."""
    found = [value.role for value in graph.inputs if value.role in TOKEN_ROLES]
    need(len(found) == 1, f"graph {graph.file}: {len(found)} values have the role ids or embeds, must be one")
    for role in ("ids", *TABLE_OF):
        values = [value for value in graph.inputs if value.role == role]
        need(len(values) <= 1, f"graph {graph.file}: {len(values)} values have the role {role}, must be one")
        for value in values:
            shape = [1, graph.rows]
            if role in TABLE_OF:
                table: TableInfo | None = getattr(m, TABLE_OF[role])
                need(table is not None, f"graph {graph.file}: {value.name} needs {TABLE_OF[role]}, which is missing")
                assert table is not None
                shape.append(table.shape[1])
            need(value.shape == shape, f"graph {graph.file}: {role} has shape {value.shape}, must be {shape}")
    if found == ["embeds"] and m.embedding is not None:
        need(
            m.embedding.shape == [m.vocab_size, m.hidden_size],
            f"table {m.embedding.file}: shape is {m.embedding.shape}, must be [vocab_size, hidden_size], "
            f"{[m.vocab_size, m.hidden_size]}",
        )


def _check_types(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """Ids and positions are whole numbers; masks, caches and what is looked up have the manifest's dtype."""
    for value in (*graph.inputs, *graph.outputs):
        what = f"graph {graph.file}: {value.name} has dtype {value.dtype!r}"
        if value.role in ("ids", "position_ids"):
            need(value.dtype in DTYPES[2:], f"{what}; supported: {', '.join(DTYPES[2:])}")
        elif value.role in HEAD_ROLES:
            need(value.dtype in DTYPES[:2], f"{what}; supported: {', '.join(DTYPES[:2])}")
        else:
            need(value.dtype == m.dtype, f"{what}, must be {m.dtype}, the manifest's dtype")


def _check_caches(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """Each layer with a cache has each of its values once, in the shape of the layout."""
    values = [value for value in (*graph.inputs, *graph.outputs) if value.role in CACHE_ROLES]
    for i, layer in enumerate(m.layers):
        for role in CACHE_ROLES if layer.kv_from is None else ():
            found = [value for value in values if value.role == role and value.layer == i]
            need(len(found) == 1, f"graph {graph.file}: {len(found)} values are the {role} of layers[{i}], must be one")
            shape = [1, layer.kv_heads, layer.head_dim]  # and the slots between them
            axis = SLOT_AXES[m.kv_layout][role in ("past_value", "new_value")]
            shape.insert(axis, graph.rows if role in NEW_ROLES else min(layer.kv_len, graph.kv_len))
            need(
                found[0].shape == shape,
                f"graph {graph.file}: {found[0].name} has shape {found[0].shape}, must be {shape}: {m.kv_layout} and "
                f"the sizes of layers[{i}]",
            )


def _check_pairs(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """Every cache is rolled once, by the new output of the same layer and part."""
    pasts = {value.name: value for value in graph.inputs if value.role in PAST_ROLES}
    news = {value.name: value for value in graph.outputs if value.role in NEW_ROLES}
    paired: set[str] = set()
    for past, new in m.kv_pairs:
        need(past in pasts, f"kv_pairs names {past!r}, no past key or value of graph {graph.file}")
        need(new in news, f"kv_pairs names {new!r}, no new key or value of graph {graph.file}")
        left, right = pasts[past], news[new]
        need(
            left.layer == right.layer and PAST_ROLES.index(left.role) == NEW_ROLES.index(right.role),
            f"graph {graph.file}: kv_pairs joins {past!r}, the {left.role} of layers[{left.layer}], with {new!r}, the "
            f"{right.role} of layers[{right.layer}]; must be the same layer and part",
        )
        need(past not in paired, f"kv_pairs names {past!r} twice")
        paired.add(past)
    for name in pasts:
        need(name in paired, f"{name} is in no kv_pairs")
