"""A two-layer attention model in NumPy: once as the backend of a bundle without files, once as one unchunked pass.

Both share the weights and nothing else. Queries, keys and values depend on the id and on the position, and the logits
on everything that is visible, so a wrong id, position, mask or slot changes them.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from conftest import Recorder

from rollkv.runtime.bundle import Bundle, GraphInfo, LayerInfo, Manifest, SourceInfo, ValueInfo, WeightsInfo
from rollkv.runtime.session import Session

V, H, K, D = 23, 12, 2, 6
M = -32768.0


def toy_bundle(
    *, c=4, C=24, L=None, window=None, layout="bskd", ids="int32", dtype="float32", head="last", eos=(), most=512
):
    """The bundle of the toy model: two layers, the second with a window if one is given."""
    lengths = [C, C if window is None else min(C, window - 1 + c)]
    layers = [
        LayerInfo(kv_len=slots, window=w, kv_heads=K, head_dim=D, rope="full")
        for slots, w in zip(lengths, (None, window), strict=True)
    ]

    def cached(prefix, rows):
        values = []
        for i, slots in enumerate(lengths):
            for part in ("key", "value"):
                n = rows or slots
                shape = {
                    "bskd": [1, n, K, D],
                    "bksd": [1, K, n, D],
                    "bksd-kt": [1, K, D, n] if part == "key" else [1, K, n, D],
                }[layout]
                role = f"{prefix}_{part}"
                values.append(ValueInfo(name=f"{role}_{i}", shape=shape, dtype=dtype, role=role, layer=i))
        return values

    def graph(role, rows):
        inputs = [ValueInfo(name="input_ids", shape=[1, rows], dtype=ids, role="ids")]
        for name, slots in (("attention_mask", C), ("sliding_attention_mask", lengths[1])):
            if name == "attention_mask" or window is not None:
                inputs.append(ValueInfo(name=name, shape=[1, 1, rows, slots], dtype=dtype, role=name))
        inputs.append(ValueInfo(name="position_ids", shape=[1, rows], dtype=ids, role="position_ids"))
        shape = [1, rows if head == "all" else 1, V]
        outputs = [ValueInfo(name="logits", shape=shape, dtype=dtype, role="logits")]
        return GraphInfo(
            file=f"{role}.onnx",
            role=role,
            rows=rows,
            kv_len=C,
            head=head,
            opset=17,
            ir_version=8,
            inputs=inputs + cached("past", None),
            outputs=outputs + cached("new", rows),
        )

    manifest = Manifest(
        format=1,
        rollkv="0.1.0",
        source=SourceInfo(id="toy", family="toy", sha256="0"),
        max_lm_input_len=L or C,
        chunk_size=c,
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
        rope={},
        graphs=[graph("prefill", c), graph("decode", 1)],
        kv_pairs=[[f"past_{part}_{i}", f"new_{part}_{i}"] for i in range(2) for part in ("key", "value")],
        weights=WeightsInfo(file="weights.bin", unique_bytes=0),
    )
    return Bundle(Path("nowhere"), manifest)


class Weights:
    """Random and large enough that every visible token matters."""

    def __init__(self):
        draw = np.random.default_rng(3).standard_normal
        self.embedding = draw((V, H))
        self.q, self.k, self.v = (draw((2, H, K, D)) / 3 for _ in range(3))  # by layer
        self.out = draw((2, K, D, H)) / 2
        self.head = draw((H, V))
        self.frequencies = 1.3 ** -np.arange(D)

    def turn(self, positions):
        """What a position adds to queries and keys, (rows, 1, D)."""
        return np.sin(np.asarray(positions)[:, None, None] * self.frequencies)


WEIGHTS = Weights()


class ToyBackend:
    """Runs the toy model as a graph does: additive mask, concat(past, new)[rows:], new keys and values returned."""

    def __init__(self, bundle):
        self.layout = bundle.manifest.kv_layout
        self.arrays = {
            graph.role: {value.name: np.zeros(value.shape, value.dtype) for value in graph.outputs}
            for graph in bundle.manifest.graphs
        }

    def run(self, graph, feeds):
        w = WEIGHTS
        turn = w.turn(feeds["position_ids"].reshape(-1, graph.rows)[0].astype(np.float64))
        if "inputs_embeds" in feeds:
            x = feeds["inputs_embeds"][0].astype(np.float64)  # (rows, H)
        else:
            x = w.embedding[feeds["input_ids"][0]]
        outputs = {}
        for i in range(2):
            name = "sliding_attention_mask" if i == 1 and "sliding_attention_mask" in feeds else "attention_mask"
            mask = feeds[name][0, 0].astype(np.float64)  # (rows, C)
            q, new_k, new_v = (np.einsum("rh,hkd->rkd", x, part[i]) for part in (w.q, w.k, w.v))
            q, new_k = q + turn, new_k + turn
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
        outputs["logits"] = (x @ w.head)[None] if graph.head == "all" else (x[-1:] @ w.head)[None]
        arrays = self.arrays[graph.role]  # the same ones in every run of a graph, as a backend may
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


def whole_pass(ids, window=None, forgets=None, embeds=None):
    """Logits (n, V) of one unchunked pass over ids, or over embeds (n, H) instead.

    forgets: for each query the first position that is still stored; none by default. window: of the second layer.
    """
    n = len(ids if embeds is None else embeds)
    at = np.arange(n)
    distance = at[:, None] - at[None, :]
    causal = distance >= 0
    if forgets is not None:
        causal &= at[None, :] >= np.asarray(forgets)[:, None]
    x = np.stack([WEIGHTS.embedding[i] for i in ids]) if embeds is None else np.asarray(embeds, np.float64)
    for layer, seen in enumerate((causal, causal if window is None else causal & (distance < window))):
        attended = np.zeros((n, H))
        for head in range(K):
            q = x @ WEIGHTS.q[layer][:, head] + WEIGHTS.turn(at)[:, 0]
            k = x @ WEIGHTS.k[layer][:, head] + WEIGHTS.turn(at)[:, 0]
            v = x @ WEIGHTS.v[layer][:, head]
            for row in range(n):
                visible = np.flatnonzero(seen[row])
                score = k[visible] @ q[row]
                weight = np.exp(score - score.max())
                attended[row] += (weight @ v[visible] / weight.sum()) @ WEIGHTS.out[layer][head]
        x = x + attended
    return x @ WEIGHTS.head


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
    bundle = toy_bundle(**settings)
    recorder = Recorder(ToyBackend(bundle))
    return Session(bundle, backend=recorder), recorder


def some_ids(n, seed=0):
    return random.Random(seed).choices(range(V), k=n)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def run_ends(turns, c, kv_len):
    """For each token the end of the run that takes it, by the contract's "Which graph"."""
    ends, past = [], 0
    for n in turns:
        rest = n % c
        sizes = ([rest] if past + c <= kv_len else [1] * rest) if rest else []
        for size in sizes + [c] * (n // c):
            past += size
            ends += [past] * size
    return np.array(ends)
