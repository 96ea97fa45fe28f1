"""A session without a model, which answers what it is told and keeps every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollkv.runtime.sampling import TokenLogprobs


@dataclass
class FakeGeneration:
    session: FakeSession
    answer: list[int]
    reused_tokens: int
    truncated: int
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None = None
    speculation: Any = "a report"

    def __iter__(self) -> Iterator[int]:
        for index, token in enumerate(self.answer):
            if index > 0:
                self.session.tokens.append(self.answer[index - 1])
            if self.logprobs is not None:
                self.logprobs.append(TokenLogprobs(token, -0.5, ((token, -0.5), (7, -1.25))))
            yield token
        if self.session.ends_with_eos and self.answer:
            self.session.tokens.append(self.answer[-1])  # fed, and EOS came out
        self.finish_reason = "stop" if self.session.ends_with_eos else "length"


@dataclass
class FakeManifest:
    max_lm_input_len: int = 200
    max_kvcache_len: int = 300
    vocab_size: int = 320
    bos_token_id: int | None = 0
    eos_token_ids: list[int] = field(default_factory=lambda: [3])


@dataclass
class FakeBundle:
    path: Path


class FakeSession:
    """Keeps the common prefix of what went through and the whole ids, as a session does with `reuse`."""

    def __init__(self, path: Path) -> None:
        self.bundle = FakeBundle(path)
        self.manifest = FakeManifest()
        self.tokens: list[int] = []
        self.answer: list[int] = []
        self.ends_with_eos = True
        self.calls: list[Any] = []

    def generate(self, ids: Sequence[int], *, reuse: bool = False, **options: Any) -> FakeGeneration:
        assert reuse
        self.calls.append((list(ids), options))
        kept = list(ids)
        if options.get("truncate") == "left":
            kept = kept[-self.manifest.max_lm_input_len :]
        pairs = zip(self.tokens, kept[:-1], strict=False)
        same = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(self.tokens), len(kept) - 1))
        self.tokens = kept
        logprobs: list[TokenLogprobs] | None = None if options.get("logprobs") is None else []
        return FakeGeneration(self, self.answer, same, len(ids) - len(kept), logprobs)
