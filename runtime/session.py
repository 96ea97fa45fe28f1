"""One sequence of tokens through a bundle: chunked prefill, decode, generate. Token ids only.

The driver reads what each graph takes from the manifest, never from file names, and computes nothing itself: ids,
positions and masks come from `align.py` and `mask.py`, the cache from `cache.py`, the graph runs in a `Backend`.

P is `Session.position`, the number of real tokens that went through; L, c and C as in the manifest.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.align import PromptError, Run, plan_runs, run_positions, truncate
from rollkv.runtime.backend import Array, Backend, OrtBackend
from rollkv.runtime.bundle import SLOT_AXES, Bundle, GraphInfo, Manifest, open_bundle
from rollkv.runtime.cache import RollingBuffer, default_slack
from rollkv.runtime.mask import run_mask
from rollkv.runtime.sampling import Sampler, SamplingOptions

ON_LIMIT = ("stop", "roll")
DEFAULT_NEW_TOKENS = 256


class LimitError(ValueError):
    """The cache or the model's positions are used up."""

    exit_code = 2


class Session:
    """The state of one sequence: its tokens and its cache."""

    def __init__(
        self,
        bundle: str | Path | Bundle,
        *,
        backend: Backend | None = None,
        threads: int | None = None,
        low_memory: bool = False,
    ) -> None:
        """bundle: the folder, or one that is open. backend: what runs the graphs, by default ONNX Runtime.

        Raises BundleError when the folder does not hold a bundle.
        """
        self.bundle = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
        self.backend: Backend = backend or OrtBackend(self.bundle, threads, low_memory)
        m = self.bundle.manifest
        self._prefill = _graph(m, "prefill")
        self._decode = _graph(m, "decode")
        self._caches: dict[str, RollingBuffer] = {}  # by the name of the past input
        key_axis, value_axis = SLOT_AXES[m.kv_layout]
        for value in self._decode.inputs:
            if value.role in ("past_key", "past_value"):
                axis = key_axis if value.role == "past_key" else value_axis
                slack = default_slack(self._prefill.rows, value.shape[axis])
                self._caches[value.name] = RollingBuffer(tuple(value.shape), axis, value.dtype, slack)
        self._tokens: list[int] = []

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    @property
    def tokens(self) -> list[int]:
        """Ids that went through since the last reset, in order."""
        return list(self._tokens)

    @property
    def position(self) -> int:
        """P, the number of those ids: the position of the next token."""
        return len(self._tokens)

    def reset(self) -> None:
        """Forget every token; every slot of the cache is zero."""
        self._tokens.clear()
        for cache in self._caches.values():
            cache.reset()

    def prefill(
        self, ids: Sequence[int], *, truncate: str = "none", keep_head: int | None = None, on_limit: str = "stop"
    ) -> NDArray[np.floating]:
        """Take new tokens after those that went through; the logits (V,) of the last one.

        truncate, keep_head: what to do with more than L tokens, see `align.truncate`; a warning says what was cut.
        on_limit: "stop" refuses to forget a token, "roll" forgets the oldest.
        Raises PromptError: no token, an id outside of the vocabulary, more than L tokens without a truncation.
        Raises LimitError: the tokens do not fit and on_limit is "stop", or the model has no such position.
        """
        kept, cut = self._admit(ids, truncate, keep_head, on_limit)
        if cut:
            warnings.warn(f"the prompt was cut from {len(kept) + cut} to {len(kept)} tokens", stacklevel=2)
        return self._take(kept).copy()

    def decode(self, token: int, *, on_limit: str = "stop") -> NDArray[np.floating]:
        """Take one token; the logits (V,) that follow it. Raises as `prefill`."""
        kept, _ = self._admit([token], "none", None, on_limit)
        return self._step(self._decode, Run(1, 0), kept).copy()

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        truncate: str = "none",
        keep_head: int | None = None,
        on_limit: str = "stop",
        ignore_eos: bool = False,
    ) -> Generation:
        """Take new tokens and generate more: an iterator over token ids, see `Generation`.

        max_new_tokens: at most 256 by default. The prompt is checked now (raises as `prefill`), and runs when the
        first token is asked for.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise PromptError(f"max_new_tokens is {max_new_tokens}, must be at least 1")
        kept, cut = self._admit(ids, truncate, keep_head, on_limit)
        sampler = Sampler(sampling or SamplingOptions())
        limit = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        return Generation(self, kept, cut, limit, sampler, on_limit, ignore_eos)

    def room(self, on_limit: str = "stop") -> int:
        """How many more tokens can be taken: until C for "stop", until the model's last position for "roll"."""
        m = self.manifest
        return (m.max_kvcache_len if on_limit == "stop" else m.max_position) - self.position

    def _admit(self, ids: Sequence[int], how: str, keep_head: int | None, on_limit: str) -> tuple[list[int], int]:
        """The ids that will run, and how many were cut; nothing has run when this raises."""
        m = self.manifest
        if on_limit not in ON_LIMIT:
            raise PromptError(f"on_limit {on_limit!r} is unknown; allowed: {', '.join(ON_LIMIT)}")
        try:
            ids = [operator.index(i) for i in ids]
        except TypeError:
            raise PromptError(f"token ids must be whole numbers, got {type(ids).__name__} {str(ids)[:40]!r}") from None
        if not ids:
            raise PromptError("empty prompt: there is no token to run")
        for index, token in enumerate(ids):
            if not 0 <= token < m.vocab_size:
                raise PromptError(
                    f"id {token} at index {index} is not in the vocabulary, allowed: 0 .. {m.vocab_size - 1}"
                )
        if how == "none" and len(ids) > m.max_lm_input_len and on_limit == "stop":
            raise PromptError(
                f"the prompt has {len(ids)} tokens, more than L = {m.max_lm_input_len} (C = {m.max_kvcache_len}); "
                "choose a truncation (left, middle), on-limit roll, or export with a larger -L"
            )
        kept, cut = (ids, 0) if how == "none" else truncate(ids, m.max_lm_input_len, how, keep_head)
        if len(kept) > self.room(on_limit):
            kind, bound = ("C", m.max_kvcache_len) if on_limit == "stop" else ("the model's positions", m.max_position)
            raise LimitError(
                f"{len(kept)} tokens after {self.position} others pass {kind} = {bound}; reset the session"
                + (", or choose on-limit roll to forget the oldest" if on_limit == "stop" else "")
            )
        return kept, cut

    def _take(self, ids: Sequence[int]) -> Array:
        """Run every id; the last logits, in the backend's memory."""
        m = self.manifest
        at, logits = 0, None
        for run in plan_runs(len(ids), self.position, self._prefill.rows, m.max_kvcache_len):
            graph = self._prefill if run.rows == self._prefill.rows else self._decode
            count = run.rows - run.pads
            logits = self._step(graph, run, ids[at : at + count])
            at += count
        assert logits is not None
        assert at == len(ids)
        return logits

    def _step(self, graph: GraphInfo, run: Run, ids: Sequence[int]) -> Array:
        """One run of one graph and the roll after it; the logits (V,) of its last row, in the backend's memory."""
        outputs = self.backend.run(graph, self.feeds(graph, run, ids))
        logits: Array | None = None
        for value in graph.outputs:
            if value.role == "logits":
                logits = outputs[value.name][0, -1]
        try:
            for past, new in self.manifest.kv_pairs:
                self._caches[past].roll(outputs[new], run.pads)
            self._tokens += ids
        except BaseException:  # Ctrl-C between two layers: they would be a token apart
            self.reset()
            raise
        assert logits is not None
        return logits

    def feeds(self, graph: GraphInfo, run: Run, ids: Sequence[int]) -> dict[str, Array]:
        """Every input of `graph` for a run of `ids` after the tokens so far. Caches are views of the live buffers."""
        m = self.manifest
        feeds: dict[str, Array] = {}
        for value in graph.inputs:
            if value.role in ("past_key", "past_value"):
                feeds[value.name] = self._caches[value.name].window()
            elif value.role == "ids":
                padded = np.zeros((1, run.rows), value.dtype)
                padded[0, run.pads :] = ids
                feeds[value.name] = padded
            elif value.role == "position_ids":
                feeds[value.name] = run_positions(self.position, run.pads, run.rows).astype(value.dtype)[None]
            else:
                assert value.role in ("attention_mask", "sliding_attention_mask"), value
                window = None
                if value.role == "sliding_attention_mask":
                    window = next(layer.window for layer in m.layers if layer.window is not None)
                feeds[value.name] = run_mask(
                    self.position, run.pads, run.rows, value.shape[-1], m.mask_value, window=window, dtype=value.dtype
                )
        return feeds


class Generation(Iterator[int]):
    """Iterates over the ids that a model generates after a prompt.

    Ends with `finish_reason` "stop" at an EOS id (which is not given out), or "length" at max_new_tokens, at the
    end of the cache under on_limit "stop", or at the model's last position. The last id was never fed back.
    An exception ends it too, with "error". Raises PromptError when the session went on without it.
    """

    def __init__(
        self,
        session: Session,
        ids: list[int],
        truncated: int,
        max_new_tokens: int,
        sampler: Sampler,
        on_limit: str,
        ignore_eos: bool,
    ) -> None:
        self.finish_reason: str | None = None
        self.prompt_tokens = len(ids)
        self.truncated = truncated
        self.generated: list[int] = []
        self._session, self._ids, self._sampler = session, ids, sampler
        self._at = session.position  # P when the next id is asked for
        self._max, self._on_limit = max_new_tokens, on_limit
        self._eos = frozenset() if ignore_eos else frozenset(session.manifest.eos_token_ids)

    def __next__(self) -> int:
        token = None
        if self.finish_reason is None:
            try:
                token = self._next()
            except BaseException:
                self.finish_reason = "error"
                raise
        if token is None:
            raise StopIteration
        return token

    def _next(self) -> int | None:
        """The next id, or None when `finish_reason` is set."""
        session = self._session
        if session.position != self._at:
            raise PromptError(
                f"the session is at token {session.position}, this generation continues at {self._at}: "
                "it was reset or took other tokens since; start a new generation"
            )
        if len(self.generated) >= self._max or (self.generated and session.room(self._on_limit) < 1):
            self.finish_reason = "length"
            return None
        if self.generated:
            logits = session._step(session._decode, Run(1, 0), self.generated[-1:])
        else:
            logits = session._take(self._ids)
        token = self._sampler.pick(logits, session._tokens)
        if token in self._eos:
            self.finish_reason = "stop"
            return None
        self._at = session.position
        self.generated.append(token)
        return token


def _graph(manifest: Manifest, role: str) -> GraphInfo:
    return next(graph for graph in manifest.graphs if graph.role == role)
