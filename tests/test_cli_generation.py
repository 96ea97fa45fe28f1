"""The flags of run and chat: what they tell the session, and what a bundle then answers."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from commands import Run, reseal, user_error
from fake_session import FakeSession
from toy_tokenizers import CHATML, CONFIG, byte_level, write

from rollkv.runtime.bundle import Bundle, open_bundle
from rollkv.runtime.session import Session

PROMPT = "the quick brown fox"
IDS = byte_level().encode(PROMPT).ids


def text_of(ids: list[int]) -> str:
    """What follows PROMPT."""
    return byte_level().decode([*IDS, *ids], skip_special_tokens=True).removeprefix(PROMPT)


# What the session is told


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


# What a bundle answers


@pytest.fixture
def endless(copy: Path) -> Path:
    """The bundle without an EOS."""
    reseal(copy, eos_token_ids=[])
    return copy


def test_a_bundle_stops_before_a_text_that_it_would_have_said(run: Run, endless: Path) -> None:
    flags = ["--temperature", 2, "--seed", 1, "--max-new-tokens", 30]
    whole = run("run", endless, "--prompt", PROMPT, *flags)[1].removesuffix("\n")
    found = re.search("[!-~]{2}", whole[1:])
    assert found is not None
    stop = found[0]
    assert run("run", endless, "--prompt", PROMPT, *flags, "--stop", stop) == (0, whole.partition(stop)[0] + "\n", "")
    said = json.loads(run("run", endless, "--prompt", PROMPT, *flags, "--stop", stop, "--json")[1])
    assert (said["text"], said["stop_string"], said["finish_reason"]) == (whole.partition(stop)[0], stop, "stop")
    assert said["generated_tokens"] < 30


def test_json_tells_the_ids_and_the_log_probabilities_of_the_raw_logits(run: Run, endless: Path) -> None:
    flags = ["--max-new-tokens", 4, "--json", "--logprobs", 3, "--logit-bias", "9:1000", "--repetition-penalty", 1.5]
    code, out, _ = run("run", endless, "--prompt", PROMPT, *flags)
    assert code == 0
    said = json.loads(out)
    assert said["tokens"] == [9] * 4
    assert said["text"] == text_of([9] * 4)
    session = Session(endless)
    logits = session.prefill(IDS)
    for entry in said["logprobs"]:
        wide = logits.astype(np.float64)
        want = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        assert entry["id"] == 9
        assert entry["logprob"] == pytest.approx(want[9], abs=1e-4)
        order = np.argsort(-want, kind="stable")[:3]
        assert [token for token, _ in entry["top"]] == order.tolist()
        assert [value for _, value in entry["top"]] == pytest.approx(want[order].tolist(), abs=1e-4)
        logits = session.decode(9)


def test_an_eos_waits_for_the_least_number_of_tokens(run: Run, copy: Path) -> None:
    first = list(Session(copy).generate(IDS, max_new_tokens=1, ignore_eos=True))
    reseal(copy, eos_token_ids=first)
    assert json.loads(run("run", copy, "--prompt", PROMPT, "--json")[1])["tokens"] == []
    said = json.loads(run("run", copy, "--prompt", PROMPT, "--json", "--min-new-tokens", 5)[1])
    assert len(said["tokens"]) >= 5
    assert first[0] not in said["tokens"]


def test_a_bias_outside_the_vocabulary_is_refused(run: Run, text_bundle: Bundle) -> None:
    said = user_error(run("run", text_bundle.path, "--prompt", PROMPT, "--logit-bias", "320:1"))
    assert said == "--logit-bias names token id 320, allowed: 0 .. 319"


def test_a_saved_prefix_is_used_and_changes_nothing(run: Run, endless: Path, tmp_path: Path) -> None:
    file = tmp_path / "p"
    code, _, err = run("run", endless, "--prompt", PROMPT, "--max-new-tokens", 20, "--save-prefix", file)
    assert code == 0
    assert err.splitlines()[0] == f"rollkv: saved the state after the {len(IDS)} tokens of the prompt in {file}"
    prompt = PROMPT + " hello, how are you?"
    cold = json.loads(run("run", endless, "--prompt", prompt, "--max-new-tokens", 9, "--json")[1])
    warm = json.loads(
        run("run", endless, "--prompt", prompt, "--max-new-tokens", 9, "--json", "--load-prefix", file)[1]
    )
    assert cold.pop("reused_tokens") == 0
    assert warm.pop("reused_tokens") == len(IDS)
    assert warm == cold
    file.write_bytes(file.read_bytes()[:-7])
    assert str(file) in user_error(run("run", endless, "--prompt", prompt, "--load-prefix", file))


def test_a_prompt_is_saved_although_the_answer_makes_the_cache_forget_it(
    run: Run, endless: Path, tmp_path: Path
) -> None:
    flags = ["--prompt", PROMPT, "--max-new-tokens", 200, "--on-limit", "roll", "--save-prefix", tmp_path / "p"]
    code, out, err = run("run", endless, *flags)
    assert code == 0
    assert (tmp_path / "p").is_file()
    assert err.splitlines()[-1] == "rollkv: ended by length after 200 tokens"
    assert out == run("run", endless, *flags[:-2])[1]


def test_a_prompt_that_is_forgotten_cannot_be_saved_and_nothing_is_printed(
    run: Run, endless: Path, tmp_path: Path
) -> None:
    said = user_error(run("run", endless, "--prompt", "x " * 90, "--on-limit", "roll", "--save-prefix", tmp_path / "p"))
    assert (
        said == f"--save-prefix {tmp_path / 'p'}: the session has forgotten its first tokens; only a whole prefix "
        "can be saved"
    )
    assert not (tmp_path / "p").exists()


def test_a_prefix_is_not_saved_into_the_bundle_or_over_what_is_no_file(run: Run, endless: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in endless.iterdir()}
    (tmp_path / "link").symlink_to(endless / "manifest.json")
    (tmp_path / "folder").symlink_to(endless)
    for name in (endless / "manifest.json", endless / "new", tmp_path / "link", tmp_path / "folder" / "new"):
        said = user_error(run("run", endless, "--prompt", PROMPT, "--save-prefix", name))
        assert said == f"--save-prefix {name}: lies in a bundle, into which nothing is written; give another folder"
    assert {path.name: path.read_bytes() for path in endless.iterdir()} == before
    os.mkfifo(tmp_path / "pipe")
    said = user_error(run("run", endless, "--prompt", PROMPT, "--save-prefix", tmp_path / "pipe"))
    assert said == f"--save-prefix {tmp_path / 'pipe'}: exists and is no file that could be replaced"
    said = user_error(run("run", endless, "--prompt", PROMPT, "--load-prefix", tmp_path / "pipe"))
    assert said.startswith(f"--load-prefix {tmp_path / 'pipe'}: not a file")


@pytest.mark.parametrize("flags", [["--addresses", "fixed"], ["--measure"], ["--chunk-size", 8]])
def test_how_a_session_runs_does_not_change_the_answer(run: Run, endless: Path, flags: list[Any]) -> None:
    plain = run("run", endless, "--prompt", PROMPT, "--max-new-tokens", 20)
    code, out, err = run("run", endless, "--prompt", PROMPT, "--max-new-tokens", 20, *flags)
    assert (code, out) == plain[:2]
    assert err.endswith(plain[2])


def test_a_chunk_size_that_the_bundle_does_not_have_names_those_it_has(run: Run, text_bundle: Bundle) -> None:
    said = user_error(run("run", text_bundle.path, "--prompt", PROMPT, "--chunk-size", 7))
    assert said == "--chunk-size 7: chunk size 7 is not in this bundle; it has 8"


@pytest.mark.parametrize("flag", ["--load-prefix", "--save-prefix"])
def test_a_name_that_no_file_can_have_is_refused_before_anything_runs(run: Run, text_bundle: Bundle, flag: str) -> None:
    said = user_error(run("run", text_bundle.path, "--prompt", PROMPT, flag, "x" * 300))
    assert said.startswith(f"{flag} xxx")
    assert "File name too long" in said


def test_more_sinks_than_slots_are_refused_by_the_flag(run: Run, text_bundle: Bundle) -> None:
    said = user_error(run("run", text_bundle.path, "--prompt", PROMPT, "--on-limit", "sinks", "--sinks", 160))
    assert said == "--sinks is 160, allowed: 1 .. 159, less than C"


def test_a_prefix_is_saved_into_no_bundle_at_all(run: Run, text_bundle: Bundle, copy: Path) -> None:
    before = (copy / "tokenizer.json").read_bytes()
    said = user_error(run("run", text_bundle.path, "--prompt", PROMPT, "--save-prefix", copy / "tokenizer.json"))
    assert "lies in a bundle" in said
    assert (copy / "tokenizer.json").read_bytes() == before


def test_sinks_go_on_until_the_models_last_position(run: Run, endless: Path) -> None:
    code, _, err = run(
        "run", endless, "--prompt", "x" * 200, "--on-limit", "sinks", "--sinks", 2, "--max-new-tokens", 10**6,
        "--temperature", 3, "--seed", 5,
    )  # fmt: skip
    assert code == 0
    assert err == f"rollkv: ended by length after {256 - 201 + 1} tokens\n"


@pytest.fixture(scope="module")
def checking(text_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with prefill graphs of 4 and 8 rows, that of 4 with every row's logits; no EOS."""
    from rollkv.export.cli import main

    output = tmp_path_factory.mktemp("checking") / "b"
    lengths = ["-L", "120", "-c", "4,8", "-C", "160", "--speculate", "4"]
    assert main(["export", str(text_source), "-o", str(output), *lengths]) == 0
    reseal(output, eos_token_ids=[])
    return output


@pytest.mark.parametrize("by", ["lookup", "bundle"])
def test_speculation_says_the_same_and_reports_in_one_line(
    run: Run, checking: Path, text_bundle: Bundle, by: str
) -> None:
    flags = ["run", checking, "--prompt", PROMPT, "--max-new-tokens", 40, "--json"]
    plain = json.loads(run(*flags)[1])
    code, out, err = run(*flags, "--speculate", "lookup" if by == "lookup" else text_bundle.path)
    assert code == 0
    said = json.loads(out)
    assert said.pop("speculation")
    assert plain.pop("speculation") is None
    assert said == plain
    assert len(err.splitlines()) == 2, "the end by length, and the report"


@pytest.mark.parametrize("size", [4, 8])
def test_one_chunk_size_of_several_says_the_same(run: Run, checking: Path, size: int) -> None:
    assert sorted(graph.rows for graph in open_bundle(checking).manifest.graphs) == [1, 4, 8]
    flags = ["run", checking, "--prompt", PROMPT * 3, "--max-new-tokens", 20]
    assert run(*flags, "--chunk-size", size) == run(*flags)
