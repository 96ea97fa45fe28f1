"""Token after token: one generation of a session, plain or with drafted tokens.

Knows ids and logits. What runs is the session's; what is drafted comes from a `Drafter`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from rollkv.runtime.align import PromptError, whole_number
from rollkv.runtime.backend import Array
from rollkv.runtime.cover import Run
from rollkv.runtime.limits import DEFAULT_NEW_TOKENS
from rollkv.runtime.prompt import Prompt
from rollkv.runtime.sampling import Sampler, SamplingOptions, TokenLogprobs, token_logprobs
from rollkv.runtime.speculation import SpeculationReport

if TYPE_CHECKING:
    from rollkv.runtime.sequence import Admitted
    from rollkv.runtime.session import Session
    from rollkv.runtime.speculation import Drafter

ONE = Run(1, 0)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What `Session.generate` was asked for, checked. Raises PromptError."""

    max_new_tokens: int | None = None  # None: DEFAULT_NEW_TOKENS
    min_new_tokens: int = 0  # no EOS before
    sampling: SamplingOptions
    logprobs: int | None = None  # best tokens to note at each step; None: no log-probabilities
    speculate: Drafter | None = None
    on_token: Callable[[int], None] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, SamplingOptions):
            raise PromptError(f"sampling is {self.sampling!r}, allowed: SamplingOptions")
        if self.on_token is not None and not callable(self.on_token):
            raise PromptError(f"on_token is {self.on_token!r}, allowed: a function of an id")
        if self.max_new_tokens is not None and whole_number("max_new_tokens", self.max_new_tokens) < 1:
            raise PromptError(f"max_new_tokens is {self.max_new_tokens}, must be at least 1")
        most = DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens
        if not 0 <= whole_number("min_new_tokens", self.min_new_tokens) <= most:
            raise PromptError(f"min_new_tokens is {self.min_new_tokens}, allowed: 0 .. {most}, max_new_tokens")
        if self.logprobs is not None and whole_number("logprobs", self.logprobs) < 0:
            raise PromptError(f"logprobs is {self.logprobs}, must be at least 0")


@dataclass(frozen=True)
class Picked:
    """A chosen token, or the end by an EOS id."""

    token: int
    ends: bool
    logprobs: TokenLogprobs | None


class Generation(Iterator[int]):
    """Iterates over the ids that a model generates after a prompt.

    Ends with `finish_reason` "stop" at an EOS id (which is not given out), or "length" at max_new_tokens, at the
    end of the cache under on_limit "stop", or at the model's last position. The last id was never fed back.
    An exception ends it too, of on_token as well, with "error". Raises PromptError when the session went on without it.

    With a drafter several tokens may go through one run of a graph that gives the logits of every row: the last token
    and the drafted ones. Each row chooses its token as a decode step would, with the same sampler in the same order;
    drafted tokens count as long as they are what was chosen. So the tokens are those of plain decoding, but where the
    graphs' rounding decides between two logits. Such a run is used only while P + c <= C. Tokens that were found and
    not given out yet are no part of `Session.tokens`.
    """

    def __init__(self, session: Session, admitted: Admitted, options: GenerationOptions) -> None:
        self.finish_reason: str | None = None
        self.reused_tokens = admitted.start if admitted.reuse else 0
        self.prompt_tokens = len(admitted.prompt) + self.reused_tokens
        self.truncated = admitted.cut
        self.generated: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if options.logprobs is None else []
        self.speculation = None if options.speculate is None else SpeculationReport()
        self._session, self._admitted, self._options = session, admitted, options
        self._sampler = Sampler(options.sampling)
        self._at = session.position  # P when the next id is asked for
        self._changes = session.sequence.changes
        self._max = DEFAULT_NEW_TOKENS if options.max_new_tokens is None else options.max_new_tokens
        self._eos = frozenset(session.manifest.eos_token_ids)
        self._found: deque[Picked] = deque()  # by a speculative run, not given out yet

    def __next__(self) -> int:
        token = None
        with self._session.lock:
            if self.finish_reason is None:
                try:
                    token = self._next()
                    if token is not None and self._options.on_token is not None:
                        self._options.on_token(token)
                except BaseException:
                    self.finish_reason = "error"
                    raise
        if token is None:
            raise StopIteration
        return token

    def _next(self) -> int | None:
        """The next id, or None when `finish_reason` is set."""
        session, policy = self._session, self._admitted.policy
        if len(self.generated) >= self._max:
            self.finish_reason = "length"
            return None
        if session.sequence.changes != self._changes:
            raise PromptError(
                f"the session is at token {session.position}, this generation continues at {self._at}: "
                "it was reset, went back or took other tokens since; start a new generation"
            )
        if self.generated and session.sequence.room(policy.on_limit) < 1:
            self.finish_reason = "length"
            return None
        if self._found and session.sequence.ahead:
            session.sequence.ahead -= 1
        elif self._found:  # the session took back what ran ahead
            session.sequence.step(
                session.sequence.arrays(session.loaded.decode), ONE, Prompt(self.generated[-1:]), policy
            )
        elif self.generated:
            self._step()
        else:
            self._found.append(self._pick(session.take(self._admitted), 0))
        picked = self._found.popleft()
        self._at, self._changes = session.sequence.position, session.sequence.changes
        if picked.ends:
            self.finish_reason = "stop"
            return None
        self.generated.append(picked.token)
        if self.logprobs is not None and picked.logprobs is not None:
            self.logprobs.append(picked.logprobs)
        return picked.token

    def _step(self) -> None:
        """Take the last token, and drafted ones where there are any; what is chosen after them goes to `_found`."""
        sequence, policy, started = self._session.sequence, self._admitted.policy, time.perf_counter()
        last, report = self.generated[-1:], self.speculation
        drafted = self._drafted() if report is not None else []
        drafting = time.perf_counter() - started
        if not drafted:
            arrays = sequence.step(sequence.arrays(self._session.loaded.decode), ONE, Prompt(last), policy)
            self._found.append(self._pick(arrays.logits, 0))
            if report is not None:
                report.run_seconds += drafting
                report.step_seconds += time.perf_counter() - started - drafting
                report.steps, report.tokens = report.steps + 1, report.tokens + 1
            return
        assert report is not None
        graph, prompt = self._session.loaded.verifier, Prompt(last + drafted)
        assert graph is not None
        run = Run(graph.rows, graph.rows - len(prompt))
        found: list[Picked] = []

        def accept(rows: Array) -> int:
            """How many of the run's tokens stay: each but the first only if the row before chose it."""
            for row in range(len(prompt)):
                found.append(self._pick(rows[run.pads + row], row, prompt.ids[: row + 1]))
                if found[-1].ends or row == len(drafted) or found[-1].token != drafted[row]:
                    break
            return len(found)

        sequence.step(sequence.arrays(graph), run, prompt, policy, accept=accept)
        self._found.extend(found)
        report.runs, report.run_seconds = report.runs + 1, report.run_seconds + time.perf_counter() - started
        report.drafted, report.accepted = report.drafted + len(drafted), report.accepted + len(found) - 1
        report.tokens += len(found)

    def _drafted(self) -> list[int]:
        """Ids that may follow the last token, as many as one run can check and the generation can use."""
        session, drafter = self._session, self._options.speculate
        assert drafter is not None
        m, past = session.manifest, session.position
        assert session.loaded.verifier is not None
        rows = session.loaded.verifier.rows
        room = session.sequence.room(self._admitted.policy.on_limit)
        count = min(rows - 1, self._max - len(self.generated) - 1, room - 1)
        if count < 1 or past + rows > m.max_kvcache_len:
            return []
        drafted = drafter.propose([*session.sequence.tokens, self.generated[-1]], count)
        if session.sequence.changes != self._changes:
            raise PromptError("the drafter used the session that it drafts for; give it a session of its own")
        try:
            ids = [whole_number("a drafted token", token) for token in drafted[:count]]
        except TypeError:
            raise PromptError(f"the drafter gave {type(drafted).__name__}, allowed: a list of ids") from None
        return list(takewhile(lambda token: 0 <= token < m.vocab_size, ids))

    def _pick(self, logits: Array, ahead: int, fed: list[int] | None = None) -> Picked:
        """The token that a row chooses. ahead: tokens of this run before it; fed: the run's tokens up to it.

        In a plain step the session has taken them already.
        """
        options, sequence = self._options, self._session.sequence
        seen = sequence.tokens
        if fed is not None and options.sampling.repetition_penalty != 1:
            seen = seen + fed
        early = len(self.generated) + ahead < options.min_new_tokens
        token = self._sampler.pick(logits, seen, self._eos if early else (), checked=True)
        ends = token in self._eos and not options.ignore_eos
        noted = None if options.logprobs is None else token_logprobs(logits, token, options.logprobs)
        return Picked(token, ends, noted)
