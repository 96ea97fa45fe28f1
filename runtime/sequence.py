"""What went through a bundle in one session: its tokens, their rotary positions, its caches, and one run more.

Knows which runs are allowed no more than the caller says: `session.py` decides. P, c, C and S as in the contract.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.align import LimitError
from rollkv.runtime.backend import Array
from rollkv.runtime.cover import Run
from rollkv.runtime.feeds import GraphArrays
from rollkv.runtime.kv import KvCache
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.manifest import GraphInfo
from rollkv.runtime.prompt import Prompt
from rollkv.runtime.sampling import NonFiniteLogits
from rollkv.runtime.sinks import pinned_delta
from rollkv.runtime.snapshot import Snapshot


@dataclass(frozen=True)
class Policy:
    """What happens when the cache is full; `sinks` tokens stay under "sinks", 0 otherwise."""

    on_limit: str
    sinks: int = 0

    def __str__(self) -> str:
        return f"sinks of {self.sinks}" if self.sinks else self.on_limit


@dataclass(frozen=True)
class Admitted:
    """New tokens that may run, and from where."""

    prompt: Prompt
    cut: int  # tokens that a truncation took
    policy: Policy
    start: int  # P before the prompt's first run: the session goes on, or back
    reuse: bool
    snapshot: Snapshot | None = None  # restored first


class TokenSequence:
    """The state of a session. What fails in the middle leaves it as before, or empty."""

    def __init__(self, loaded: LoadedBundle, slack: int | None, fixed: bool) -> None:
        """slack, fixed: of the caches, see `KvCache`."""
        self.loaded = loaded
        self.cache = KvCache(loaded.manifest, loaded.decode, max(loaded.prefill), slack, fixed)
        self._arrays: dict[str, GraphArrays] = {}  # by file, made when first used
        self.changes = 0  # how often the tokens were changed: who finds another number has missed something
        self.tokens: list[int] = []
        self.known = 0  # leading tokens that came by id alone: no others can be matched by id
        self.ahead = 0  # of the tokens, those that a speculating generation has not given out yet
        self.policy: Policy | None = None  # by which tokens were forgotten
        self._offsets = [(0, 0)]  # (token count, rotary position of the next token - count), where it changes
        self._stale = False  # whether the cache still holds what was forgotten by `_clear`

    def _clear(self) -> None:
        """No token. In one statement, in which no Ctrl-C arrives: it would find half of it."""
        self.changes += 1
        self._stale, self.tokens, self.known, self.ahead, self.policy, self._offsets = True, [], 0, 0, None, [(0, 0)]

    @property
    def position(self) -> int:
        """P."""
        return len(self.tokens) - self.ahead

    def room(self, on_limit: str) -> int:
        """How many more tokens can be taken."""
        m, past = self.loaded.manifest, len(self.tokens) - self.ahead
        positions = m.max_position - self.rotary_at(past)
        return min(m.max_kvcache_len - past, positions) if on_limit == "stop" else positions

    def rotary_at(self, count: int) -> int:
        """Rotary position of the token after the first `count`."""
        return count + self._offset_at(count)

    def arrays(self, graph: GraphInfo) -> GraphArrays:
        """Those of a graph, or of one of a smaller visible length that can take its next run. graph: one of C."""
        return self.exactly(self.loaded.serving(graph, self.position, self.cache.kv_len))

    def exactly(self, graph: GraphInfo) -> GraphArrays:
        """Those of this graph, for which the caches are laid out."""
        if graph.file not in self._arrays:
            self._arrays[graph.file] = GraphArrays(self.loaded, graph, self.cache)
        self._clean()
        try:
            self.cache.fit(graph.kv_len)
        except BaseException:  # Ctrl-C between two groups of the cache
            self.reset()
            raise
        return self._arrays[graph.file]

    def reset(self) -> None:
        """No token; every slot is zero."""
        self._clear()  # first: whatever stops the rest, no token is left that the cache does not hold
        self._clean()

    def _clean(self) -> None:
        """Empty the cache where no token is left in it: a Ctrl-C may have stopped that the first time."""
        if self._stale:
            self.cache.reset()
            self._stale = False

    def rewind(self, position: int) -> None:
        """Go back to the first `position` tokens, which the cache allows."""
        if position == 0:
            self.reset()
            return
        self.changes += 1
        try:
            self.cache.rewind(len(self.tokens) - position)
            del self.tokens[position:]
            self.known = min(self.known, position)
            self._offsets = [entry for entry in self._offsets if entry[0] <= position]
            self.ahead = 0
        except BaseException:  # Ctrl-C between two groups of the cache
            self.reset()
            raise

    def settle(self) -> None:
        """Take back the tokens of a generation that ran ahead of what it gave out."""
        if self.ahead:
            changes = self.changes
            self.rewind(self.position)
            self.changes = changes  # the tokens that were given out are the same

    def step(
        self,
        arrays: GraphArrays,
        run: Run,
        prompt: Prompt,
        policy: Policy,
        ends: NDArray[np.int64] | None = None,
        accept: Callable[[Array], int] | None = None,
        wanted: bool = True,
    ) -> GraphArrays:
        """One run of one graph and the roll after it. The logits are in `arrays` until its next run.

        ends: rotary position after each token; by default they count on. accept: is given the logits of every row and
        says how many of the run's tokens stay, at least one, of which all but the first are `ahead`; all by default.
        wanted: whether the logits are looked at, which a head of its own is spared otherwise.
        Raises NonFiniteLogits, and what the backend raises; the run leaves no trace then.
        """
        past = self.position
        forgets = past + run.rows > self.loaded.manifest.max_kvcache_len
        arrays.fill(run, past, self.rotary_at(past), prompt)
        rolling = False
        try:
            with self._pinned(run, policy) if forgets and policy.sinks else contextlib.nullcontext():
                if not arrays.run(wanted):
                    message = _not_finite(arrays)
                    arrays.clear()
                    raise NonFiniteLogits(message)
                count = len(prompt) if accept is None else accept(arrays.row_logits)
                rolling = True
                self.changes += 1
                self.cache.roll(arrays.new, run.pads, run.pads + count, past + count)
                self.ahead = 0 if accept is None else count - 1
                if prompt.embeds is None and prompt.positions is None and self.known == past:
                    self.known += count
                self.tokens += prompt.ids[:count]
                for index, end in enumerate([] if ends is None else ends[:count].tolist()):
                    self._note_offset(past + index + 1, end - (past + index + 1))
                if forgets:  # a model whose layers all have a window needs none of what it forgets
                    self.policy = policy if self.cache.forgot else None
        except BaseException:
            if rolling:  # Ctrl-C between two groups of the cache: they would be a token apart
                self.reset()
            raise
        return arrays

    def snapshot(self) -> Snapshot:
        """A copy. Raises LimitError when no token is there, or the first ones are forgotten."""
        if not self.tokens:
            raise LimitError("the session holds no token to save")
        if self.cache.forgot:
            raise LimitError("the session has forgotten its first tokens; only a whole prefix can be saved")
        return Snapshot(
            bundle=self.loaded.sha256,
            tokens=tuple(self.tokens),
            known=self.known,
            offsets=tuple(self._offsets),
            parts=self.cache.parts(self.position),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Become what a snapshot was. Raises LimitError when it is of another bundle or cache."""
        if snapshot.bundle != self.loaded.sha256:
            raise LimitError("the saved tokens belong to another bundle")
        m, most = self.loaded.manifest, max(snapshot.tokens)
        if most >= m.vocab_size:
            raise LimitError(f"the saved tokens hold the id {most}, the vocabulary ends at {m.vocab_size - 1}")
        if len(snapshot.tokens) + snapshot.offsets[-1][1] > m.max_position:
            raise LimitError(f"the saved tokens reach a rotary position beyond the model's {m.max_position}")
        self.cache.check(snapshot.parts)
        tokens, offsets = list(snapshot.tokens), list(snapshot.offsets)
        self._clear()
        try:
            self.cache.load(snapshot.parts)
            self._stale, self.tokens, self.known, self._offsets = False, tokens, snapshot.known, offsets
        except BaseException:  # Ctrl-C between two groups of the cache
            self.reset()
            raise

    @contextlib.contextmanager
    def _pinned(self, run: Run, policy: Policy) -> Iterator[None]:
        """The pinned tokens in their slots for one run that forgets others."""
        past, slots = self.position, self.loaded.manifest.max_kvcache_len
        if self.policy is None:
            self.cache.pin(policy.sinks, past)
        delta = pinned_delta(past + run.rows, slots)
        oldest = delta + policy.sinks  # the token right of the pinned ones
        with self.cache.pinned_before(run.rows, delta + self._offset_at(oldest) - self._offset_at(policy.sinks)):
            yield

    def _offset_at(self, count: int) -> int:
        if self._offsets[-1][0] <= count:
            return self._offsets[-1][1]
        return next(offset for at, offset in reversed(self._offsets) if at <= count)

    def _note_offset(self, count: int, offset: int) -> None:
        if offset != self._offsets[-1][1]:
            self._offsets.append((count, offset))


def _not_finite(arrays: GraphArrays) -> str:
    """What to say of a run whose outputs hold a NaN or an infinity."""
    what, graph = "new keys or values", arrays.graph.file
    for name, file, array in arrays.ends():
        bad = int(array.size - np.isfinite(array).sum())
        if bad:
            what, graph = f"{bad} of {array.size} {name}", file
            break
    return (
        f"{what} of graph {graph} are not finite, so no token can be chosen. Either the graph overflows "
        "float16 (export the bundle in float32) or the bundle is damaged (run `rollkv verify`)"
    )
