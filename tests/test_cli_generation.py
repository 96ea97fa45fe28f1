"""The flags of run and chat: what they tell the session."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from commands import Run, user_error
from fake_session import FakeSession
from toy_tokenizers import CHATML, CONFIG, byte_level, write

PROMPT = "the quick brown fox"
IDS = byte_level().encode(PROMPT).ids


def text_of(ids: list[int]) -> str:
    """What follows PROMPT."""
    return byte_level().decode([*IDS, *ids], skip_special_tokens=True).removeprefix(PROMPT)


@dataclass
class Report:
    accepted: int = 3
    drafted: int = 4

    def summary(self) -> str:
        return "3 of 4 guesses were right"


class Told(FakeSession):
    """A fake session as the command makes it; it keeps how it was made and what was asked of it."""

    made: ClassVar[list[Told]] = []

    def __init__(self, path: str, **settings: Any) -> None:
        super().__init__(Path(path))
        self.settings = settings
        self.answer = byte_level().encode("stop now, don't stop", add_special_tokens=False).ids
        self.loaded = SimpleNamespace(measure=lambda: self.asked.append("measure") or {1: 0.008, 32: 0.0401})
        self.asked: list[Any] = []
        self.made.append(self)

    def generate(self, ids: Any, **options: Any) -> Any:
        generation = super().generate(ids, **options)
        generation.speculation = None if options["speculate"] is None else Report()
        return generation

    def load_prefix(self, path: Any) -> None:
        self.asked.append(("load", str(path)))


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer alone, and fakes of all that runs."""
    monkeypatch.setattr(Told, "made", [])
    monkeypatch.setattr("rollkv.runtime.session.Session", Told)
    drafters = SimpleNamespace(PromptLookup=lambda: "lookup", DraftModel=lambda *given: ("draft", *given))
    monkeypatch.setitem(sys.modules, "rollkv.runtime.speculation", drafters)
    return write(tmp_path / "b", byte_level(), **CONFIG, chat_template=CHATML)


def options_of(run: Run, folder: Path, *flags: Any) -> dict[str, Any]:
    code, _, _ = run("run", folder, "--prompt", PROMPT, *flags)
    assert code == 0
    options: dict[str, Any] = next(session for session in reversed(Told.made) if session.calls).calls[-1][1]
    return options


def test_without_flags_the_session_gets_the_defaults(run: Run, told: Path) -> None:
    options = options_of(run, told)
    assert Told.made[0].settings == {"threads": None, "memory": "fast"}
    sampling = options.pop("sampling")
    assert (sampling.temperature, sampling.logit_bias) == (0, {})
    assert options == {
        "max_new_tokens": None,
        "min_new_tokens": 0,
        "truncate": "none",
        "keep_head": None,
        "protect": None,
        "on_limit": "stop",
        "sinks": 4,
        "speculate": None,
    }


def test_every_flag_reaches_the_session(run: Run, told: Path) -> None:
    options = options_of(
        run, told, "--min-new-tokens", 3, "--max-new-tokens", 3, "--on-limit", "sinks", "--sinks", 9,
        "--logit-bias", "5:-2.5", "--logit-bias", "7:1e3", "--chunk-size", 32, "--addresses", "fixed", "--threads", 1,
    )  # fmt: skip
    assert (options["min_new_tokens"], options["max_new_tokens"]) == (3, 3)
    assert (options["on_limit"], options["sinks"]) == ("sinks", 9)
    assert options["sampling"].logit_bias == {5: -2.5, 7: 1000.0}
    assert Told.made[-1].settings == {"threads": 1, "memory": "fast", "chunk_sizes": (32,), "addresses": "fixed"}


def test_graphs_are_measured_before_the_prefix_is_loaded_and_the_times_are_said(
    run: Run, told: Path, tmp_path: Path
) -> None:
    (tmp_path / "p").write_bytes(b"state")
    code, _, err = run("run", told, "--prompt", PROMPT, "--measure", "--load-prefix", tmp_path / "p")
    assert (code, err) == (0, "rollkv: measured for a run by its rows: 8.0 ms with 1, 40.1 ms with 32\n")
    assert Told.made[0].asked == ["measure", ("load", str(tmp_path / "p"))]


def test_speculation_is_by_lookup_or_by_a_bundle_and_reported(run: Run, told: Path, tmp_path: Path) -> None:
    code, out, err = run("run", told, "--prompt", PROMPT, "--speculate", "lookup")
    assert (code, out, err) == (0, "stop now, don't stop\n", "rollkv: 3 of 4 guesses were right\n")
    assert Told.made[-1].calls[-1][1]["speculate"] == "lookup"
    drafts = write(tmp_path / "small", byte_level())
    options = options_of(run, told, "--speculate", drafts, "--threads", 2)
    kind, session, target = options["speculate"]
    assert (kind, session.bundle.path, session.settings) == ("draft", drafts, {"threads": 2, "memory": "fast"})
    assert target is Told.made[-2].manifest, "the two are compared"


@pytest.mark.parametrize("stop", [["don't"], ["nothing", "don't"], ["p now,", "don't"]])
def test_stop_strings_end_what_is_printed(run: Run, told: Path, stop: list[str]) -> None:
    flags = [word for text in stop for word in ("--stop", text)]
    found = stop[0] if stop[0] != "nothing" else stop[1]
    assert run("run", told, "--prompt", PROMPT, *flags) == (0, "stop now, don't stop".partition(found)[0] + "\n", "")
    assert run("run", told, "--prompt", PROMPT, "--stop", "\\n")[1] == "stop now, don't stop\n"


def test_chat_takes_the_flags_too_and_keeps_one_drafter(
    run: Run, told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p").write_bytes(b"state")
    flags = [
        "--stop", ",", "--min-new-tokens", 1, "--on-limit", "sinks", "--logit-bias", "5:1", "--chunk-size", 8,
        "--speculate", told, "--load-prefix", tmp_path / "p", "--measure", "--addresses", "moving",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nstop\n"))
    code, out, err = run("chat", told, *flags)
    assert (code, out) == (0, "stop now\nstop now\n")
    assert err.splitlines()[1:] == ["rollkv: 3 of 4 guesses were right"] * 2
    session = Told.made[0]
    assert session.settings["chunk_sizes"] == (8,)
    assert session.settings["addresses"] == "moving"
    assert session.asked == ["measure", ("load", str(tmp_path / "p"))]
    first, second = (options for _, options in session.calls)
    assert first["speculate"] is second["speculate"]
    assert (first["on_limit"], first["sampling"].logit_bias) == ("sinks", {5: 1.0})
    assert second == first


def test_an_answer_as_json_is_one_object(run: Run, told: Path) -> None:
    flags = ["--json", "--logprobs", 2, "--stop", "don't", "--speculate", "lookup"]
    code, out, err = run("run", told, "--prompt", PROMPT, *flags)
    assert (code, err) == (0, "rollkv: 3 of 4 guesses were right\n")
    said = json.loads(out)
    tokens = said["tokens"]
    assert tokens == Told.made[-1].answer[: len(tokens)]
    assert byte_level().decode(tokens).startswith("stop now, don't")
    assert said == {
        "text": "stop now, ",
        "finish_reason": "stop",
        "stop_string": "don't",
        "prompt_tokens": len(IDS),
        "reused_tokens": 0,
        "truncated": 0,
        "generated_tokens": len(tokens),
        "tokens": tokens,
        "logprobs": [{"id": token, "logprob": -0.5, "top": [[token, -0.5], [7, -1.25]]} for token in tokens],
        "speculation": {"accepted": 3, "drafted": 4},
    }
    assert Told.made[-1].calls[-1][1]["logprobs"] == 2
    code, out, _ = run("run", told, "--prompt", PROMPT, "--json", "--truncate", "left")
    said = json.loads(out)
    assert (said["text"], said["logprobs"], said["speculation"]) == ("stop now, don't stop", None, None)
    assert (said["stop_string"], said["finish_reason"]) == (None, "stop")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sinks", 3], "--sinks goes with --on-limit sinks"),
        (["--sinks", 3, "--on-limit", "roll"], "--sinks goes with --on-limit sinks"),
        (["--sinks", 0, "--on-limit", "sinks"], "argument --sinks: 0 is less than 1; see"),
        (["--stop", ""], "--stop is empty; allowed: at least one character"),
        (["--min-new-tokens", 4, "--max-new-tokens", 3], "--min-new-tokens 4 is more than --max-new-tokens 3"),
        (["--min-new-tokens", "-1"], "argument --min-new-tokens: -1 is less than 0"),
        (["--logit-bias", "5"], "argument --logit-bias: '5' is no bias; allowed: ID:BIAS, a token id and a number"),
        (["--logit-bias=-5:1"], "argument --logit-bias: '-5:1' is no bias"),
        (["--logit-bias", "5:nan"], "argument --logit-bias: '5:nan' is no bias"),
        (["--logit-bias", "٥:1"], "argument --logit-bias: '٥:1' is no bias"),
        (["--logit-bias", "5:1e999"], "--logit-bias of token id 5 is inf; allowed: a finite number"),
        (["--logit-bias", "5:1", "--logit-bias", "5:2"], "--logit-bias is given twice for token id 5; allowed: once"),
        (["--logprobs", 3], "--logprobs goes with --json"),
        (["--logprobs", "-1", "--json"], "argument --logprobs: -1 is less than 0"),
        (["--chunk-size", 0], "argument --chunk-size: 0 is less than 1"),
        (["--addresses", "none"], "argument --addresses: invalid choice: 'none'"),
        (["--load-prefix", "/nowhere/p"], "--load-prefix /nowhere/p: no such file"),
        (["--save-prefix", "/nowhere/p"], "--save-prefix /nowhere/p: no such folder"),
        (["--save-prefix", "/"], "--save-prefix /: is a folder; give the name of a file"),
        (["--save-prefix", ""], "--save-prefix '': is a folder; give the name of a file"),
        (["--speculate", ""], "--speculate is empty; allowed: lookup, or the folder of a bundle"),
        (["--min-new-tokens", "300"], "--min-new-tokens 300 is more than 256, the default of --max-new-tokens; raise"),
    ],
)
def test_a_flag_that_is_wrong_is_named_before_anything_runs(run: Run, told: Path, flags: list[Any], said: str) -> None:
    assert user_error(run("run", told, "--prompt", PROMPT, *flags)).startswith(said)
    assert Told.made == []


@pytest.mark.parametrize("flag", ["--json", "--logprobs", "--save-prefix"])
def test_chat_has_no_flags_of_one_answer(run: Run, told: Path, flag: str) -> None:
    assert f"unrecognized arguments: {flag}" in user_error(run("chat", told, flag))
