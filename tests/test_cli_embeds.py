"""The commands on a bundle of the toy model whose tokens are looked up on the host; its words are numbers."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Run, user_error
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers
from toy_embeds import embeds_manifest, save_bundle
from toy_model import ToyBackend, V, whole_pass

from rollkv.runtime.bundle import Bundle

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """L = 12, C = 24; ids and words are the same numbers."""
    folder = tmp_path / "b"
    folder.mkdir()
    tokenizer = HfTokenizer(models.WordLevel({str(i): i for i in range(V)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    monkeypatch.setattr("rollkv.runtime.loaded.OrtBackend", lambda bundle, *_, **__: ToyBackend(bundle))
    return save_bundle(folder, embeds_manifest(c=4, L=12, per_layer=True, shared=True, window=5))


def words(ids: Any) -> str:
    return " ".join(map(str, ids))


def greedy(ids: list[int], count: int) -> list[int]:
    """The next tokens by the unchunked pass."""
    new: list[int] = []
    for _ in range(count):
        new.append(int(whole_pass(ids + new, 5)[-1].argmax()))
    return new


def test_run_looks_words_up_and_prints_what_the_model_says(run: Run, made: Bundle) -> None:
    ids = [3, 14, 15, 9, 2, 6]
    code, out, err = run("run", made.path, "--prompt", words(ids), "--max-new-tokens", 4)
    assert (code, out.split()) == (0, [str(i) for i in greedy(ids, 4)])
    assert err == "rollkv: ended by length after 4 tokens\n"


def test_chat_takes_two_turns(run: Run, made: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("3 14 15\n9\n"))
    code, out, _ = run("chat", made.path, "--max-new-tokens", 2)
    first = greedy([3, 14, 15], 2)
    assert code == 0
    assert out.splitlines() == [words(first), words(greedy([3, 14, 15, *first, 9], 2))]


@pytest.mark.parametrize(
    "flags", [["--truncate", "middle", "--protect", "1:7"], ["--truncate", "middle", "--keep-head", 7]]
)
def test_a_protected_span_survives_the_cut(run: Run, made: Bundle, flags: list[Any]) -> None:
    ids = list(range(1, 19))
    code, out, err = run("run", made.path, "--prompt", words(ids), *flags, "--max-new-tokens", 3)
    assert (code, out.split()) == (0, [str(i) for i in greedy([*ids[:7], *ids[13:]], 3)])
    assert err.startswith("rollkv: the prompt was cut from 18 to 12 tokens (6 left out)\n")


def test_a_protected_span_that_would_be_cut_is_a_user_error(run: Run, made: Bundle) -> None:
    prompt = ["run", made.path, "--prompt", words(range(1, 19)), "--protect", "1:7"]
    assert user_error(run(*prompt, "--truncate", "left")) == (
        "the protected tokens 1:7 cannot be kept whole: the prompt has 18 tokens, L = 12, and truncation left keeps "
        "the last 12; choose truncation middle with keep_head of at least 7, or a larger -L"
    )
    assert "truncation middle keeps the first 2 and the last 10" in user_error(
        run(*prompt, "--truncate", "middle", "--keep-head", 2)
    )
    assert user_error(run(*prompt)) == "--protect goes with --truncate left or middle"


@pytest.mark.parametrize(
    "span",
    [
        "7",
        "7:",
        ":7",
        "7:7",
        "9:7",
        "-1:3",
        "a:b",
        "1:2:3",
        "",
        "１:５",
        "1:٥",
        "²:5",
        "+1:5",
        "1_0:20",
        " 1:5",
        "1:5\n",
        "1:" + "9" * 5000,
    ],
)
def test_what_is_no_span_is_a_user_error(run: Run, made: Bundle, span: str) -> None:
    said = user_error(run("run", made.path, "--prompt", "1", "--truncate", "left", f"--protect={span}"))
    assert said.startswith(f"argument --protect: {span!r} is no span; allowed: A:B, whole numbers with A < B")


@pytest.mark.parametrize("flags", [[], ["--chat"]])
@pytest.mark.parametrize("truncate", ["left", "middle"])
@pytest.mark.parametrize("n", [3, 12, 18])
def test_a_span_that_does_not_lie_in_the_prompt_is_a_user_error(
    run: Run, made: Bundle, flags: list[str], truncate: str, n: int
) -> None:
    span = ["--truncate", truncate, "--protect", f"1:{n + 1}"]
    said = user_error(run("run", made.path, "--prompt", words(range(1, n + 1)), *span, *flags))
    assert said == f"protect is 1:{n + 1}, the prompt has {n} tokens"


def test_a_span_without_truncation_is_a_user_error_with_a_limit_policy_too(run: Run, made: Bundle) -> None:
    command = ["run", made.path, "--prompt", "1 2 3", "--protect", "1:2", "--on-limit", "roll"]
    assert user_error(run(*command)) == "--protect goes with --truncate left or middle"
    assert run(*command, "--truncate", "left", "--max-new-tokens", 1)[0] == 0


@pytest.mark.parametrize("number", ["１２", "٣", "1_0", "", "-", "1.0", " 3"])
@pytest.mark.parametrize("flag", ["--max-new-tokens", "--keep-head", "--threads", "--top-k", "--seed"])
def test_whole_numbers_are_ascii_digits(run: Run, made: Bundle, flag: str, number: str) -> None:
    said = user_error(run("run", made.path, "--prompt", "1", f"{flag}={number}"))
    assert said.startswith(f"argument {flag}: invalid whole number value: {number!r}")


@pytest.mark.parametrize("number", ["０.5", "٠", "1_0.5"])
@pytest.mark.parametrize("flag", ["--temperature", "--top-p", "--min-p", "--repetition-penalty"])
def test_other_numbers_are_ascii_too(run: Run, made: Bundle, flag: str, number: str) -> None:
    said = user_error(run("run", made.path, "--prompt", "1", f"{flag}={number}"))
    assert said.startswith(f"argument {flag}: invalid float value: {number!r}")


def test_what_of_a_span_a_conversation_has_not_reached_is_not_protected_yet(
    run: Run, made: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L = 12; the span 13:16 is reached in part by the third turn, and passed by the fourth."""
    turns = [[3, 14, 15], [9, 2, 6, 5], [7, 8, 1], [4, 4, 11, 10, 3, 2]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(words(turn) for turn in turns)))
    span = ["--truncate", "middle", "--protect", "13:16"]
    code, out, _ = run("chat", made.path, "--max-new-tokens", 2, *span)
    assert code == 0
    ids: list[int] = []
    for turn, line in zip(turns, out.splitlines(), strict=True):
        ids += turn
        answer = greedy(ids if len(ids) <= 12 else [*ids[:3], *ids[len(ids) - 9 :]], 2)
        assert line == words(answer)
        ids += answer


def test_a_span_counts_from_the_start_of_a_conversation_that_is_known_in_part(
    run: Run, made: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [[3, 14, 15], [9, 2, 6, 5], [7, 8, 1, 4]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(words(turn) for turn in turns)))
    code, out, err = run("chat", made.path, "--max-new-tokens", 2, "--truncate", "middle", "--protect", "1:5")
    assert code == 0
    ids: list[int] = []
    for turn, line in zip(turns, out.splitlines(), strict=True):
        ids += turn
        kept = ids if len(ids) <= 12 else [*ids[:5], *ids[len(ids) - 7 :]]
        answer = greedy(kept, 2)
        assert line == words(answer)
        ids += answer
    assert "the prompt was cut from 15 to 12 tokens (3 left out)" in err


def test_info_names_the_input_the_tables_and_the_kinds_of_layers(run: Run, made: Bundle) -> None:
    code, out, err = run("info", made.path)
    assert (code, err) == (0, "")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    for name, text in (
        ("input", "embeds, (1, 4, 12) float32"),
        ("embedding", "embedding.bin: 23 x 12, float32, 1.1 KiB"),
        ("layers", "1 x C = 24, no window, K = 2, D = 6"),
        ("layers", "1 x C = 8, window 5, K = 2, D = 6"),
        ("layers", "1 x C = 24, no window, K = 2, D = 6, no cache: reads layer 0"),
        ("positions", "512"),
    ):
        assert [name, text] in lines
    assert "per layer  per_layer.bin: 23 x 5, float32, 0.4 KiB" in out


def test_info_says_what_an_image_may_not_do_and_which_positions_there_are(run: Run, tmp_path: Path) -> None:
    made = save_bundle(tmp_path / "b", embeds_manifest(tokens="ids", three_part=True, image="bidirectional"))
    _, out, _ = run("info", made.path)
    assert "input      ids, (1, 4) int32, text only: the model's image attention is bidirectional\n" in out
    assert "positions  512, three-part\n" in out
    assert "layers     2 x C = 24, no window, K = 2, D = 6\n" in out
    assert "embedding" not in out
