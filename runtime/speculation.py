"""Who guesses the next tokens for speculative decoding, and the account of how it went.

A drafter only guesses: what it proposes is verified by the graph, so a wrong guess costs time and never a token. Knows
no graph; of a session it knows what `DraftSession` says.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.align import LimitError, PromptError, common_length
from rollkv.runtime.backend import BackendError
from rollkv.runtime.manifest import Manifest
from rollkv.runtime.sampling import NonFiniteLogits

_TAIL = 32  # tokens that must be as before for the sequence to count as the same one, grown


class SpeculationError(ValueError):
    """A drafter that cannot work as asked, or not for this bundle."""

    exit_code = 2


class Drafter(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` ids that are likely to follow `tokens` (-1: came as an embedding); empty: no guess."""
        ...


class PromptLookup:
    """Proposes what followed the last time that the sequence's last tokens stood in it.

    Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; `prompt_lookup_num_tokens` of
    transformers): good where the answer repeats the prompt, as edits and summaries do. It keeps an index of the
    sequence that it saw last, so that a call after one more token costs the same however long the sequence is.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        """The last max_ngram tokens are looked for first, then fewer, down to min_ngram.

        Raises SpeculationError unless 1 <= min_ngram <= max_ngram.
        """
        if not (type(max_ngram) is int and type(min_ngram) is int and 1 <= min_ngram <= max_ngram):
            raise SpeculationError(
                f"min_ngram is {min_ngram!r} and max_ngram {max_ngram!r}, must be whole numbers with "
                "1 <= min_ngram <= max_ngram"
            )
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []  # what is indexed
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> where it last ended and something followed
        # of each end 1, 2, ..: what `_latest` held before of the n-grams that end there, to take them out again
        self._before: list[list[tuple[tuple[int, ...], int | None]]] = []

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` ids that followed the latest earlier occurrence, none beyond the end of `tokens`.

        An embedding (-1) is neither looked for nor proposed.
        """
        self._follow(tokens)
        end = len(self._tokens)
        if count < 1:
            return []
        for n in self._sizes:
            at = self._latest.get(tuple(self._tokens[-n:])) if n <= end else None
            if at is not None:
                found = self._tokens[at : at + count]
                return found[: found.index(-1)] if -1 in found else found
        return []

    def _follow(self, tokens: Sequence[int]) -> None:
        """Bring the index from the tokens that it has to `tokens`.

        Where the last of the indexed tokens are still in place, those before them are taken to be so too.
        """
        known = len(self._tokens)
        tail = max(0, known - _TAIL)
        if len(tokens) < known or list(tokens[tail:known]) != self._tokens[tail:]:
            known = common_length(list(tokens), self._tokens)
            while len(self._before) >= max(known, 1):
                for gram, at in self._before.pop():
                    if at is None:
                        del self._latest[gram]
                    else:
                        self._latest[gram] = at
            del self._tokens[known:]
        self._tokens += tokens[known:]
        for end in range(len(self._before) + 1, len(self._tokens)):
            before = []
            if self._tokens[end] != -1:
                for n in self._sizes:
                    gram = tuple(self._tokens[end - n : end]) if n <= end else (-1,)
                    if -1 not in gram:
                        before.append((gram, self._latest.get(gram)))
                        self._latest[gram] = end
            self._before.append(before)


class DraftSession(Protocol):
    """What a draft model needs of a `Session`."""

    @property
    def manifest(self) -> Manifest:
        """The draft bundle's."""
        ...

    @property
    def tokens(self) -> list[int]:
        """What went through."""
        ...

    def reset(self) -> None:
        """Forget every token."""
        ...

    def rewind(self, position: int, /) -> None:
        """Go back to the first `position` tokens; LimitError where that is not possible."""
        ...

    def prefill(self, ids: Sequence[int], /) -> NDArray[Any]:
        """Logits (V,) after these tokens, which go on after `tokens`."""
        ...

    def decode(self, token: int, /) -> NDArray[Any]:
        """Logits (V,) after one more token."""
        ...

    def room(self) -> int:
        """How many tokens can still be fed."""
        ...


class DraftModel:
    """Drafts greedily with a smaller bundle that shares the tokenizer. Its session is used for nothing else."""

    def __init__(self, session: DraftSession, target_manifest: Manifest | None = None) -> None:
        """target_manifest: of the bundle that it drafts for; if given, `check` is called with it."""
        self._session = session
        self._failed = False  # and that was said
        if target_manifest is not None:
            self.check(target_manifest)

    def check(self, target: Manifest) -> None:
        """Raise SpeculationError unless the draft's ids mean the same as the target's.

        Both must have as many ids, and the same tokenizer.json where both have one.
        """
        draft = self._session.manifest
        names = f"the draft {draft.source.id}", f"the target {target.source.id}"
        if draft.vocab_size != target.vocab_size:
            raise SpeculationError(
                f"{names[0]} has {draft.vocab_size} ids, {names[1]} has {target.vocab_size}; both must have the same"
            )
        files = draft.files.get("tokenizer.json"), target.files.get("tokenizer.json")
        if files[0] is not None and files[1] is not None and files[0].sha256 != files[1].sha256:
            raise SpeculationError(
                f"{names[0]} has another tokenizer.json (sha256 {files[0].sha256[:12]}) than {names[1]} "
                f"({files[1].sha256[:12]}); they must share a tokenizer"
            )

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` ids, each the draft's best after those before; fewer where its cache ends.

        What fails in its engine, or is not finite, ends a guess and is warned of once.
        Empty where `tokens` holds an embedding (-1) or is longer than the draft bundle takes (its L, C, max_position).
        """
        session = self._session
        most = min(session.manifest.max_kvcache_len, session.manifest.max_position)
        if count < 1 or not 0 < len(tokens) <= most or -1 in tokens:
            return []
        # Not `prefill(reuse=True)`, which holds the whole sequence to L: a sequence grows beyond it, up to C.
        there, end = session.tokens, len(tokens) - 1
        same = common_length(there[:end], list(tokens[:end]))
        try:
            session.rewind(same)
        except (LimitError, PromptError):  # what it forgot, or that another thread changed
            session.reset()
            same = 0
        drafted: list[int] = []
        try:
            drafted.append(int(np.argmax(session.prefill(tokens[same:]))))
            while len(drafted) < count and session.room() >= 1:
                drafted.append(int(np.argmax(session.decode(drafted[-1]))))
        except (LimitError, PromptError):  # of its L
            pass
        except (BackendError, NonFiniteLogits) as error:
            if not self._failed:
                warnings.warn(f"the draft {session.manifest.source.id} cannot guess: {error}", stacklevel=2)
            self._failed = True
        return drafted


def check_drafter(drafter: Drafter, session: object, target: Manifest, verifies: bool) -> None:
    """Raise PromptError or SpeculationError unless `drafter` can draft for a session of the bundle `target`.

    verifies: whether the bundle has a graph that gives the logits of every row.
    """
    if not verifies:
        raise PromptError(
            "this bundle has no graph that gives the logits of every row, which speculation needs; export it with "
            "--speculate 8"
        )
    if not callable(getattr(drafter, "propose", None)):
        raise PromptError(f"speculate is {drafter!r}, allowed: a drafter, such as PromptLookup()")
    if isinstance(drafter, DraftModel):
        if drafter._session is session:
            raise PromptError("the drafter uses the session that it drafts for; give it a session of its own")
        drafter.check(target)


@dataclass
class SpeculationReport:
    """What speculation did in one generation. The token that the prompt's own logits give counts nowhere."""

    drafted: int = 0  # ids that were proposed and run
    accepted: int = 0  # of these, how many were what plain decoding gives
    runs: int = 0  # runs that verified a draft
    steps: int = 0  # plain decode steps, where there was no draft or no room for a run
    tokens: int = 0  # that runs and steps gave
    run_seconds: float = 0.0  # of all runs, with the drafting, also that of drafts that were empty
    step_seconds: float = 0.0  # of all steps

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted ids that were accepted; None: none was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_run(self) -> float | None:
        """Tokens that a run gave on average (a step gives one); None: there was no run."""
        return (self.tokens - self.steps) / self.runs if self.runs else None

    @property
    def speed_up(self) -> float | None:
        """How many times longer `tokens` plain steps would have taken, each the mean of the measured ones.

        None: no plain step was measured.
        """
        total = self.run_seconds + self.step_seconds
        if not self.steps or self.step_seconds <= 0:
            return None
        return self.step_seconds / self.steps * self.tokens / total

    def summary(self) -> str:
        """One line for people."""
        if self.acceptance is None or self.tokens_per_run is None:
            return f"nothing drafted; {_count(self.steps, 'plain step')}"
        parts = [
            f"drafted {_count(self.drafted, 'token')}, {self.accepted} accepted ({100 * self.acceptance:.0f} %)",
            f"{_count(self.runs, 'run')} gave {self.tokens_per_run:.1f} tokens each",
        ]
        if self.speed_up is not None:
            parts.append(f"about {self.speed_up:.1f} times as fast as plain decoding")
        return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
