"""Bundles of the toy model whose tokens come in as embeddings: real folders with real tables, graphs that are none."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from conftest import Recorder
from toy_model import WEIGHTS, D, H, ToyBackend, V, toy_bundle
from toy_reference import INV_FREQ

from rollkv.runtime.bundle import Bundle, FileInfo, LayerInfo, RopeInfo, TableInfo, ValueInfo, open_bundle
from rollkv.runtime.session import Session

SCALE = 1.7
WIDTH = 5  # of per-layer inputs
TABLE = (WEIGHTS.embedding / SCALE).astype(np.float32)  # (V, H)
ROWS = TABLE * np.float32(SCALE)  # what the session must look up
PER_LAYER = np.random.default_rng(9).standard_normal((V, WIDTH)).astype(np.float32)
PER_LAYER_SCALE = 0.5


def embeds_manifest(
    *, tokens="embeds", per_layer=False, three_part=False, shared=False, dtype="float32", image="causal", **settings
):
    """The manifest of the toy model with what is asked for; without files.

    shared: a third layer that reads the cache of the first.
    """
    m = toy_bundle(dtype=dtype, **settings).manifest

    def changed(graph):
        inputs = []
        for value in graph.inputs:
            if value.role == "ids" and tokens == "embeds":
                value = ValueInfo(name="inputs_embeds", shape=[1, graph.rows, H], dtype=dtype, role="embeds")
            if value.role == "position_ids" and three_part:
                value = replace(value, shape=[3, 1, graph.rows])
            inputs.append(value)
        if per_layer:
            shape = [1, graph.rows, WIDTH]
            inputs.append(ValueInfo(name="per_layer_inputs", shape=shape, dtype=dtype, role="per_layer_inputs"))
        return replace(graph, inputs=inputs)

    sections = [1, 1, 1] if three_part else None
    rope = RopeInfo(inv_freq=INV_FREQ, rotary_dim=D, interleaved=False, attention_scaling=1.0, sections=sections)
    first = m.layers[0]
    third = LayerInfo(kv_len=first.kv_len, window=None, kv_heads=2, head_dim=D, rope=None, kv_from=0)
    return replace(
        m,
        graphs=[changed(graph) for graph in m.graphs],
        layers=[*m.layers, *([third] if shared else [])],
        rope={"full": rope},
        embedding=TableInfo(file="embedding.bin", shape=[V, H], dtype="float32", scale=SCALE)
        if tokens == "embeds"
        else None,
        per_layer_embedding=TableInfo(file="per_layer.bin", shape=[V, WIDTH], dtype="float32", scale=PER_LAYER_SCALE)
        if per_layer
        else None,
        image_attention=image,
    )


def save_bundle(folder, manifest, more=None) -> Bundle:
    """Write it with its tables, and open it. more: files beside them, by name."""
    folder.mkdir(exist_ok=True, parents=True)
    content = {"weights.bin": b"w", **{graph.file: graph.role[:1].encode() for graph in manifest.graphs}}
    if manifest.embedding is not None:
        content["embedding.bin"] = TABLE.tobytes()
    if manifest.per_layer_embedding is not None:
        content["per_layer.bin"] = PER_LAYER.tobytes()
    content |= more or {}
    for file in folder.glob("tok*"):
        content[file.name] = file.read_bytes()
    for name, data in content.items():
        (folder / name).write_bytes(data)
    files = {name: FileInfo(size=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in content.items()}
    (folder / "manifest.json").write_text(replace(manifest, files=files).to_json(), "utf-8")
    return open_bundle(folder)


def embeds_toy(folder, **settings):
    """A session of it over the toy model, and the recorder before its backend."""
    bundle = save_bundle(folder, embeds_manifest(**settings))
    recorder = Recorder(ToyBackend(bundle))
    return Session(bundle, backend=recorder), recorder
