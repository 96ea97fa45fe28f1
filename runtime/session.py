"""One sequence of tokens through a bundle: chunked prefill, decode, generate. Token ids or embeddings, no text.

The driver reads what each graph takes from the manifest, never from file names, and computes nothing itself: new
tokens are checked in `prompt.py`, positions and masks come from `align.py` and `mask.py`, rows of embedding tables from
`embedding.py`, the cache from `cache.py`, the graph runs in a `Backend`.

P is `Session.position`, the number of real tokens that went through; L, c, C and H as in the contract.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollkv.runtime.align import (
    LimitError,
    PromptError,
    Run,
    check_protect,
    kept_ranges,
    plan_runs,
    run_positions,
    whole_number,
)
from rollkv.runtime.backend import Array, Backend, OrtBackend
from rollkv.runtime.bundle import SLOT_AXES, Bundle, GraphInfo, Manifest, open_bundle
from rollkv.runtime.cache import RollingBuffer, default_slack
from rollkv.runtime.embedding import EmbeddingTable
from rollkv.runtime.mask import run_mask
from rollkv.runtime.prompt import Prompt, read_prompt
from rollkv.runtime.sampling import Sampler, SamplingOptions

ON_LIMIT = ("stop", "roll")
DEFAULT_NEW_TOKENS = 256

__all__ = ["DEFAULT_NEW_TOKENS", "ON_LIMIT", "Generation", "LimitError", "Session"]


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
        roles = {value.role for value in self._decode.inputs}
        self._tables = {
            role: EmbeddingTable(self.bundle.path / table.file, table)
            for role, table in (("embeds", m.embedding), ("per_layer_inputs", m.per_layer_embedding))
            if role in roles and table is not None
        }
        self._tokens: list[int] = []
        self._rotary = 0  # rotary position of the next token: P, unless a caller gave others

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    @property
    def tokens(self) -> list[int]:
        """Ids that went through since the last reset, in order; -1 for one that came as an embedding alone."""
        return list(self._tokens)

    @property
    def position(self) -> int:
        """P, the number of those tokens: the position of the next one, which masks go by."""
        return len(self._tokens)

    def reset(self) -> None:
        """Forget every token; every slot of the cache is zero."""
        self._tokens.clear()
        self._rotary = 0
        for cache in self._caches.values():
            cache.reset()

    def lookup(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """The embeddings (n, H) of ids, for a caller who puts others among them. They belong to the caller.

        Raises PromptError: an id outside of the vocabulary, or graphs that take ids.
        """
        if "embeds" not in self._tables:
            raise PromptError("the graphs of this bundle take ids and hold the embeddings; export with --input embeds")
        return self._tables["embeds"].rows(read_prompt(self.manifest, ids).ids)

    def prefill(
        self,
        ids: Sequence[int] | None = None,
        *,
        embeds: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        truncate: str = "none",
        keep_head: int | None = None,
        protect: tuple[int, int] | None = None,
        on_limit: str = "stop",
    ) -> NDArray[np.floating]:
        """Take new tokens after those that went through; the logits (V,) of the last one.

        embeds: (n, H) floats instead of ids, for a bundle whose graphs take embeddings: what the decoder's first layer
        sees, so with the model's scale of embeddings. With both, ids are for what needs ids: `tokens`, and per-layer
        inputs, which a bundle that has them must be given.
        positions: (3, n), the rotary positions of the new tokens in a bundle of three-part positions, see
        `align.three_part_positions`; later tokens go on after the largest. None: the next ones, the same on all three.
        truncate, keep_head, protect: what to do with more than L tokens, see `align.kept_ranges`; a warning says what
        was cut. on_limit: "stop" refuses to forget a token, "roll" forgets the oldest, protected or not; so without a
        truncation it does not go with protect.
        Raises PromptError: no token, an id outside of the vocabulary, more than L tokens without a truncation, and as
        `align.kept_ranges` and `prompt.read_prompt`. Raises LimitError: the tokens do not fit and on_limit is "stop",
        or the model has no such position.
        """
        prompt = read_prompt(self.manifest, ids, embeds, positions)
        kept, cut = self._admit(prompt, truncate, keep_head, protect, on_limit)
        if cut:
            warnings.warn(f"the prompt was cut from {len(prompt)} to {len(kept)} tokens", stacklevel=2)
        return self._take(kept).copy()

    def decode(self, token: int, *, on_limit: str = "stop") -> NDArray[np.floating]:
        """Take one token; the logits (V,) that follow it. Raises as `prefill`."""
        kept, _ = self._admit(read_prompt(self.manifest, [token]), "none", None, None, on_limit)
        return self._step(self._decode, Run(1, 0), kept).copy()

    def generate(
        self,
        ids: Sequence[int] | None = None,
        *,
        embeds: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        max_new_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        truncate: str = "none",
        keep_head: int | None = None,
        protect: tuple[int, int] | None = None,
        on_limit: str = "stop",
        ignore_eos: bool = False,
    ) -> Generation:
        """Take new tokens, given as to `prefill`, and generate more: an iterator over token ids, see `Generation`.

        max_new_tokens: at most 256 by default. The prompt is checked now (raises as `prefill`), and runs when the
        first token is asked for.
        """
        if max_new_tokens is not None and whole_number("max_new_tokens", max_new_tokens) < 1:
            raise PromptError(f"max_new_tokens is {max_new_tokens}, must be at least 1")
        prompt = read_prompt(self.manifest, ids, embeds, positions)
        kept, cut = self._admit(prompt, truncate, keep_head, protect, on_limit)
        sampler = Sampler(sampling or SamplingOptions())
        limit = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        return Generation(self, kept, cut, limit, sampler, on_limit, ignore_eos)

    def room(self, on_limit: str = "stop") -> int:
        """How many more tokens can be taken: until C for "stop", until the model's last position for "roll" too."""
        positions = self.manifest.max_position - self._rotary
        return min(self.manifest.max_kvcache_len - self.position, positions) if on_limit == "stop" else positions

    def _admit(
        self, prompt: Prompt, how: str, keep_head: int | None, protect: tuple[int, int] | None, on_limit: str
    ) -> tuple[Prompt, int]:
        """What of the prompt will run, and how many tokens were cut; nothing has run when this raises."""
        m, n = self.manifest, len(prompt)
        if on_limit not in ON_LIMIT:
            raise PromptError(f"on_limit {on_limit!r} is unknown; allowed: {', '.join(ON_LIMIT)}")
        if protect is not None:
            check_protect(protect, how, on_limit, n)
        if how == "none" and n > m.max_lm_input_len and on_limit == "stop":
            raise PromptError(
                f"the prompt has {n} tokens, more than L = {m.max_lm_input_len} (C = {m.max_kvcache_len}); "
                "choose a truncation (left, middle), on-limit roll, or export with a larger -L"
            )
        limit = n if how == "none" else m.max_lm_input_len
        if keep_head is not None:
            whole_number("keep_head", keep_head)
        ranges = kept_ranges(n, limit, how, keep_head if how != "none" else None, protect)
        kept = prompt if ranges == [(0, n)] else prompt.keep(ranges)
        past, new = self.position, len(kept)
        if on_limit == "stop" and past + new > m.max_kvcache_len:
            raise LimitError(
                f"{new} tokens after {past} others pass C = {m.max_kvcache_len}; reset the session, or choose on-limit "
                "roll to forget the oldest"
            )
        if kept.positions is None and self._rotary + new > m.max_position:
            turned = "" if self._rotary == past else f" (rotary position {self._rotary})"
            raise LimitError(
                f"{new} tokens after {past} others{turned} pass the model's positions = {m.max_position}; reset the "
                "session"
            )
        return kept, n - new

    def _take(self, prompt: Prompt) -> Array:
        """Run every token; the last logits, in the backend's memory."""
        m, positions = self.manifest, prompt.positions
        ends = None if positions is None else np.maximum.accumulate(positions.max(axis=0)) + 1  # (n,)
        at, logits = 0, None
        for run in plan_runs(len(prompt), self.position, self._prefill.rows, m.max_kvcache_len):
            graph = self._prefill if run.rows == self._prefill.rows else self._decode
            start, at = at, at + run.rows - run.pads
            logits = self._step(graph, run, prompt.part(start, at), None if ends is None else int(ends[at - 1]))
        assert logits is not None
        assert at == len(prompt)
        return logits

    def _step(self, graph: GraphInfo, run: Run, prompt: Prompt, rotary: int | None = None) -> Array:
        """One run of one graph and the roll after it; the logits (V,) of its last row, in the backend's memory.

        rotary: the rotary position after it; by default the next one.
        """
        outputs = self.backend.run(graph, self._feeds(graph, run, prompt))
        logits: Array | None = None
        for value in graph.outputs:
            if value.role == "logits":
                logits = outputs[value.name][0, -1]
        try:
            for past, new in self.manifest.kv_pairs:
                self._caches[past].roll(outputs[new], run.pads)
            self._rotary = self._rotary + len(prompt) if rotary is None else rotary
            self._tokens += prompt.ids
        except BaseException:  # Ctrl-C between two layers: they would be a token apart
            self.reset()
            raise
        assert logits is not None
        return logits

    def feeds(self, graph: GraphInfo, run: Run, ids: Sequence[int]) -> dict[str, Array]:
        """Every input of `graph` for a run of `ids` after the tokens so far. Caches are views of the live buffers."""
        return self._feeds(graph, run, Prompt(list(ids)))

    def _feeds(self, graph: GraphInfo, run: Run, prompt: Prompt) -> dict[str, Array]:
        m = self.manifest
        feeds: dict[str, Array] = {}
        for value in graph.inputs:
            if value.role in ("past_key", "past_value"):
                feeds[value.name] = self._caches[value.name].window()
            elif value.role in ("ids", "embeds", "per_layer_inputs"):
                padded = np.zeros(value.shape, value.dtype)  # pads: id 0, rows of zeros
                if value.role == "ids":
                    padded[0, run.pads :] = prompt.ids
                elif value.role == "embeds" and prompt.embeds is not None:
                    padded[0, run.pads :] = prompt.embeds
                else:
                    padded[0, run.pads :] = self._tables[value.role].rows(prompt.ids)
                feeds[value.name] = padded
            elif value.role == "position_ids":
                rotary = np.zeros(value.shape, value.dtype)  # (1, rows) or (3, 1, rows)
                if prompt.positions is None:
                    rotary[...] = run_positions(self._rotary, run.pads, run.rows)
                else:
                    rotary[:, 0, run.pads :] = prompt.positions
                feeds[value.name] = rotary
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
        prompt: Prompt,
        truncated: int,
        max_new_tokens: int,
        sampler: Sampler,
        on_limit: str,
        ignore_eos: bool,
    ) -> None:
        self.finish_reason: str | None = None
        self.prompt_tokens = len(prompt)
        self.truncated = truncated
        self.generated: list[int] = []
        self._session, self._prompt, self._sampler = session, prompt, sampler
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
            logits = session._step(session._decode, Run(1, 0), Prompt(self.generated[-1:]))
        else:
            logits = session._take(self._prompt)
        token = self._sampler.pick(logits, session._tokens)
        if token in self._eos:
            self.finish_reason = "stop"
            return None
        self._at = session.position
        self.generated.append(token)
        return token


def _graph(manifest: Manifest, role: str) -> GraphInfo:
    return next(graph for graph in manifest.graphs if graph.role == role)
