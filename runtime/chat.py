"""Text in, text out, over a session of token ids: chat, answers in pieces, stop strings.

Knows no graph, no cache and no sampling; of a session only what `TokenSession` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollkv.runtime.align import check_protect
from rollkv.runtime.limits import DEFAULT_SINKS
from rollkv.runtime.sampling import SamplingOptions, TokenLogprobs
from rollkv.runtime.stop import StopText, check_stop
from rollkv.runtime.template import TextError
from rollkv.runtime.text import TextStream, Tokenizer

if TYPE_CHECKING:
    from rollkv.runtime.speculation import Drafter, SpeculationReport

__all__ = ["Chat", "Reply", "TokenSession"]


class _Bundle(Protocol):
    @property
    def path(self) -> Path: ...


class _Manifest(Protocol):
    @property
    def max_lm_input_len(self) -> int: ...
    @property
    def max_kvcache_len(self) -> int: ...


class _Generation(Protocol):
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def reused_tokens(self) -> int: ...
    @property
    def truncated(self) -> int: ...
    @property
    def logprobs(self) -> list[TokenLogprobs] | None: ...
    @property
    def speculation(self) -> SpeculationReport | None: ...
    def __iter__(self) -> Iterator[int]: ...


class TokenSession(Protocol):
    """What `Chat` needs of a session: token ids in, token ids out."""

    @property
    def bundle(self) -> _Bundle:
        """Where the tokenizer's files lie."""
        ...

    @property
    def manifest(self) -> _Manifest:
        """The limits L and C."""
        ...

    def generate(
        self,
        ids: Sequence[int],
        *,
        reuse: bool = False,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        sampling: SamplingOptions | None = None,
        logprobs: int | None = None,
        speculate: Drafter | None = None,
        truncate: str = "none",
        keep_head: int | None = None,
        protect: tuple[int, int] | None = None,
        on_limit: str = "stop",
        sinks: int = DEFAULT_SINKS,
    ) -> _Generation:
        """With `reuse`, ids are the whole sequence, and what of it went through already is not run again.

        The result yields the generated ids, EOS left out.
        """
        ...


class Reply(Iterator[str]):
    """One answer. The model runs while its pieces are taken; an iterator, so they can be taken once.

    The answer ends before the first stop string in it. Text that may be the beginning of one waits until that is
    decided. The ids of a stop string were generated, so they count and are among `tokens`.
    """

    def __init__(
        self,
        session: TokenSession,
        ids: Sequence[int],
        stream: TextStream,
        options: Mapping[str, Any],
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self.prompt_tokens = len(ids)  # of the whole prompt or conversation, before any truncation
        self._tokens: list[int] = []
        self._generation: _Generation | None = None
        self._stop, self._on_text = StopText(stop), on_text
        self._given: list[str] = []
        self._pieces = self._run(session, ids, stream, options)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: "stop" (EOS or a stop string) or "length"; None until then, "error" after an exception."""
        if self.stop_string is not None:
            return "stop"
        return None if self._generation is None else self._generation.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None for any other end."""
        return self._stop.found

    @property
    def reused_tokens(self) -> int:
        """How many prompt tokens had gone through the session before; 0 until the first piece is taken."""
        return 0 if self._generation is None else self._generation.reused_tokens

    @property
    def truncated(self) -> int:
        """How many prompt tokens were cut; 0 until the first piece is taken."""
        return 0 if self._generation is None else self._generation.truncated

    @property
    def tokens(self) -> list[int]:
        """The ids generated so far, EOS left out."""
        return list(self._tokens)

    @property
    def generated_tokens(self) -> int:
        """How many those are."""
        return len(self._tokens)

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One for each of `tokens`, if they were asked for."""
        known = None if self._generation is None else self._generation.logprobs
        return None if known is None else known[: len(self._tokens)]

    @property
    def speculation(self) -> SpeculationReport | None:
        """What speculative decoding did, if it was asked for."""
        return None if self._generation is None else self._generation.speculation

    def text(self) -> str:
        """Run to the end; the whole answer, with the pieces that were taken before."""
        for _ in self:
            pass
        return "".join(self._given)

    def __next__(self) -> str:
        piece = next(self._pieces)
        self._given.append(piece)
        if self._on_text is not None:
            self._on_text(piece)
        return piece

    def _run(
        self, session: TokenSession, ids: Sequence[int], stream: TextStream, options: Mapping[str, Any]
    ) -> Iterator[str]:
        stop = self._stop
        self._generation = session.generate(ids, reuse=True, **options)
        for token in self._generation:
            self._tokens.append(token)
            if piece := stop.push(stream.push(token)):
                yield piece
            if stop.found is not None:
                return
        if piece := stop.push(stream.flush()):
            yield piece
        if stop.found is None and (piece := stop.flush()):
            yield piece


class Chat:
    """Text in, text out, over a session of token ids.

    Every call gives the whole conversation or prompt; the session matches it with what went through already, and runs
    the rest. (The last token of an answer was never fed back, so it is part of the rest.)

    Of the arguments, `stop` holds strings before the first of which the answer ends (the prompt is not searched),
    `on_text` is called with each piece as it is taken, and `options` are those of the session's `generate`; a span in
    `protect` counts tokens of the whole conversation or prompt. A conversation may be shorter than the span: what it
    has not reached is not protected yet.
    """

    def __init__(self, session: TokenSession) -> None:
        self.session = session
        self.tokenizer = Tokenizer(session.bundle.path)

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Reply:
        """The assistant's next answer to `messages`, each with a role and a content.

        Raises `TextError` at once, before anything runs: as `Tokenizer.render` does, for an empty prompt or stop
        string, and for a conversation longer than L when neither a truncation nor a limit policy that forgets is
        chosen. Raises `PromptError` at once as `align.check_protect` does; the first piece raises as the session's
        `generate`.
        """
        stop = check_stop(stop)
        ids = self.tokenizer.chat_ids(messages)
        options = self._checked("the conversation", ids, options, grows=True)
        return Reply(self.session, ids, self.tokenizer.stream(), options, stop, on_text)

    def complete(
        self,
        prompt: str,
        *,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Reply:
        """What follows `prompt`, without a chat template: prompt and pieces joined are one text.

        Raises as `reply`, and `PromptError` for a protected span that does not lie in the prompt.
        """
        stop = check_stop(stop)
        ids = self.tokenizer.encode(prompt)
        options = self._checked("the prompt", ids, options, grows=False)
        return Reply(self.session, ids, self.tokenizer.stream(context=ids), options, stop, on_text)

    def _checked(self, what: str, ids: list[int], options: dict[str, Any], grows: bool) -> dict[str, Any]:
        n = len(ids)
        if not n:
            raise TextError("empty prompt: it has no tokens; allowed: at least one")
        limit, slots = self.session.manifest.max_lm_input_len, self.session.manifest.max_kvcache_len
        how, on_limit = options.get("truncate", "none"), options.get("on_limit", "stop")
        if n > limit and how == "none" and on_limit == "stop":
            raise TextError(
                f"{what} has {n} tokens; allowed: at most L = {limit} (C = {slots} cache slots), "
                "unless --truncate left or middle, or --on-limit roll or sinks, is given"
            )
        if options.get("protect") is None:
            return options
        start, stop = check_protect(options["protect"], how, on_limit, None if grows else n)
        return {**options, "protect": (start, min(stop, n)) if start < n else None}
