from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from toy_tokenizers import CHATML, CONFIG, SPECIAL, byte_level, metaspace, with_byte_tokens, write

from rollkv.runtime.text import TextError, TextStream, Tokenizer


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "bündle 1", byte_level(), **CONFIG, chat_template=CHATML)


@pytest.fixture
def tokenizer(bundle: Path) -> Tokenizer:
    return Tokenizer(bundle)


# Tokenizer


def test_encoding_adds_what_the_post_processor_says_unless_told_otherwise(tokenizer: Tokenizer) -> None:
    bare = tokenizer.encode("hello 🙂", special=False)
    assert tokenizer.encode("hello 🙂") == [0, *bare]
    assert tokenizer.decode([0, *bare, 1]) == "hello 🙂"
    assert tokenizer.encode("") == [0]


def test_padding_and_truncation_left_in_the_tokenizer_file_have_no_effect(tmp_path: Path) -> None:
    source = byte_level()
    source.enable_padding(length=64)
    source.enable_truncation(max_length=4)
    text = "the quick brown fox don't stop"
    assert Tokenizer(write(tmp_path, source)).encode(text) == byte_level().encode(text).ids


def test_a_bundle_without_a_tokenizer_says_that_ids_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"has no tokenizer\.json, .*token ids can be given instead") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", r"tokenizer\.json is not a tokenizer that tokenizers \d"),
        ("tokenizer.json", b"\xff", r"tokenizer\.json is not a tokenizer that tokenizers \d"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", b'"\xff"', r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json holds a list; allowed: a JSON object"),
        ("tokenizer_config.json", b'{"bos_token": 3}', r"bos_token is 3; allowed: a string or null"),
    ],
)
def test_a_damaged_file_is_named(bundle: Path, name: str, content: bytes, message: str) -> None:
    (bundle / name).write_bytes(content)
    with pytest.raises(TextError, match=message):
        Tokenizer(bundle)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            b"ab\xff".decode("utf-8", "surrogateescape"),
            "the prompt holds byte 0xff at position 2; allowed: valid UTF-8",
        ),
        ("\ud83d", r"the prompt holds the lone surrogate U\+D83D at position 0; allowed: valid UTF-8"),
    ],
)
def test_a_prompt_that_is_not_utf8_is_refused_with_the_position(
    tokenizer: Tokenizer, prompt: str, message: str
) -> None:
    with pytest.raises(TextError, match=message):
        tokenizer.encode(prompt)


# Streaming


def streamed(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    stream = tokenizer.stream(context)
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_random_ids_stream_to_what_they_decode_to(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(400):
        ids = [rng.randrange(325) for _ in range(rng.randrange(60))]  # ids beyond the vocabulary too
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_random_high_bytes_stream_to_what_they_decode_to(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    ids = tokenizer.encode("ÿ🙂你é", special=False)
    single = [i for i in range(len(SPECIAL), 261) if tokenizer.decode([i]) == "\ufffd"]
    for _ in range(200):
        mixed = [rng.choice(rng.choice([single, ids])) for _ in range(rng.randrange(120))]
        assert "".join(streamed(tokenizer, mixed)) == tokenizer.decode(mixed)


@pytest.mark.parametrize("make", [with_byte_tokens, metaspace])
def test_sentencepiece_ids_stream_to_what_they_decode_to(tmp_path: Path, make: Any) -> None:
    tokenizer = Tokenizer(write(tmp_path, make()))
    rng = random.Random(2)
    words = ["  ", " ", "a", "the", "b c", "   a"] + (["🙂", "é你", "ü"] if make is with_byte_tokens else [])
    for _ in range(400):
        ids: list[int] = []
        for _ in range(rng.randrange(12)):
            ids += tokenizer.encode(rng.choice(words), special=False)
            ids += [rng.randrange(3)] * rng.randrange(2)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [byte_level, with_byte_tokens])
def test_a_character_comes_out_whole_with_its_last_byte(tmp_path: Path, make: Any) -> None:
    tokenizer = Tokenizer(write(tmp_path, make()))
    text = "a🙃b龍🚀🚀"
    pieces = streamed(tokenizer, tokenizer.encode(text, special=False))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[-1] == "", "nothing was left for flush"
    assert max(map(len, pieces)) <= 2


def test_an_incomplete_character_waits_until_flush(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a龍", special=False)[:-1]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == "\ufffd"


def test_special_tokens_and_unknown_ids_give_no_text(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello", special=False)
    assert "".join(streamed(tokenizer, [0, 2, *hello, 10_000, -1, 3])) == "hello"


def test_the_space_between_words_survives_and_the_first_one_depends_on_the_context(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, with_byte_tokens()))
    a, t, s = (tokenizer.encode(text, special=False) for text in ("a", "t", ""))
    assert s == []
    assert streamed(tokenizer, a + t + a) == ["a", " t", " a", ""]
    assert streamed(tokenizer, t, context=[1, *a]) == [" t", ""]


def test_whole_characters_of_a_byte_run_stay_when_the_run_breaks_later(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, with_byte_tokens()))
    smile = tokenizer.encode("🙂", special=False)[1:]
    broken = [*smile, 3 + 0xFF, *tokenizer.encode("a", special=False)]
    assert "".join(streamed(tokenizer, broken)).startswith("🙂\ufffd")
    assert tokenizer.decode(broken) == "\ufffd" * 5 + " a"


def test_streaming_decodes_a_bounded_window_per_token(tokenizer: Tokenizer) -> None:
    good = tokenizer.encode("the quick 🙂 brown 你好 fox " * 100, special=False)
    stray = [i for i in range(len(SPECIAL), 261) if tokenizer.decode([i]) == "\ufffd"][:1] * 2000
    for ids in (good, stray):
        lengths: list[int] = []

        def decode(window: Sequence[int], lengths: list[int] = lengths) -> str:
            lengths.append(len(window))
            return tokenizer.decode(window)

        stream = TextStream(decode, lambda token: token > 4)
        text = "".join([stream.push(token) for token in ids] + [stream.flush()])
        assert text == tokenizer.decode(ids)
        assert max(lengths) <= 40
        assert sum(lengths) <= 40 * len(ids)


def test_text_works_offline_and_imports_neither_torch_nor_transformers(bundle: Path) -> None:
    script = (
        "import sys, socket, pathlib\n"
        "for name in ('torch', 'transformers', 'onnx', 'onnxruntime'): sys.modules[name] = None\n"
        "def refuse(*a, **k): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        "import rollkv.runtime.text as text\n"
        "assert 'tokenizers' not in sys.modules and 'jinja2' not in sys.modules\n"
        "t = text.Tokenizer(pathlib.Path(sys.argv[1]))\n"
        "assert 'jinja2' not in sys.modules\n"
        "assert t.chat_ids([{'role': 'user', 'content': 'hello'}])\n"
    )
    subprocess.run([sys.executable, "-c", script, str(bundle)], check=True, timeout=60)


def test_a_bundle_folder_can_be_a_symlink_and_moved(bundle: Path, tmp_path: Path) -> None:
    want = Tokenizer(bundle).chat_ids([{"role": "user", "content": "x"}])
    moved = tmp_path / "moved"
    shutil.move(bundle, moved)
    (tmp_path / "link").symlink_to(moved)
    assert Tokenizer(str(tmp_path / "link")).chat_ids([{"role": "user", "content": "x"}]) == want
