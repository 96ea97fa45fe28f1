"""The toy model in graphs that are fed cos and sin, or give hidden states: manifests, files, backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from conftest import Recorder
from toy_embeds import embeds_manifest, save_bundle
from toy_model import WEIGHTS, D, H, ToyBackend, V
from toy_reference import INV_FREQ

from rollkv.runtime.bundle import TableInfo, ValueInfo
from rollkv.runtime.session import Session

STORED = {"float32": "<f4", "float16": "<f2"}
BIAS = np.random.default_rng(5).standard_normal(V).astype(np.float32)


def packed(values, storage):
    """Bytes of numbers as they are stored; of bfloat16 the upper half of a float32, rounded towards zero."""
    if storage == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return np.asarray(values).astype(STORED[storage]).tobytes()


def read(values, storage):
    """Numbers as they come back from their bytes, float64."""
    data = packed(values, storage)
    if storage == "bfloat16":
        wide = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        wide = np.frombuffer(data, STORED[storage])
    return wide.astype(np.float64).reshape(np.shape(values))


def forms_manifest(*, feed=True, hidden=True, storage="float32", bias=False, scale=1.0, cap=None, **settings):
    """The manifest of the toy model, whose graphs take cos and sin if `feed`, and give hidden states if `hidden`."""
    m = embeds_manifest(**{"tokens": "ids", **settings})
    rope = replace(m.rope["full"], sections=[1, 1, 1] if m.three_part else None)

    def changed(graph):
        inputs, outputs = [], []
        for value in graph.inputs:
            if value.role == "position_ids" and feed:
                for role in ("rope_cos", "rope_sin"):
                    shape = [1, graph.rows, D]
                    inputs.append(ValueInfo(name=role, shape=shape, dtype=m.dtype, role=role, rope="full"))
            else:
                inputs.append(value)
        for value in graph.outputs:
            if value.role == "logits" and hidden:
                role = "hidden_states"
                outputs.append(ValueInfo(name=role, shape=[1, 1, H], dtype=value.dtype, role=role))
            else:
                outputs.append(value)
        return replace(graph, inputs=inputs, outputs=outputs, head="none" if hidden else graph.head)

    return replace(
        m,
        rope={"full": rope},
        graphs=[changed(graph) for graph in m.graphs],
        head_table=TableInfo(file="head.bin", shape=[V, H], dtype=storage, scale=1.0) if hidden else None,
        head_bias=TableInfo(file="head_bias.bin", shape=[1, V], dtype=storage, scale=1.0) if bias else None,
        logit_scale=scale,
        logit_softcap=cap,
    )


def save_forms(folder, manifest, table=None):
    """Write it with its tables, and open it. table: (V, H) instead of the toy model's head."""
    more = {}
    if manifest.head_table is not None:
        more["head.bin"] = packed(WEIGHTS.head.T if table is None else table, manifest.head_table.dtype)
    if manifest.head_bias is not None:
        more["head_bias.bin"] = packed(BIAS, manifest.head_bias.dtype)
    return save_bundle(folder, manifest, more)


class FormsBackend:
    """The toy model on fed cos and sin: they must be those of one position, which it finds by looking at all."""

    def __init__(self, bundle):
        self.inner = ToyBackend(bundle)
        angles = np.arange(bundle.manifest.max_position)[:, None] * np.tile(np.array(INV_FREQ), 2)
        self.known = np.hstack((np.cos(angles), np.sin(angles)))  # (positions, 2 D)

    def run(self, graph, feeds):
        if "rope_cos" in feeds:
            feeds = {**feeds, "position_ids": self.positions(feeds)[None]}
        return self.inner.run(graph, feeds)

    def positions(self, feeds):
        fed = np.hstack((feeds["rope_cos"][0], feeds["rope_sin"][0])).astype(np.float64)  # (rows, 2 D)
        errors = np.abs(fed[:, None] - self.known).max(-1)
        assert errors.min(1).max() < (2e-3 if feeds["rope_cos"].dtype == np.float16 else 1e-4), errors.min(1)
        return errors.argmin(1)


def forms_toy(folder, *, table=None, **settings):
    """A session of it over the toy model, and the recorder before its backend."""
    bundle = save_forms(folder, forms_manifest(**settings), table)
    recorder = Recorder(FormsBackend(bundle))
    return Session(bundle, backend=recorder), recorder
