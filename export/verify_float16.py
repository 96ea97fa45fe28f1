"""By what a float16 bundle is judged: the same best token and nearly the same probabilities over the tokens of a text.

Rounding every value to 11 bits changes logits by far more than the bounds that float32 is held to, so here the law is
top-1 in 99 % of the positions (near ties, which the output's float16 cannot tell apart, are counted and shown) and a
mean divergence KL(reference || bundle) of 1e-3. The rungs below the bundle run in
float32: the torch decoder with the checkpoint's weights, as for any bundle, and the traced graph with the weights as
the bundle stores them, which shows what their rounding alone costs. ONNX Runtime's CPU kernels compute most of float16
through float32, so the proof is of the file, not of an NPU's arithmetic.

Knows no rung and no report; `verify.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollkv.export.prompts import proof_ids
from rollkv.export.reference import Trail
from rollkv.runtime.backend import Array
from rollkv.runtime.bundle import Bundle

MISSES, KL = 0.01, 1e-3  # the largest share of positions with another argmax, the largest mean divergence in nats
# Positions of a text that is long enough for a share and a mean. Of the few of a short prompt one is more than 1 %, and
# one token that a mixture of experts routes elsewhere, as rounding may, is most of the mean.
ENOUGH = 100
TEXT_POSITIONS = 200  # of the texts, at least
UNIT = 2.0**-11  # the largest relative error of rounding to float16
TIE = 2 * UNIT  # of the largest logit: rounding two logits to the output's float16 alone can swap them
ROUNDINGS = 54  # in series in a layer, see kv_bound
SPREAD = 4  # standard deviations that the largest of many errors lies from none


@dataclass(frozen=True)
class Divergence:
    """How far logits are from the reference's."""

    kl: float  # mean over the positions, nats
    top1: int  # positions with the reference's argmax
    near_ties: int  # others, where the reference's logits of the two tokens lie closer than TIE
    positions: int

    @property
    def bound(self) -> float:
        """On `kl`: the law's, and over fewer positions than ENOUGH what those may add to a mean over ENOUGH of them."""
        return KL * max(1.0, ENOUGH / self.positions)

    @property
    def fault(self) -> str | None:
        """What the law says against it."""
        if not self.kl <= self.bound:
            return f"KL(reference || bundle) is {self.kl:.2e} over {self.positions} positions (bound {self.bound:.0e})"
        misses = self.positions - self.top1 - self.near_ties
        if misses > MISSES * max(self.positions, ENOUGH):
            return (
                f"the argmax is neither the reference's nor within float16 as large in {misses} of {self.positions} "
                f"positions (bound {MISSES:.0%} of at least {ENOUGH})"
            )
        return None


def diverge(wanted: Sequence[Array], got: Sequence[Array]) -> Divergence:
    """Logits (V,) of the same positions on either side; NaN in any gives a divergence of NaN."""
    each, same, near = [], 0, 0
    for a, b in zip(wanted, got, strict=True):
        p, q = _log_softmax(a), _log_softmax(b)
        each.append(float(np.sum(np.exp(p) * (p - q))))
        if a.argmax() == b.argmax():
            same += 1
        elif a.max() - a[b.argmax()] <= TIE * np.abs(a).max():
            near += 1
    return Divergence(float(np.mean(each)), same, near, len(each))


def kv_bound(layer: int) -> float:
    """The most that new keys and values of a layer may be off, over their largest.

    Rounding to nearest errs by up to UNIT of a value. A layer has about ROUNDINGS of them in series: 7 weights and the
    7 products with them, 2 x 13 in the norms, 3 in a rotation, 5 from scores to weights, 4 in the MLP, 2 sums on the
    residual stream. They are independent, so their squares add up, over all layers before and this one; and the largest
    of the many errors of a layer lies about SPREAD standard deviations out.
    """
    return SPREAD * UNIT * float(np.sqrt(ROUNDINGS * (layer + 1)))


def texts(bundle: Bundle, c: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and the tokens forced after them, as many as give TEXT_POSITIONS positions within C.

    A prompt takes a run of c rows or more where a quarter of C has room for it: the positions are decode steps, since a
    graph for the last row gives logits nowhere else. The text is that of the proof's prompts.
    """
    m = bundle.manifest
    end = min(m.max_kvcache_len, m.max_position)
    n = max(1, min(c + 1, m.max_lm_input_len, end // 4))
    size = n + min(end - n, TEXT_POSITIONS)
    count = -(-TEXT_POSITIONS // (size - n + 1))
    ids = proof_ids(bundle, count * size, start=0)
    return [(ids[at : at + n], ids[at + n : at + size]) for at in range(0, count * size, size)]


def widened(bundle: Bundle) -> Bundle:
    """The bundle as the rungs below it take and give its values: float32 where it has float16. No file is another."""
    m = bundle.manifest
    graphs = [
        replace(
            graph,
            inputs=[replace(v, dtype="float32") if v.dtype == "float16" else v for v in graph.inputs],
            outputs=[replace(v, dtype="float32") if v.dtype == "float16" else v for v in graph.outputs],
        )
        for graph in m.graphs
    ]
    return replace(bundle, manifest=replace(m, dtype="float32", graphs=graphs))


def in_float32(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Weights as float32, which holds every float16; those that are float32 as they are."""
    return {name: array.astype(np.float32, copy=False) for name, array in weights.items()}


def joined(trails: Sequence[Trail]) -> Trail:
    """The logits of several ways, one after the other."""
    return Trail([row for trail in trails for row in trail.logits])


def _log_softmax(logits: Array) -> NDArray[np.float64]:
    x = np.asarray(logits, np.float64)
    x = x - x.max()
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return result
