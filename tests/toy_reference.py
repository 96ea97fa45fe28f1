"""The weights of the toy model, and one unchunked pass over them without cache, slots, pads or masks.

What a run sees is put as the contract puts it: by positions and by the end of the run, which `Record` reads from
what a backend was fed. Nothing here comes from the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

V, H, K, D = 23, 12, 2, 6
M = -32768.0
INV_FREQ = [1.0, 0.4, 0.09]  # of the rotary embedding, for D / 2 pairs


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
        """What a position adds to values, (rows, 1, D): a position that is off shows though all are off alike."""
        return np.sin(np.asarray(positions)[:, None, None] * self.frequencies)


WEIGHTS = Weights()


def rotated(vectors, positions):
    """Vectors (n, D) at positions (n,): each pair (x[j], x[j + D / 2]) is a complex number, turned by p inv_freq[j]."""
    pairs = vectors[:, : D // 2] + 1j * vectors[:, D // 2 :]
    pairs = pairs * np.exp(1j * np.multiply.outer(np.asarray(positions, np.float64), INV_FREQ))
    return np.concatenate((pairs.real, pairs.imag), axis=1)


def whole_pass(ids, window=None, forgets=None, embeds=None, *, full=True, ends=None, kv_len=None, slots=None, sinks=0):
    """Logits (n, V) of one unchunked pass over ids, or over embeds (n, H) instead.

    window: of the second layer, and of the first too unless it is `full`.
    forgets: for each query the first position that is still stored, in every layer; none by default. Instead of it,
    ends: for each query the end of its run (the position after the run's last token). With it kv_len is C, slots is
    Cs of a layer with a window (C by default), and sinks, a number or one for each query, is S, the pinned tokens of
    layers without a window: once E > C they stand E - C positions further on.
    """
    n = len(ids if embeds is None else embeds)
    first = np.zeros(n, int) if forgets is None else np.asarray(forgets)
    pinned = np.broadcast_to(sinks, n)
    x = np.stack([WEIGHTS.embedding[i] for i in ids]) if embeds is None else np.asarray(embeds, np.float64)
    for layer, span in enumerate((None if full else window, window)):
        seen, stand = [], []  # for each query: the positions of the keys that it sees, and where they stand
        for q in range(n):
            keys = np.arange(q + 1)
            places = keys.copy()
            if span is not None:
                keys = keys[max(0, q - span + 1) :]
            if ends is not None:
                over = ends[q] - (kv_len if span is None else slots or kv_len)
                if over > 0:
                    s = pinned[q] if span is None else 0
                    keys = keys[(keys < s) | (keys >= over + s)]
                    places[:s] += over
            keys = keys[keys >= first[q]]
            seen.append(keys)
            stand.append(places[keys])
        attended = np.zeros((n, H))
        for head in range(K):
            queries = rotated(x @ WEIGHTS.q[layer][:, head], np.arange(n))
            k = x @ WEIGHTS.k[layer][:, head]
            v = x @ WEIGHTS.v[layer][:, head] + WEIGHTS.turn(range(n))[:, 0]
            for q in range(n):
                score = rotated(k[seen[q]], stand[q]) @ queries[q]
                weight = np.exp(score - score.max())
                attended[q] += (weight @ v[seen[q]] / weight.sum()) @ WEIGHTS.out[layer][head]
        x = x + attended
    return x @ WEIGHTS.head


def run_ends(turns, c, kv_len):
    """For each token the end of the run that takes it, by the contract's "Which graph"; of one chunk size."""
    ends, past = [], 0
    for n in turns:
        rest = n % c
        sizes = ([rest] if past + c <= kv_len else [1] * rest) if rest else []
        for size in sizes + [c] * (n // c):
            past += size
            ends += [past] * size
    return np.array(ends)


def mask_of(feeds):
    """The mask (rows, slots) of a run, of whichever kind of layer the model has first."""
    return next(feeds[name] for name in ("attention_mask", "sliding_attention_mask") if name in feeds)[0, 0]


def pads_of(feeds):
    """The pads of a run: its fully masked rows."""
    return int((mask_of(feeds) != 0).all(axis=-1).sum())


@dataclass
class Record:
    """Which token stands at which position, and in a run of which end it went through, by what a backend was fed."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    sinks: list[int] = field(default_factory=list)

    def take(self, feeds, sinks=0):
        """One run: it starts at the position of its first real row, and what stood there before is gone."""
        pads = pads_of(feeds)
        ids = feeds["input_ids"][0, pads:].tolist()
        start = int(feeds["position_ids"][0, pads])
        assert start <= len(self.tokens), f"a run starts at {start}, after {len(self.tokens)} tokens"
        self.rewind(start)
        self.tokens += ids
        self.ends += [start + len(ids)] * len(ids)
        self.sinks += [sinks] * len(ids)

    def rewind(self, position):
        for part in (self.tokens, self.ends, self.sinks):
            del part[position:]

    def copy(self):
        return Record(list(self.tokens), list(self.ends), list(self.sinks))

    def logits(self, bundle):
        """Logits (n, V) of the reference for every token, with the sizes of the bundle."""
        m = bundle.manifest
        full, window = m.layers[0].window is None, m.layers[1].window
        return whole_pass(
            self.tokens,
            window,
            full=full,
            ends=self.ends,
            kv_len=m.max_kvcache_len,
            slots=m.layers[1].kv_len,
            sinks=self.sinks,
        )


def close(got, want, bound=1e-4):
    """Within the contract's bound of tiny models, relative to the largest logit."""
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * np.abs(want).max())
