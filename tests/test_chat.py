from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from toy_tokenizers import CHATML, CONFIG, byte_level, templated, with_byte_tokens, write

from rollkv.runtime.align import PromptError
from rollkv.runtime.text import Chat, Reply, TextError, Tokenizer


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "bündle 1", byte_level(), **CONFIG, chat_template=CHATML)


@pytest.fixture
def tokenizer(bundle: Path) -> Tokenizer:
    return Tokenizer(bundle)


@dataclass
class FakeGeneration:
    session: FakeSession
    answer: list[int]
    prompt_tokens: int
    truncated: int = 0
    finish_reason: str | None = None

    def __iter__(self) -> Iterator[int]:
        for index, token in enumerate(self.answer):
            if index > 0:
                self.session.tokens.append(self.answer[index - 1])
            yield token
        if self.session.ends_with_eos and self.answer:
            self.session.tokens.append(self.answer[-1])  # fed, and EOS came out
        self.finish_reason = "stop" if self.session.ends_with_eos else "length"


@dataclass
class FakeManifest:
    max_lm_input_len: int = 200
    max_kvcache_len: int = 300
    bos_token_id: int | None = 0
    eos_token_ids: list[int] = field(default_factory=lambda: [3])


@dataclass
class FakeBundle:
    path: Path


class FakeSession:
    def __init__(self, path: Path) -> None:
        self.bundle = FakeBundle(path)
        self.manifest = FakeManifest()
        self.tokens: list[int] = []
        self.answer: list[int] = []
        self.ends_with_eos = True
        self.calls: list[Any] = []

    def reset(self) -> None:
        self.calls.append("reset")
        self.tokens = []

    def generate(self, ids: Sequence[int], **options: Any) -> FakeGeneration:
        self.calls.append((list(ids), options))
        kept = list(ids)
        if options.get("truncate") == "left":
            kept = kept[-self.manifest.max_lm_input_len :]
        self.tokens += kept
        return FakeGeneration(self, self.answer, len(kept), truncated=len(ids) - len(kept))


@pytest.fixture
def session(bundle: Path) -> FakeSession:
    return FakeSession(bundle)


def test_a_reply_streams_the_text_of_the_answer_and_counts(session: FakeSession, tokenizer: Tokenizer) -> None:
    session.answer = tokenizer.encode("brown 🙂 fox", special=False)
    messages = [{"role": "user", "content": "hello"}]
    reply = Chat(session).reply(messages, max_new_tokens=9)
    assert (session.calls, reply.finish_reason, reply.truncated) == ([], None, 0)
    pieces = list(reply)
    assert "".join(pieces) == "brown 🙂 fox"
    assert len(pieces) > 2
    assert session.calls == [(tokenizer.chat_ids(messages), {"max_new_tokens": 9})]
    assert reply.finish_reason == "stop"
    assert reply.prompt_tokens == len(tokenizer.chat_ids(messages))
    assert reply.generated_tokens == len(session.answer)
    assert (reply.truncated, reply.reused_tokens) == (0, 0)
    assert list(reply) == []


@pytest.mark.parametrize("ends_with_eos", [True, False])
def test_the_next_turn_sends_only_what_the_session_has_not_seen(
    session: FakeSession, tokenizer: Tokenizer, ends_with_eos: bool
) -> None:
    chat = Chat(session)
    session.answer, session.ends_with_eos = tokenizer.encode("the quick", special=False), ends_with_eos
    messages = [{"role": "user", "content": "hello"}]
    answer = "".join(chat.reply(messages))
    seen = list(session.tokens)
    assert len(seen) == len(tokenizer.chat_ids(messages)) + len(session.answer) - (not ends_with_eos)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "stop"}]
    ids = tokenizer.chat_ids(messages)
    assert ids[: len(seen)] == seen
    session.calls.clear()
    reply = chat.reply(messages)
    assert "".join(reply) == "the quick"
    assert session.calls == [(ids[len(seen) :], {})]
    assert (reply.prompt_tokens, reply.reused_tokens) == (len(ids), len(seen))


def test_another_conversation_or_the_same_one_again_resets_the_session(session: FakeSession) -> None:
    chat = Chat(session)
    list(chat.reply([{"role": "user", "content": "the fox"}]))
    for content in ("hello", "stop", "stop"):
        session.calls.clear()
        reply = chat.reply([{"role": "user", "content": content}])
        list(reply)
        assert session.calls[0] == "reset"
        assert len(session.calls[1][0]) == reply.prompt_tokens


def test_completion_has_no_template_and_joins_the_prompt_without_losing_a_space(tmp_path: Path) -> None:
    folder = write(tmp_path, with_byte_tokens())
    session = FakeSession(folder)
    tokenizer = Tokenizer(folder)
    session.answer = tokenizer.encode("the", special=False)
    reply = Chat(session).complete("a 🙂")
    assert "".join(reply) == " the"
    assert session.calls[-1] == (tokenizer.encode("a 🙂"), {})


def test_an_empty_prompt_is_refused_and_nothing_runs(tmp_path: Path, session: FakeSession, bundle: Path) -> None:
    plain = FakeSession(write(tmp_path / "plain", with_byte_tokens()))
    with pytest.raises(TextError, match="empty prompt"):
        Chat(plain).complete("")
    templated(bundle, "{# nothing #}")
    with pytest.raises(TextError, match="empty prompt"):
        Chat(session).reply([{"role": "user", "content": "x"}])
    assert plain.calls == session.calls == []


def test_an_empty_prompt_with_a_begin_token_is_one_token(session: FakeSession) -> None:
    list(Chat(session).complete(""))
    assert session.calls[-1] == ([0], {})


def test_a_conversation_that_grew_too_long_is_refused_though_its_new_part_is_short(
    session: FakeSession, tokenizer: Tokenizer
) -> None:
    chat = Chat(session)
    messages = [{"role": "user", "content": "hello"}]
    list(chat.reply(messages))
    messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": "stop"}]
    n = len(tokenizer.chat_ids(messages))
    session.manifest.max_lm_input_len = n - 1
    calls = list(session.calls)
    with pytest.raises(TextError, match=rf"the conversation has {n} tokens; allowed: at most L = {n - 1} \(C = 300 "):
        chat.reply(messages)
    with pytest.raises(TextError, match=r"the prompt has \d+ tokens; .*--truncate left or middle, or --on-limit roll"):
        chat.complete("hello " * 200)
    assert session.calls == calls
    session.manifest.max_lm_input_len = n
    list(chat.reply(messages))
    assert len(session.calls[-1][0]) < n


def test_with_truncation_a_conversation_that_is_too_long_is_sent_whole_to_a_reset_session(
    session: FakeSession, tokenizer: Tokenizer
) -> None:
    chat = Chat(session)
    messages = [{"role": "user", "content": "hello"}]
    list(chat.reply(messages))
    messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": "stop"}]
    ids = tokenizer.chat_ids(messages)
    assert ids[: len(session.tokens)] == session.tokens
    session.manifest.max_lm_input_len = len(ids) - 5
    session.calls.clear()
    reply = chat.reply(messages, truncate="left")
    list(reply)
    assert session.calls == ["reset", (ids, {"truncate": "left"})]
    assert (reply.truncated, reply.prompt_tokens) == (5, len(ids))


def test_a_span_is_passed_on_once_something_is_cut_as_far_as_the_prompt_reaches(
    session: FakeSession, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    n = len(tokenizer.chat_ids(messages))
    for limit, span, passed in (
        (n, (1, n + 9), None),
        (n - 2, (1, n + 9), (1, n)),
        (n - 2, (1, n - 3), (1, n - 3)),
        (n - 2, (n, n + 9), None),
    ):
        session.manifest.max_lm_input_len = limit
        list(Chat(session).reply(messages, truncate="left", protect=span))
        assert session.calls[-1][1]["protect"] == passed


def test_a_wrong_span_is_refused_before_anything_runs(session: FakeSession, tokenizer: Tokenizer) -> None:
    chat, messages = Chat(session), [{"role": "user", "content": "hello"}]
    for span, said in (((1,), r"protect is \(1,\), allowed"), ((2, 2), "protect is 2:2, allowed: start:stop")):
        with pytest.raises(PromptError, match=said):
            chat.reply(messages, truncate="left", protect=span)
    with pytest.raises(PromptError, match="protect goes with truncation left or middle; without one, on_limit roll"):
        chat.reply(messages, protect=(1, 3), on_limit="roll")
    n = len(tokenizer.encode("hello"))
    with pytest.raises(PromptError, match=f"protect is 0:{n + 1}, the prompt has {n} tokens"):
        chat.complete("hello", truncate="left", protect=(0, n + 1))
    assert session.calls == []


def test_a_limit_policy_that_forgets_goes_on_where_the_session_is(session: FakeSession) -> None:
    chat = Chat(session)
    messages = [{"role": "user", "content": "hello"}]
    list(chat.reply(messages, on_limit="roll"))
    session.manifest.max_lm_input_len = 10
    session.calls.clear()
    list(chat.reply([*messages, {"role": "user", "content": "stop"}], on_limit="roll"))
    assert session.calls[0] == "reset", "the assistant's header stood where the next message is now"
    session.calls.clear()
    session.tokens = session.tokens[:20]
    list(chat.reply([*messages, {"role": "user", "content": "stop"}], on_limit="sinks"))
    assert len(session.calls) == 1


def test_a_reply_left_halfway_leaves_a_session_that_the_next_one_continues_or_resets(
    session: FakeSession, tokenizer: Tokenizer
) -> None:
    session.answer = tokenizer.encode("the quick brown fox", special=False)
    chat = Chat(session)
    reply: Reply = chat.reply([{"role": "user", "content": "hello"}])
    assert next(reply) == "the"
    assert (reply.generated_tokens, reply.finish_reason) == (1, None)
    assert "".join(chat.reply([{"role": "user", "content": "hello"}])) == "the quick brown fox"
