"""From the logits of one step to the next token: options, warpers as pure functions, the sampler, log-probabilities.

Knows neither text nor graphs nor the session: it takes an array of V logits and gives a token id. Every function here
returns a new array and leaves the caller's as it was, because a runtime hands out the same buffer at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class SamplingError(ValueError):
    """A sampling option, or an argument of the sampler, outside what is allowed."""

    exit_code = 2


class NonFiniteLogits(ArithmeticError):
    """Logits that hold a NaN or an infinity, from which no token can be chosen."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen. The defaults are greedy: the largest logit, at a tie the lowest id.

    Nothing of it can be changed; the mapping that is given is copied. Raises `SamplingError` for a value that is not
    allowed.
    """

    temperature: float = 0.0  # >= 0; 0 is greedy, and then top_k, top_p, min_p and seed have no effect
    top_k: int = 0  # >= 0; keep the k largest logits; 0: all
    top_p: float = 1.0  # in (0, 1]; keep the fewest tokens that together reach this probability; 1: all
    min_p: float = 0.0  # in [0, 1]; keep tokens at least this likely, relative to the likeliest; 0: all
    repetition_penalty: float = 1.0  # > 0; above 1 makes tokens that were seen less likely; greedy too
    seed: int | None = None  # >= 0; None: different at every run
    # id -> a finite number that is added to its logit before anything else; greedy too
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, "a finite number >= 0", lambda x: x >= 0)
        _check_integer("top_k", self.top_k, "an integer >= 0")
        _check_real("top_p", self.top_p, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
        _check_real("min_p", self.min_p, "a number from 0 to 1", lambda x: 0 <= x <= 1)
        _check_real("repetition_penalty", self.repetition_penalty, "a finite number > 0", lambda x: x > 0)
        if self.seed is not None:
            _check_integer("seed", self.seed, "an integer >= 0, or None")
        object.__setattr__(self, "logit_bias", MappingProxyType(_checked_bias(self.logit_bias)))

    def check_ids(self, vocab_size: int) -> None:
        """Raise SamplingError when logit_bias names an id outside of the vocabulary."""
        largest = max(self.logit_bias, default=0)
        if largest >= vocab_size:
            raise SamplingError(f"logit_bias holds token id {largest}; allowed: 0 .. {vocab_size - 1}, the vocabulary")

    def __reduce__(self) -> tuple[Any, ...]:  # for pickle and copy, which know no MappingProxyType
        return partial(SamplingOptions, **{**vars(self), "logit_bias": dict(self.logit_bias)}), ()


def _check_real(name: str, value: Any, allowed: str, holds: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not holds(value):
        raise SamplingError(f"{name} is {value!r}; allowed: {allowed}")


def _check_integer(name: str, value: Any, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise SamplingError(f"{name} is {value!r}; allowed: {allowed}")


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise SamplingError(f"logit_bias is {bias!r}; allowed: a mapping of token ids to numbers")
    for token, value in bias.items():
        _check_integer("a token id of logit_bias", token, "an integer >= 0")
        _check_real(f"logit_bias of token id {token}", value, "a finite number", lambda _: True)
    return {int(token): float(value) for token, value in bias.items()}


# Warpers: (V,) in, a new (V,) float32 out. A token that is taken out of the choice has -inf.


def add_bias(logits: NDArray[Any], bias: Mapping[int, float]) -> NDArray[np.float32]:
    """Add `bias` to the logits of its ids; a sum beyond float32 stays at its largest finite number.

    Raises `SamplingError` for an id outside the vocabulary.
    """
    out = logits.astype(np.float32)  # (V,)
    if not bias:
        return out
    ids = np.fromiter(bias, np.int64, len(bias))
    if ids.max() >= out.size:
        raise SamplingError(f"logit_bias holds token id {ids.max()}; allowed: 0 .. {out.size - 1}, the vocabulary")
    sums = out[ids] + np.fromiter(bias.values(), np.float64, len(bias))
    out[ids] = np.clip(sums, -_FLOAT32_MAX, _FLOAT32_MAX)
    return out


def penalize_repetition(logits: NDArray[Any], seen: Sequence[int], penalty: float) -> NDArray[np.float32]:
    """Divide positive logits of seen tokens by `penalty`, multiply negative ones by it.

    However often a token was seen, it is penalised once (CTRL, Keskar et al. 2019, section 4.1, with the sign rule
    that is usual since). A result beyond float32 stays at its largest finite number. -1 stands for a token without an
    id, such as a piece of an image, and is left out. Raises `SamplingError` for another id outside the vocabulary.
    """
    out = logits.astype(np.float32)  # (V,)
    ids = np.unique(np.fromiter(seen, dtype=np.int64))
    ids = ids[ids != -1]
    if ids.size == 0:
        return out
    if ids[0] < 0 or ids[-1] >= out.size:
        bad = ids[0] if ids[0] < 0 else ids[-1]
        raise SamplingError(f"seen holds token id {bad}; allowed: 0 .. {out.size - 1}, the ids that have a logit")
    values = out[ids].astype(np.float64)
    with np.errstate(over="ignore"):
        values = np.where(values < 0, values * penalty, values / penalty)
    out[ids] = np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX)
    return out


def apply_temperature(logits: NDArray[Any], temperature: float) -> NDArray[np.float32]:
    """Divide by `temperature`, which must be above 0. A quotient beyond float32 becomes infinite, without a warning."""
    with np.errstate(over="ignore"):
        return (logits.astype(np.float64) / temperature).astype(np.float32)


def keep_top_k(logits: NDArray[Any], k: int) -> NDArray[np.float32]:
    """Keep the k largest logits, and those equal to the smallest of them. k = 0, or k >= V, keeps all."""
    out = logits.astype(np.float32)  # (V,)
    if 0 < k < out.size:
        out[out < np.partition(out, -k)[-k]] = -np.inf
    return out


def keep_top_p(logits: NDArray[Any], p: float) -> NDArray[np.float32]:
    """Keep the fewest tokens whose probabilities sum to at least `p`, never less than one.

    Nucleus sampling (Holtzman et al. 2020, section 3.1). Among equal logits the lower ids are kept.
    """
    out = logits.astype(np.float32)  # (V,)
    if p >= 1:
        return out
    ids = np.flatnonzero(out > -np.inf)
    order = ids[np.argsort(-out[ids], kind="stable")][::-1]  # unlikely to likely
    below = np.cumsum(softmax(out[order])) <= 1 - p
    below[-1] = False
    out[order[below]] = -np.inf
    return out


def keep_min_p(logits: NDArray[Any], p: float) -> NDArray[np.float32]:
    """Keep tokens whose probability is at least `p` times that of the likeliest (Nguyen et al. 2024, section 3)."""
    out = logits.astype(np.float32)  # (V,)
    probabilities = softmax(out)
    out[probabilities < p * probabilities.max()] = -np.inf
    return out


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Probabilities (V,) in float64. Needs one finite logit; -inf gives 0."""
    weights = np.exp(logits.astype(np.float64) - np.float64(logits.max()))
    return np.asarray(weights / weights.sum())


def ban(logits: NDArray[Any], banned: Collection[int]) -> NDArray[np.float32]:
    """Take ids out of the choice; one without a logit cannot be chosen anyhow.

    Raises `SamplingError` when no token is left.
    """
    out = logits.astype(np.float32)  # (V,)
    out[[token for token in banned if 0 <= token < out.size]] = -np.inf
    if np.isneginf(out.max()):
        raise SamplingError(f"each of the {out.size} tokens is banned; allowed: at least one that can be chosen")
    return out


def score(
    logits: NDArray[Any], seen: Sequence[int], options: SamplingOptions, banned: Collection[int] = ()
) -> NDArray[np.float32]:
    """What greedy compares, in the order of transformers' `generate`: bias, penalty, banned ids. Finite (V,) in."""
    out = logits.astype(np.float32)  # (V,)
    if options.logit_bias:
        out = add_bias(out, options.logit_bias)
    if options.repetition_penalty != 1:
        out = penalize_repetition(out, seen, options.repetition_penalty)
    return ban(out, banned) if banned else out


def warp(
    logits: NDArray[Any], seen: Sequence[int], options: SamplingOptions, banned: Collection[int] = ()
) -> NDArray[np.float32]:
    """All warpers in the order of transformers' `generate`: those of `score`, temperature, top-k, top-p, min-p.

    Takes finite logits (V,) and a temperature above 0. The result differs from the chain's by one constant for all
    tokens, which no probability sees: the largest is brought to 0 before the temperature divides, so that no
    temperature, however low, overflows.
    """
    out = score(logits, seen, options, banned)  # (V,)
    out = apply_temperature(out.astype(np.float64) - np.float64(out.max()), options.temperature)
    out = keep_top_k(out, options.top_k)
    out = keep_top_p(out, options.top_p)
    return keep_min_p(out, options.min_p) if options.min_p > 0 else out


class Sampler:
    """Chooses tokens by `SamplingOptions`, one call per step. The same options, seed and logits give the same tokens.

    One `Sampler` belongs to one generation: its random numbers go on from call to call.
    """

    def __init__(self, options: SamplingOptions) -> None:
        self.options = options
        self._random = np.random.Generator(np.random.PCG64(options.seed))

    def pick(
        self, logits: NDArray[Any], seen: Sequence[int], banned: Collection[int] = (), *, checked: bool = False
    ) -> int:
        """The next token id.

        `logits` is (V,), of any floating type, and is not changed. `seen` holds the ids so far, prompt included, in
        any order, -1 for a token without one; only the repetition penalty reads it. `banned` ids are not chosen.
        `checked`: they are known to be finite, and (V,) float32 or float16.
        Raises `NonFiniteLogits`, and `SamplingError` for a wrong shape or type, for a seen or biased id that has no
        logit, and when every token is banned.
        """
        scores = logits if checked and logits.dtype == np.float32 else _checked_logits(logits)  # (V,)
        options = self.options
        if options.temperature == 0:
            if options.logit_bias or options.repetition_penalty != 1 or banned:
                scores = score(scores, seen, options, banned)
            return int(scores.argmax())
        scores = warp(scores, seen, options, banned)
        kept = np.flatnonzero(scores > -np.inf)
        sums = np.cumsum(softmax(scores[kept]))
        chosen = np.searchsorted(sums, self._random.random() * sums[-1], side="right")
        return int(kept[min(int(chosen), kept.size - 1)])


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the model held one generated token, and what it held likeliest in its place.

    Natural logarithms of the probabilities that the raw logits give: without bias, penalty, temperature or a cut.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, logprob), likeliest first, at a tie the lower id


def token_logprobs(logits: NDArray[Any], token: int, count: int) -> TokenLogprobs:
    """The log-softmax of raw logits (V,), in float64, at `token` and at the `count` likeliest tokens (V at most).

    Raises `NonFiniteLogits`, and `SamplingError` for a wrong shape or type, a token without a logit or a count below 0.
    """
    scores = _checked_logits(logits)  # (V,)
    _check_integer("the number of logprobs", count, "an integer >= 0")
    if not 0 <= token < scores.size:
        raise SamplingError(f"token id {token} has no logit; allowed: 0 .. {scores.size - 1}")
    wide = scores.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    count = min(int(count), scores.size)
    best = np.arange(0)
    if count:
        least = np.partition(scores, -count)[-count]  # the last that is wanted, and some may equal it
        above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
        best = np.concatenate((above[np.argsort(-scores[above], kind="stable")], equal[: count - above.size]))
    return TokenLogprobs(int(token), float(wide[token]), tuple((int(i), float(wide[i])) for i in best))


def _checked_logits(logits: NDArray[Any]) -> NDArray[np.float32]:
    """As float32, the same array where it is that; two fast passes, since NaN comes through max and min."""
    if logits.ndim != 1 or logits.size == 0 or not np.issubdtype(logits.dtype, np.floating):
        raise SamplingError(f"logits have shape {logits.shape} and type {logits.dtype}; allowed: (V,), V >= 1, float")
    with np.errstate(over="ignore"):
        scores = logits.astype(np.float32, copy=False)  # (V,)
    if not (math.isfinite(scores.max()) and math.isfinite(scores.min())):
        _refuse(scores)
    return scores


def _refuse(scores: NDArray[np.float32]) -> None:
    finite = np.isfinite(scores)
    first = int(np.argmin(finite))
    raise NonFiniteLogits(
        f"{int((~finite).sum())} of {scores.size} logits are not finite (the first: {scores[first]} for token id "
        f"{first}), so no token can be chosen. Either the graph overflows float16 (export the bundle in float32) "
        "or the bundle is damaged (run `rollkv verify`)"
    )
