"""What a bundle answers under the flags of run and chat."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run, reseal, user_error
from toy_tokenizers import byte_level

from rollkv.runtime.bundle import Bundle, open_bundle
from rollkv.runtime.session import Session

PROMPT = "the quick brown fox"
IDS = byte_level().encode(PROMPT).ids


def text_of(ids: list[int]) -> str:
    """What follows PROMPT."""
    return byte_level().decode([*IDS, *ids], skip_special_tokens=True).removeprefix(PROMPT)


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
