from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHAPES
from toy_tokenizers import CONFIG, byte_level, with_byte_tokens

from rollkv.export.cli import main
from rollkv.runtime.bundle import Bundle
from rollkv.runtime.session import Session

PROMPT = "the quick brown fox"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(text_source: Path) -> Path:
    return text_source


@pytest.fixture
def copy(text_bundle: Bundle, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may damage."""
    return Path(shutil.copytree(text_bundle.path, tmp_path / "copy"))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """run(*arguments): exit code, stdout and stderr of the command in this process."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            code = error.code if isinstance(error.code, int) else 1
        out, err = capfd.readouterr()
        return code, out, err

    return call


def user_error(result: tuple[int, str, str]) -> str:
    """The one line of a user error, without the name of the program."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("rollkv")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.rstrip("\n").partition(": ")[2]


def reseal(folder: Path, **changes: Any) -> None:
    """Make the manifest's sizes and hashes those of the files, as one who changes a bundle on purpose would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= changes
    for name in [*manifest["files"], "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        manifest["files"].pop(name, None)
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def process(*arguments: Any, **more: Any) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **more.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "rollkv.export.cli", *map(str, arguments)], env=environment, check=False, **more
    )


# The frame


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND; see rollkv --help"),
        (["exprot"], "argument COMMAND: invalid choice: 'exprot'"),
        (["export"], "the following arguments are required: MODEL, -o/--output; see rollkv export --help"),
        (["export", "m", "-o", "b", "-c", "x"], "argument -c/--chunk-size: invalid int value: 'x'; see"),
        (["export", "m", "-o", "b", "--nosuch"], "unrecognized arguments: --nosuch; see rollkv --help"),
        (["run", "b"], "one of the arguments --prompt --prompt-file is required; see rollkv run --help"),
        (["run", "b", "--prompt", "x", "--prompt-file", "f"], "argument --prompt-file: not allowed with argument"),
        (["run", "b", "--prompt", "x", "--max-new-tokens", "0"], "argument --max-new-tokens: 0 is less than 1; see"),
        (["run", "b", "--prompt", "x", "--max-new-tokens", "1.5"], "invalid whole number value: '1.5'"),
        (["run", "b", "--prompt", "x", "--max-new-tokens", "a\nb"], "invalid whole number value: 'a\\nb'"),
        (["run", "b", "--prompt", "x", "--truncate", "right"], "argument --truncate: invalid choice: 'right'"),
        (["run", "b", "--prompt", "x", "--on-limit", "forget"], "argument --on-limit: invalid choice: 'forget'"),
        (["run", "b", "--prompt", "x", "--threads", "0"], "argument --threads: 0 is less than 1"),
        (["run", "b", "--prompt", "x", "--keep-head", "-1"], "argument --keep-head: -1 is less than 0"),
        (["run", "b", "--prompt", "x", "--temperature", "warm"], "argument --temperature: invalid float value: 'warm'"),
        (["verify", "b", "--json", "--json-out", "f"], "argument --json-out: not allowed with argument --json"),
    ],
)
def test_what_argparse_refuses_is_one_line(run: Run, arguments: list[str], said: str) -> None:
    assert said in user_error(run(*arguments))


def test_a_fault_of_our_own_shows_its_traceback_and_ends_with_70(
    run: Run, text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr("rollkv.runtime.bundle.open_bundle", fail)
    code, out, err = run("info", text_bundle.path)
    assert (code, out) == (70, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("RuntimeError: nobody thought of this\n")


def test_ctrl_c_is_130_and_other_faults_of_the_system_1(
    run: Run, text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: BaseException = KeyboardInterrupt()

    def fail(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr("rollkv.runtime.bundle.open_bundle", fail)
    assert run("info", text_bundle.path) == (130, "", "")
    raised = OSError(errno.EIO, "Input/output error", "/dev/x")
    assert run("info", text_bundle.path) == (1, "", "rollkv: /dev/x: Input/output error\n")
    raised = ModuleNotFoundError("No module named 'nosuch'", name="nosuch")
    code, _, err = run("info", text_bundle.path)
    assert code == 70
    assert "ModuleNotFoundError: No module named 'nosuch'" in err


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("torch", ["verify", "{bundle}", "--reference", "{source}"]),
        ("safetensors", ["export", "{source}", "-o", "{new}"]),
        ("onnx", ["export", "{source}", "-o", "{new}"]),
        ("gguf", ["export", "{gguf}", "-o", "{new}"]),
    ],
)
def test_a_command_without_its_extra_names_it(
    source: Path, text_bundle: Bundle, tmp_path: Path, module: str, arguments: list[str]
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 60)
    names = {"bundle": text_bundle.path, "source": source, "new": tmp_path / "new", "gguf": tmp_path / "x.gguf"}
    script = (
        "import sys\n"
        f"sys.modules[{module!r}] = None\n"
        "from rollkv.export.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    given = [argument.format(**names) for argument in arguments]
    done = subprocess.run([sys.executable, "-c", script, *given], capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    assert said == f"rollkv: this command needs {module}, which the extra brings: pip install 'rollkv[export]'"
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("module", ["onnxsim", "transformers", "onnxscript"])
def test_a_module_that_is_needed_late_is_named_and_leaves_nothing(
    run: Run, text_bundle: Bundle, source: Path, tmp_path: Path, traced_once: None, module: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def missing(*_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    if module == "transformers":
        monkeypatch.setattr("rollkv.export.verify.Reference", missing)
        code, out, err = run("verify", text_bundle.path, "--reference", source)
    else:
        place = "run_passes" if module == "onnxsim" else "trace_graph"
        monkeypatch.setattr(f"rollkv.export.pipeline.{place}", missing)
        code, out, err = run("export", source, "-o", tmp_path / "new" / "b", *LENGTHS)
    said = f"rollkv: this command needs {module}, which the extra brings: pip install 'rollkv[export]'"
    assert (code, out, err.splitlines()[-1]) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


# export


LENGTHS = ["-L", 120, "-c", 8, "-C", 160]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-c", 161], "-c is 161, more than -C 160; allowed: 1 .. 160"),
        (["-L", 161], "-C is 160, less than -L 161; allowed: from 162 on"),
        (["-L", 160], "-C 160 equals -L: the longest prompt has room for one token only; raise -C, or pass"),
        (["-C", 257], "-C is 257, above the model's 256 positions; allowed: up to 256"),
        (["-L", 0], "-L is 0, must be at least 1"),
        (["-c", -8], "-c is -8, must be at least 1"),
        (["--opset", 12], "--opset is 12, allowed: 13, 14, 15, 16, 17, 18"),
        (["--kv-layout", "bkds"], "--kv-layout is 'bkds', allowed: bskd, bksd, bksd-kt"),
        (["--ids", "int8"], "--ids is 'int8', allowed: int32, int64"),
        (["--head", "none"], "--head is 'none', allowed: last, all"),
        (["--mask-value", "nan"], "--mask-value is nan, allowed: -65504 .. -1"),
        (["--mask-value=-inf"], "--mask-value is -inf, allowed: -65504 .. -1"),
    ],
)
def test_export_refuses_a_wrong_flag_before_it_makes_anything(
    run: Run, source: Path, tmp_path: Path, flags: list[Any], said: str
) -> None:
    output = tmp_path / "deep" / "bundle"
    assert user_error(run("export", source, "-o", output, *LENGTHS, *flags)).startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_what_is_no_model_or_not_whole(run: Run, source: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(source, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())

    def said() -> str:
        return user_error(run("export", model, "-o", tmp_path / "new" / "bundle", *LENGTHS))

    assert user_error(run("export", tmp_path / "nosuch", "-o", tmp_path / "b")).startswith("no such model: ")
    (model / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert said().endswith("model_type 'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3")
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    assert "setting 'quantization_config' = " in said()
    (model / "config.json").write_text(json.dumps(config))
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1])
    assert "model.safetensors: damaged or cut short: " in said()
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "a Git LFS pointer, not the weights" in said()
    (model / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in said()
    (model / "config.json").unlink()
    assert "no config.json in this folder" in said()
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_export_as_json_is_one_object_on_stdout(run: Run, source: Path, tmp_path: Path, traced_once: None) -> None:
    code, out, err = run("export", source, "-o", tmp_path / "b", *LENGTHS, "--json")
    assert code == 0
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["rollkv export"] * 3
    summary = json.loads(out)
    assert (summary["max_lm_input_len"], summary["chunk_size"], summary["max_kvcache_len"]) == (120, 8, 160)
    assert summary["bundle"] == str(tmp_path / "b")
    on_disk = sum(item.stat().st_size for item in (tmp_path / "b").iterdir() if item.name != "manifest.json")
    assert summary["bytes"] == on_disk
    assert summary["mask_operand_bytes"] == 2 * 6 * 8 * 160


def test_export_says_when_there_is_no_tokenizer_and_when_the_mask_is_large(
    run: Run, source: Path, tmp_path: Path, traced_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollkv.export.audit.MASK_OPERAND_LIMIT", 4000)
    model = Path(shutil.copytree(source, tmp_path / "model", ignore=shutil.ignore_patterns("token*", "*.jinja")))
    code, out, err = run("export", model, "-o", tmp_path / "b", *LENGTHS)
    assert code == 0
    assert out.startswith(f"{tmp_path / 'b'}: L = 120, c = 8, C = 160, ")
    assert "the checkpoint has no tokenizer.json: this bundle takes token ids only" in err
    assert "the mask operand of a prefill run is 0.01 MiB" in err
    assert "no tokenizer.json, so text cannot become tokens" in user_error(run("run", tmp_path / "b", "--prompt", "x"))
    code, _, err = run("chat", tmp_path / "b")
    assert code == 2
    assert "no tokenizer.json" in err


# run


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
        (["--seed", "-1"], "--seed is -1; allowed: an integer >= 0, or None"),
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
    monkeypatch.setattr(Session, "_take", lambda *_: np.full(320, np.nan, np.float32))
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
    from rollkv.runtime.text import Chat

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


# info


def test_info_says_what_the_bundle_holds(run: Run, text_bundle: Bundle) -> None:
    code, out, err = run("info", text_bundle.path)
    assert (code, err) == (0, "")
    for words in (
        "tïny (llama), 2 layers, H = 36, V = 320",
        "L = 120 prompt tokens, c = 8 rows a run, C = 160 slots",
        "bskd, float32, 0.0 MiB",
        "prefill.onnx: prefill, 8 rows, logits of last, opset 17, IR ",
        "decode.onnx: decode, 1 rows, logits of last, opset 17, IR ",
        "EOS ids    2, 3",
    ):
        assert words in out
    code, out, err = run("info", text_bundle.path, "--json")
    assert (code, err) == (0, "")
    assert out == (text_bundle.path / "manifest.json").read_text(encoding="utf-8")


# verify


def test_verify_refuses_a_wrong_or_missing_reference_and_place(
    run: Run, text_bundle: Bundle, source: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = text_bundle.path
    assert user_error(run("verify", bundle)) == "the bundle was made from the folder 'tïny'; pass it with --reference"
    assert user_error(run("verify", bundle, "--reference", "/no")).startswith("no such model: '/no'")
    code, out, err = run("verify", bundle, "--reference", checkpoint("llama"))
    assert (code, out) == (2, "")
    assert "not the checkpoint of this bundle, which was made from 'tïny' (sha256 " in err.splitlines()[-1]
    for place, why in ((tmp_path / "no" / "f", "no such folder"), (tmp_path, "is a folder")):
        said = user_error(run("verify", bundle, "--reference", source, "--json-out", place))
        assert said == f"--json-out {place}: {why}"


def test_verify_proves_a_bundle_and_reports_as_table_and_json(
    run: Run, text_bundle: Bundle, source: Path, tmp_path: Path, traced_once: None
) -> None:
    code, out, err = run("verify", text_bundle.path, "--reference", source, "--json-out", tmp_path / "r.json")
    assert code == 0
    assert "BROKEN" not in out
    assert [line for line in err.splitlines() if not line.startswith("rollkv verify: ")] == []
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ok"] is True
    assert report["fault"] is None
    rungs = {row["rung"] for row in report["rows"]}
    assert rungs == {"torch", "traced", "graph", "runtime", "roll", "feeds"}
    assert {1, 7, 8, 9, 120} <= {row["n"] for row in report["rows"]}
    assert all(rung in out for rung in rungs)


def test_verify_names_the_rung_and_the_place_of_changed_weights(
    run: Run, copy: Path, source: Path, traced_once: None
) -> None:
    from onnx import load

    graph = load(copy / "decode.onnx", load_external_data=False).graph
    tensor = next(t for t in graph.initializer if t.name == "layers.1.attention.v.weight")
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    weights = np.fromfile(copy / "weights.bin", np.float32)
    weights[offset // 4 : offset // 4 + 12] *= 1.05
    weights.tofile(copy / "weights.bin")
    reseal(copy)
    code, out, err = run("verify", copy, "--reference", source, "--json")
    assert code == 1
    report = json.loads(out)
    assert report["ok"] is False
    first = next(row for row in report["rows"] if row["fault"])
    assert (first["rung"], first["first_layer"]) == ("traced", 1)
    assert all(row["fault"] is None for row in report["rows"] if row["rung"] == "torch")
    last = err.splitlines()[-1]
    assert last.startswith(
        "rollkv: verification failed: rung traced, prompt of 1: new keys or values of layer 1 are off"
    )


# As a process


def test_a_closed_pipe_ends_quietly(text_bundle: Bundle) -> None:
    command = [sys.executable, "-m", "rollkv.export.cli", "run", str(text_bundle.path), "--prompt", PROMPT]
    pipe = subprocess.Popen([*command, "--temperature", "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert pipe.stdout is not None
    assert pipe.stderr is not None
    pipe.stdout.read(1)
    pipe.stdout.close()
    said = pipe.stderr.read()
    assert pipe.wait(timeout=30) == 0
    assert said == b""
    pipe.stderr.close()


def test_a_full_device_and_a_closed_stdout_are_no_tracebacks(text_bundle: Bundle) -> None:
    with open("/dev/full", "wb") as full:
        done = process("info", text_bundle.path, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"rollkv: No space left on device\n"
    shell = ["sh", "-c", 'exec "$0" -m rollkv.export.cli info "$1" >&-', sys.executable, str(text_bundle.path)]
    done = subprocess.run(shell, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "environment", [{"LANG": "C", "LC_ALL": "C"}, {"PYTHONIOENCODING": "cp1252"}, {"PYTHONIOENCODING": "ascii"}]
)
def test_a_console_without_emoji_does_not_crash(text_bundle: Bundle, environment: dict[str, str]) -> None:
    script = (
        "import sys\nfrom rollkv.runtime import text\n"
        "text.Reply._run = lambda self, *_: iter(['🙂 grüße'])\n"
        "from rollkv.export.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "run", str(text_bundle.path), "--prompt", "🙂"],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\n")
    assert done.stdout.count(b"e") == 1


def test_the_bytes_of_a_prompt_survive_the_command_line(text_bundle: Bundle) -> None:
    done = process("run", text_bundle.path, "--prompt", b"\xff".decode("utf-8", "surrogateescape"), capture_output=True)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr == b"rollkv: the prompt holds byte 0xff at position 0; allowed: valid UTF-8\n"


def test_the_toy_models_are_of_every_family() -> None:
    from rollkv.models.families import FAMILIES

    assert {family for family, _ in SHAPES.values()} == set(FAMILIES)
