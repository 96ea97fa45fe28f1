from __future__ import annotations

import io
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run, reseal, user_error
from toy_tokenizers import CONFIG, byte_level, with_byte_tokens

from rollkv.runtime.bundle import Bundle
from rollkv.runtime.session import Session

PROMPT = "the quick brown fox"


def test_run_prints_what_the_session_generates(run: Run, text_bundle: Bundle) -> None:
    code, out, err = run("run", text_bundle.path, "--prompt", PROMPT, "--max-new-tokens", 12)
    ids = byte_level().encode(PROMPT).ids
    generation = Session(text_bundle).generate(ids, max_new_tokens=12)
    new = list(generation)
    text = byte_level().decode([*ids, *new], skip_special_tokens=True).removeprefix(PROMPT)
    assert (code, out) == (0, text + "\n")
    wanted = f"rollkv: ended by length after {len(new)} tokens\n" if generation.finish_reason == "length" else ""
    assert err == wanted


def test_a_prompt_longer_than_l_names_n_l_and_c(run: Run, text_bundle: Bundle) -> None:
    said = user_error(run("run", text_bundle.path, "--prompt", "x" * 130))
    assert said == (
        "the prompt has 131 tokens; allowed: at most L = 120 (C = 160 cache slots), unless --truncate left or middle, "
        "or --on-limit roll or sinks, is given"
    )


@pytest.mark.parametrize(("how", "flags"), [("left", []), ("middle", []), ("middle", ["--keep-head", 7])])
def test_a_truncated_prompt_is_reported_with_counts_and_answers_the_kept_ids(
    run: Run, text_bundle: Bundle, how: str, flags: list[Any]
) -> None:
    prompt = "x" * 60 + "y" * 70
    ids = byte_level().encode(prompt).ids
    assert len(ids) == 131
    head = 0 if how == "left" else 7 if flags else 30
    kept = [*ids[:head], *ids[len(ids) - (120 - head) :]]
    wanted = list(Session(text_bundle).generate(kept, max_new_tokens=5))
    code, out, err = run("run", text_bundle.path, "--prompt", prompt, "--truncate", how, *flags, "--max-new-tokens", 5)
    assert code == 0
    assert err.splitlines()[0] == "rollkv: the prompt was cut from 131 to 120 tokens (11 left out)"
    assert out == byte_level().decode(wanted, skip_special_tokens=True) + "\n"


def test_a_huge_number_of_tokens_ends_by_length_when_the_cache_is_full(run: Run, copy: Path) -> None:
    ids = byte_level().encode(PROMPT).ids
    reseal(copy, eos_token_ids=[])
    code, _, err = run("run", copy, "--prompt", PROMPT, "--max-new-tokens", 10**12, "--temperature", 3, "--seed", 5)
    assert code == 0
    assert err == f"rollkv: ended by length after {160 - len(ids) + 1} tokens\n"


def test_under_roll_a_prompt_longer_than_c_runs_until_the_models_last_position(run: Run, copy: Path) -> None:
    reseal(copy, eos_token_ids=[])
    code, _, err = run(
        "run", copy, "--prompt", "x" * 200, "--on-limit", "roll", "--max-new-tokens", 10**6,
        "--temperature", 3, "--seed", 5,
    )  # fmt: skip
    assert code == 0
    assert err == f"rollkv: ended by length after {256 - 201 + 1} tokens\n"
    said = user_error(run("run", copy, "--prompt", "x" * 300, "--on-limit", "roll"))
    assert "301 tokens after 0 others pass the model's positions = 256" in said


def test_an_empty_prompt_is_refused_unless_the_tokenizer_adds_bos(run: Run, text_bundle: Bundle, copy: Path) -> None:
    assert run("run", text_bundle.path, "--prompt", "", "--max-new-tokens", 2)[0] == 0
    with_byte_tokens().save(str(copy / "tokenizer.json"))
    reseal(copy)
    assert user_error(run("run", copy, "--prompt", "")).startswith("empty prompt: ")


def test_a_prompt_file_is_read_as_it_is(
    run: Run, text_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run("run", text_bundle.path, "--prompt", "grüße\n🙂", "--max-new-tokens", 4)
    (tmp_path / "f").write_bytes("grüße\n🙂".encode())
    assert run("run", text_bundle.path, "--prompt-file", tmp_path / "f", "--max-new-tokens", 4) == said
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("grüße\n🙂".encode()), "ascii"))
    assert run("run", text_bundle.path, "--prompt-file", "-", "--max-new-tokens", 4) == said


def test_a_prompt_file_that_cannot_be_read_is_named(
    run: Run, text_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(name: Any) -> str:
        return user_error(run("run", text_bundle.path, "--prompt-file", name))

    assert said(tmp_path / "no") == f"--prompt-file {tmp_path / 'no'}: No such file or directory"
    assert said(tmp_path) == f"--prompt-file {tmp_path}: Is a directory"
    (tmp_path / "f").write_bytes(b"ok \xff no")
    assert said(tmp_path / "f") == f"--prompt-file {tmp_path / 'f'}: not UTF-8, byte 3 is 0xff"
    assert said(tmp_path / "f" / "x") == f"--prompt-file {tmp_path / 'f' / 'x'}: Not a directory"
    (tmp_path / "f").write_bytes("\N{LATIN SMALL LETTER E WITH ACUTE}".encode("utf-16"))
    assert "not UTF-8" in said(tmp_path / "f")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xc3"), "utf-8"))
    assert said("-") == "--prompt-file -: not UTF-8, byte 0 is 0xc3"
    monkeypatch.setattr(sys, "stdin", None)
    assert said("-") == "--prompt-file -: standard input is closed"


def test_bytes_that_are_no_text_in_the_prompt_are_named(run: Run, text_bundle: Bundle) -> None:
    prompt = os.fsdecode(b"ab\xff")
    assert user_error(run("run", text_bundle.path, "--prompt", prompt)) == (
        "the prompt holds byte 0xff at position 2; allowed: valid UTF-8"
    )
    assert "0xff" in user_error(run("run", text_bundle.path, "--prompt", prompt, "--chat"))


@pytest.mark.parametrize(
    "prompt",
    ['costs $5 "now"', "it's \\n not a \\ newline", "two\nlines\n\n", "  spaces\tand tabs ", "`id` $(id) %s {x}", "-5"],
)
def test_a_prompt_reaches_the_session_unchanged(
    run: Run, text_bundle: Bundle, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def generate(session: Session, ids: Any, **_: Any) -> Any:
        taken.append(list(ids))
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "generate", generate)
    assert run("run", text_bundle.path, "--prompt", prompt) == (130, "", "")
    assert run("run", text_bundle.path, f"--prompt={prompt}", "--chat") == (130, "", "")
    assert taken[0] == byte_level().encode(prompt).ids
    assert prompt in byte_level().decode(taken[1])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature", "-1"], "--temperature is -1.0; allowed: a finite number >= 0"),
        (["--temperature", "nan"], "--temperature is nan; allowed: a finite number >= 0"),
        (["--temperature", "inf"], "--temperature is inf; allowed: a finite number >= 0"),
        (["--top-k", "-1"], "--top-k is -1; allowed: an integer >= 0"),
        (["--top-p", "0"], "--top-p is 0.0; allowed: a number above 0 and at most 1"),
        (["--top-p", "1.5"], "--top-p is 1.5; allowed: a number above 0 and at most 1"),
        (["--min-p", "2"], "--min-p is 2.0; allowed: a number from 0 to 1"),
        (["--repetition-penalty", "0"], "--repetition-penalty is 0.0; allowed: a finite number > 0"),
        (["--seed", "-1"], "--seed is -1; allowed: an integer >= 0"),
        (["--keep-head", "3"], "--keep-head goes with --truncate middle"),
        (["--truncate", "middle", "--keep-head", "120"], "keep_head is 120, allowed: 0 .. 119"),
    ],
)
def test_a_sampling_flag_out_of_range_is_named(run: Run, text_bundle: Bundle, flags: list[str], said: str) -> None:
    assert user_error(run("run", text_bundle.path, "--prompt", PROMPT, *flags)) == said


def test_the_same_seed_gives_the_same_text_and_another_seed_another(run: Run, text_bundle: Bundle) -> None:
    def text(seed: int) -> str:
        flags = ["--temperature", 2, "--seed", seed, "--max-new-tokens", 20]
        code, out, _ = run("run", text_bundle.path, "--prompt", PROMPT, *flags)
        assert code == 0
        return out

    assert text(7) == text(7)
    assert len({text(seed) for seed in range(4)}) == 4


def test_run_needs_no_network(run: Run, text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: Any, **__: Any) -> Any:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", no_socket)
    monkeypatch.setattr(socket, "create_connection", no_socket)
    assert run("run", text_bundle.path, "--prompt", PROMPT, "--chat", "--max-new-tokens", 2, "--check")[0] == 0


def test_logits_that_are_no_numbers_stop_with_a_message(
    run: Run, text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollkv.runtime import backend

    def spoilt(binding: Any) -> None:
        for value in binding._graph.outputs:
            binding._arrays[value.name].fill(np.nan)

    monkeypatch.setattr(backend._OrtBinding, "run", spoilt)
    code, out, err = run("run", text_bundle.path, "--prompt", PROMPT)
    assert (code, out) == (1, "")
    assert err.startswith("rollkv: ")
    assert err.count("\n") == 1


# Damaged and odd bundles


@pytest.mark.parametrize("command", [["run", "--prompt", "x"], ["chat"], ["info"], ["verify"]])
def test_what_is_no_bundle_is_refused_by_every_command(run: Run, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").write_text("")
    for name, why in (("no", "no such folder"), ("file", "not a folder"), ("", "no manifest.json in it")):
        said = user_error(run(command[0], tmp_path / name, *command[1:]))
        assert said == f"{tmp_path / name}: {why}; give the folder that `rollkv export` wrote"


def test_a_changed_byte_in_a_large_file_is_found_by_check(
    run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollkv.runtime.bundle.HASHED_AT_OPEN", 100_000)
    data = bytearray((copy / "weights.bin").read_bytes())
    data[5] ^= 1
    (copy / "weights.bin").write_bytes(data)
    assert run("run", copy, "--prompt", PROMPT, "--max-new-tokens", 1)[0] == 0  # only sizes are looked at
    said = f"{copy / 'weights.bin'}: its content is not what the manifest's sha256 says; export the bundle again"
    assert user_error(run("run", copy, "--prompt", PROMPT, "--check")) == said


def test_a_newer_format_a_missing_file_and_a_changed_byte_are_refused(run: Run, copy: Path) -> None:
    reseal(copy, format=2)
    assert user_error(run("run", copy, "--prompt", "x")) == (
        f"{copy / 'manifest.json'}: format 2 is newer than 1, the newest this rollkv reads; upgrade rollkv"
    )
    reseal(copy, format=1)
    data = bytearray((copy / "prefill.onnx").read_bytes())
    data[-1] ^= 1
    (copy / "prefill.onnx").write_bytes(data)
    assert "its content is not what the manifest's sha256 says" in user_error(run("info", copy))
    (copy / "prefill.onnx").unlink()
    assert user_error(run("info", copy)).endswith("prefill.onnx: missing from the bundle; export it again")


def test_chat_needs_a_template(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    (copy / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    reseal(copy)
    assert "has no chat template" in user_error(run("run", copy, "--prompt", "x", "--chat"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert "has no chat template" in user_error(run("chat", copy))
    assert run("run", copy, "--prompt", "x", "--max-new-tokens", 1)[0] == 0


# chat


def test_chat_takes_turns_from_stdin(run: Run, text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tuple[str, str]]] = []
    from rollkv.runtime.chat import Chat

    real = Chat.reply

    def reply(chat: Chat, messages: Any, **options: Any) -> Any:
        asked.append([(m["role"], m["content"]) for m in messages])
        return real(chat, messages, **options)

    monkeypatch.setattr(Chat, "reply", reply)

    def talk(text: str, *flags: Any) -> tuple[int, str, str]:
        asked.clear()
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return run("chat", text_bundle.path, "--max-new-tokens", 3, *flags)

    code, out, err = talk("hello\n\n  \nagain\n/reset\nanew\n/exit\nnever\n", "--system", "Be brief.")
    assert code == 0
    system = ("system", "Be brief.")
    answer = asked[1][2]
    assert answer[0] == "assistant"
    assert asked == [
        [system, ("user", "hello")],
        [system, ("user", "hello"), answer, ("user", "again")],
        [system, ("user", "anew")],
    ]
    assert out.startswith(answer[1] + "\n")
    assert "Traceback" not in err
    assert talk("hello")[0] == 0  # the end of the input, without a newline
    assert asked == [[("user", "hello")]]
    assert talk("") == (0, "", "")
    monkeypatch.setattr(sys, "stdin", None)
    assert run("chat", text_bundle.path) == (0, "", "")


def test_a_turn_that_does_not_fit_leaves_the_conversation_as_it_was(
    run: Run, text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 300 + "\nhello\n"))
    code, out, err = run("chat", text_bundle.path, "--max-new-tokens", 2)
    assert code == 0
    assert out.endswith("\n")
    refused = [line for line in err.splitlines() if "the conversation has" in line]
    assert len(refused) == 1
    assert "allowed: at most L = 120 (C = 160 cache slots)" in refused[0]
    assert refused[0].endswith("; /reset starts anew")


def test_chat_refuses_input_that_is_no_text(run: Run, text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xffhello\n"), "utf-8", errors="strict"))
    assert user_error(run("chat", text_bundle.path)) == "standard input: not utf-8, byte 0xff"
