from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_session import FakeSession
from toy_tokenizers import CHATML, CONFIG, byte_level, templated, with_byte_tokens, write

from rollkv.runtime.align import PromptError
from rollkv.runtime.chat import Chat, Reply
from rollkv.runtime.text import TextError, Tokenizer


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "bündle 1", byte_level(), **CONFIG, chat_template=CHATML)


@pytest.fixture
def tokenizer(bundle: Path) -> Tokenizer:
    return Tokenizer(bundle)


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
def test_the_next_turn_gives_the_whole_conversation_and_says_what_was_reused(
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
    assert session.calls == [(ids, {})]
    assert (reply.prompt_tokens, reply.reused_tokens) == (len(ids), len(seen))


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
    reply = chat.reply(messages)
    list(reply)
    assert 0 < reply.reused_tokens < n


def test_with_truncation_a_conversation_that_is_too_long_is_sent_whole(
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
    assert session.calls == [(ids, {"truncate": "left"})]
    assert (reply.truncated, reply.prompt_tokens) == (5, len(ids))


def test_a_span_is_passed_on_as_far_as_the_conversation_reaches(session: FakeSession, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    n = len(tokenizer.chat_ids(messages))
    for limit, span, passed in (
        (n, (1, n + 9), (1, n)),
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


@pytest.mark.parametrize("on_limit", ["roll", "sinks"])
def test_a_limit_policy_that_forgets_takes_a_conversation_longer_than_l(session: FakeSession, on_limit: str) -> None:
    session.manifest.max_lm_input_len = 10
    reply = Chat(session).reply([{"role": "user", "content": "hello"}], on_limit=on_limit)
    list(reply)
    assert reply.prompt_tokens > 10
    assert reply.truncated == 0


def test_a_reply_left_halfway_leaves_a_session_that_the_next_one_uses(
    session: FakeSession, tokenizer: Tokenizer
) -> None:
    session.answer = tokenizer.encode("the quick brown fox", special=False)
    chat = Chat(session)
    reply: Reply = chat.reply([{"role": "user", "content": "hello"}])
    assert next(reply) == "the"
    assert (reply.generated_tokens, reply.finish_reason) == (1, None)
    assert "".join(chat.reply([{"role": "user", "content": "hello"}])) == "the quick brown fox"


# Stop strings, callbacks, what a reply tells


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        (["fox"], "the quick ", "fox"),
        (["k b", "fox"], "the quic", "k b"),
        (["fox jumps"], "the quick fox", None),
        (["the quick fox!", "the"], "", "the"),
        ([], "the quick fox", None),
    ],
)
def test_an_answer_ends_before_the_first_stop_string_also_when_it_spans_tokens(
    session: FakeSession, tokenizer: Tokenizer, stop: list[str], text: str, found: str | None
) -> None:
    answer = "the quick fox" if found != "k b" else "the quick brown fox"
    session.answer, session.ends_with_eos = [i for c in answer for i in tokenizer.encode(c, special=False)], False
    for call in (Chat(session).reply, Chat(session).complete):
        prompt: Any = [{"role": "user", "content": "the fox"}] if call.__name__ == "reply" else "the fox"
        reply = call(prompt, stop=stop)
        pieces = list(reply)
        assert "".join(pieces) == text
        assert all(pieces)
        assert reply.stop_string == found
        assert reply.finish_reason == ("length" if found is None else "stop")
        ended = len(answer) if found is None else len(text) + len(found)
        assert reply.tokens == session.answer[:ended], "one token a character: no run after the stop string"
        assert reply.generated_tokens == ended


def test_a_stop_string_that_the_last_token_begins_is_given_out_at_the_end(
    session: FakeSession, tokenizer: Tokenizer
) -> None:
    session.answer = tokenizer.encode("hello how", special=False)
    reply = Chat(session).complete("x", stop=["how are"])
    assert list(reply)[-1] == "how"
    assert (reply.finish_reason, reply.stop_string) == ("stop", None)


def test_a_stop_string_can_end_in_half_a_character_that_only_the_end_gives_out(
    session: FakeSession, tokenizer: Tokenizer
) -> None:
    session.answer, session.ends_with_eos = tokenizer.encode("a龍", special=False)[:-1], False
    reply = Chat(session).complete("x", stop=["\ufffd"])
    assert reply.text() == "a"
    assert (reply.finish_reason, reply.stop_string) == ("stop", "\ufffd")


def test_wrong_stop_strings_are_refused_before_anything_runs(session: FakeSession) -> None:
    chat = Chat(session)
    with pytest.raises(TextError, match="a stop string is empty"):
        chat.complete("x", stop=["a", ""])
    with pytest.raises(TextError, match="stop is 'abc'; allowed: a sequence of strings"):
        chat.reply([{"role": "user", "content": "x"}], stop="abc")
    assert session.calls == []


def test_a_callback_gets_every_piece_and_text_is_the_whole_answer(session: FakeSession, tokenizer: Tokenizer) -> None:
    session.answer = tokenizer.encode("the quick brown fox", special=False)
    heard: list[str] = []
    reply = Chat(session).complete("x", on_text=heard.append)
    taken = [next(reply)]
    assert heard == taken, "while it runs"
    taken += list(reply)
    assert heard == taken
    assert reply.text() == "the quick brown fox"
    assert heard == taken
    reply = Chat(session).reply([{"role": "user", "content": "x"}], on_text=heard.append)
    first = next(reply)
    assert reply.text() == "the quick brown fox"
    assert heard == [*taken, first, *heard[len(taken) + 1 :]]
    assert "".join(heard) == "the quick brown fox" * 2


def test_a_reply_tells_ids_logprobs_and_speculation(session: FakeSession, tokenizer: Tokenizer) -> None:
    session.answer = tokenizer.encode("the quick brown fox", special=False)
    reply = Chat(session).complete("x", logprobs=0)
    assert (reply.tokens, reply.logprobs, reply.speculation) == ([], None, None)
    next(reply)
    assert reply.tokens == session.answer[: len(reply.tokens)]
    reply.text()
    assert reply.tokens == session.answer
    assert reply.logprobs is not None
    assert [entry.token for entry in reply.logprobs] == session.answer
    assert reply.speculation == "a report"
    reply = Chat(session).complete("x")
    reply.text()
    assert reply.logprobs is None
