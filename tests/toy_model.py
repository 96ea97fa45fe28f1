"""A two-layer attention model in NumPy as the backend of a bundle without files; `toy_reference.py` has the other way.

Both share the weights and nothing else. Queries and keys turn by the rotary embedding, values depend on the position
too, and the logits on everything that is visible, so a wrong id, position, mask or slot changes them.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from conftest import Recorder
from toy_reference import INV_FREQ, WEIGHTS, D, H, K, M, V, close, run_ends, whole_pass

from rollkv.runtime.bundle import Bundle, GraphInfo, LayerInfo, Manifest, RopeInfo, SourceInfo, ValueInfo, WeightsInfo
from rollkv.runtime.session import Session

__all__ = [
    "WEIGHTS",
    "D",
    "Failing",
    "H",
    "K",
    "M",
    "ToyBackend",
    "V",
    "close",
    "run_ends",
    "some_ids",
    "toy",
    "toy_bundle",
]
__all__ += ["whole_pass"]

SESSION_SETTINGS = ("addresses", "chunk_sizes", "prefixes", "slack")


def toy_bundle(
    *,
    c=4,
    C=24,
    L=None,
    window=None,
    full=True,
    layout="bskd",
    ids="int32",
    dtype="float32",
    head="last",
    eos=(),
    most=512,
    speculate=None,
    buckets=(),
):
    """The bundle of the toy model: two layers, the second with a window if one is given, the first unless it is full.

    c: the rows of the prefill graphs, a number or several. speculate: the rows of one more, or of one of them, that
    gives the logits of every row; with head "all" every graph does. buckets: smaller visible lengths.
    """
    sizes = sorted({*((c,) if isinstance(c, int) else c), *(() if speculate is None else (speculate,))})
    windows = (None if full else window, window)
    lengths = [C if w is None else min(C, w - 1 + sizes[-1]) for w in windows]
    layers = [
        LayerInfo(kv_len=slots, window=w, kv_heads=K, head_dim=D, rope="full")
        for slots, w in zip(lengths, windows, strict=True)
    ]

    def cached(prefix, slots):
        values = []
        for i, n in enumerate(slots):
            for part in ("key", "value"):
                shape = {
                    "bskd": [1, n, K, D],
                    "bksd": [1, K, n, D],
                    "bksd-kt": [1, K, D, n] if part == "key" else [1, K, n, D],
                }[layout]
                role = f"{prefix}_{part}"
                values.append(ValueInfo(name=f"{role}_{i}", shape=shape, dtype=dtype, role=role, layer=i))
        return values

    def graph(role, rows, kv_len):
        inputs = [ValueInfo(name="input_ids", shape=[1, rows], dtype=ids, role="ids")]
        for name, slots, used in (
            ("attention_mask", kv_len, None in windows),
            ("sliding_attention_mask", min(lengths[1], kv_len), window is not None),
        ):
            if used:
                inputs.append(ValueInfo(name=name, shape=[1, 1, rows, slots], dtype=dtype, role=name))
        inputs.append(ValueInfo(name="position_ids", shape=[1, rows], dtype=ids, role="position_ids"))
        every = head == "all" or (role == "prefill" and rows == speculate)
        outputs = [ValueInfo(name="logits", shape=[1, rows if every else 1, V], dtype=dtype, role="logits")]
        name = f"{role}_c{rows}_k{kv_len}" if role == "prefill" else f"{role}_k{kv_len}"
        return GraphInfo(
            file=f"{role if len(sizes) == 1 and not buckets else name}.onnx",
            role=role,
            rows=rows,
            kv_len=kv_len,
            head="all" if every else "last",
            opset=17,
            ir_version=8,
            inputs=inputs + cached("past", [min(slots, kv_len) for slots in lengths]),
            outputs=outputs + cached("new", [rows] * 2),
        )

    manifest = Manifest(
        format=1,
        rollkv="0.1.0",
        source=SourceInfo(id="toy", family="toy", sha256="0"),
        max_lm_input_len=L or C,
        chunk_size=sizes[-1],
        max_kvcache_len=C,
        kv_layout=layout,
        dtype=dtype,
        mask_value=M,
        vocab_size=V,
        hidden_size=H,
        max_position=most,
        bos_token_id=1,
        eos_token_ids=list(eos),
        layers=layers,
        rope={"full": RopeInfo(inv_freq=INV_FREQ, rotary_dim=D, interleaved=False, attention_scaling=1.0)},
        graphs=[
            graph(role, rows, kv_len)
            for role, rows in (*(("prefill", rows) for rows in sizes), ("decode", 1))
            for kv_len in sorted({C, *buckets}, reverse=True)
            if rows <= kv_len
        ],
        kv_pairs=[[f"past_{part}_{i}", f"new_{part}_{i}"] for i in range(2) for part in ("key", "value")],
        weights=WeightsInfo(file="weights.bin", unique_bytes=0),
        chunk_sizes=sizes,
    )
    return Bundle(Path("nowhere"), manifest)


class ToyBackend:
    """Runs the toy model as a graph does: additive mask, concat(past, new)[rows:], new keys and values returned."""

    def __init__(self, bundle):
        self.layout = bundle.manifest.kv_layout
        self.arrays = {
            graph.file: {value.name: np.zeros(value.shape, value.dtype) for value in graph.outputs}
            for graph in bundle.manifest.graphs
        }

    def run(self, graph, feeds):
        w = WEIGHTS
        positions = feeds["position_ids"].reshape(-1, graph.rows)[0].astype(np.float64)
        if "inputs_embeds" in feeds:
            x = feeds["inputs_embeds"][0].astype(np.float64)  # (rows, H)
        else:
            x = w.embedding[feeds["input_ids"][0]]
        outputs = {}
        for i in range(2):
            sliding = "attention_mask" not in feeds or (i == 1 and "sliding_attention_mask" in feeds)
            mask = feeds["sliding_attention_mask" if sliding else "attention_mask"][0, 0].astype(
                np.float64
            )  # (rows, C)
            q, new_k, new_v = (np.einsum("rh,hkd->rkd", x, part[i]) for part in (w.q, w.k, w.v))
            q, new_k, new_v = _rotary(q, positions), _rotary(new_k, positions), new_v + w.turn(positions)
            keys, values = (
                np.concatenate((self._slots(feeds[f"past_{part}_{i}"], part), new))[graph.rows :]  # (C, K, D)
                for part, new in (("key", new_k), ("value", new_v))
            )
            scores = np.einsum("rkd,skd->krs", q, keys) + mask
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            x = x + np.einsum("krs,skd,kdh->rh", weights, values, w.out[i])
            for part, new in (("key", new_k), ("value", new_v)):
                outputs[f"new_{part}_{i}"] = self._stored(new, part)
        outputs["hidden_states"] = x[-1:][None]
        outputs["logits"] = (x @ w.head)[None] if graph.head == "all" else (x[-1:] @ w.head)[None]
        arrays = self.arrays[graph.file]  # the same ones in every run of a graph, as a backend may
        for name, array in arrays.items():
            assert array.shape == outputs[name].shape
            array[:] = outputs[name]
        return arrays

    def _slots(self, array, part):
        """(slots, K, D) of what the cache gives."""
        if self.layout == "bskd":
            return array[0]
        return array[0].transpose(2, 0, 1) if self.layout == "bksd-kt" and part == "key" else array[0].swapaxes(0, 1)

    def _stored(self, new, part):
        if self.layout == "bskd":
            return new[None]
        return new.transpose(1, 2, 0)[None] if self.layout == "bksd-kt" and part == "key" else new.swapaxes(0, 1)[None]


def _rotary(x, positions):
    """x cos + rotate_half(x) sin, of (rows, K, D): what a graph computes."""
    angles = np.tile(positions[:, None] * np.array(INV_FREQ), 2)[:, None]  # (rows, 1, D)
    half = np.concatenate((-x[..., D // 2 :], x[..., : D // 2]), axis=-1)
    return x * np.cos(angles) + half * np.sin(angles)


class Failing(ToyBackend):
    """Raises in the run of the number given, once."""

    def __init__(self, bundle, at):
        super().__init__(bundle)
        self.left = at

    def run(self, graph, feeds):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the board is gone")
        return super().run(graph, feeds)


def toy(**settings):
    """A session of the toy model, and the recorder before its backend."""
    own = {name: settings.pop(name) for name in SESSION_SETTINGS if name in settings}
    bundle = toy_bundle(**settings)
    recorder = Recorder(ToyBackend(bundle))
    return Session(bundle, backend=recorder, **own), recorder


def some_ids(n, seed=0):
    return random.Random(seed).choices(range(V), k=n)
