from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run, reseal, user_error

from rollkv.runtime.bundle import Bundle

PROMPT = "the quick brown fox"


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
        (
            ["export", "m", "-o", "b", "-c", "x"],
            "argument -c/--chunk-size: 'x' is no size; allowed: a whole number, or",
        ),
        (["export", "m", "-o", "b", "-c", "32,,64"], "argument -c/--chunk-size: '32,,64' is no size; allowed: a whole"),
        (["export", "m", "-o", "b", "-c", "３２"], "argument -c/--chunk-size: '３２' is no size; allowed: a whole"),
        (["export", "m", "-o", "b", "-c", "32, 64"], "argument -c/--chunk-size: '32, 64' is no size; allowed: a whole"),
        (["export", "m", "-o", "b", "--speculate", "1.5"], "argument --speculate: '1.5' is no whole number; see"),
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

    monkeypatch.setattr("rollkv.runtime.info.open_bundle", fail)
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

    monkeypatch.setattr("rollkv.runtime.info.open_bundle", fail)
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
        ("onnxscript", ["export", "{source}", "-o", "{new}"]),
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


@pytest.mark.parametrize("module", ["onnxsim", "transformers"])
def test_a_module_that_is_needed_late_is_named_and_leaves_nothing(
    run: Run, text_bundle: Bundle, source: Path, tmp_path: Path, module: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    if module == "transformers":
        code, out, err = run("verify", text_bundle.path, "--reference", source)
    else:
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
        (["-c", 0], "-c is 0, must be at least 1"),
        (["-c", "8,0"], "-c is 0, must be at least 1"),
        (["-c", "32,32"], "-c names 32 twice; give each size once"),
        (["-c", "8,9999"], "-c is 9999, more than -C 160; allowed: 1 .. 160"),
        (["--speculate", 1], "--speculate is 1, allowed: 2 .. 160, which is -C"),
        (["--speculate", 161], "--speculate is 161, allowed: 2 .. 160, which is -C"),
        (["--opset", 12], "argument --opset: invalid choice: 12 (choose from"),
        (["--kv-layout", "bkds"], "argument --kv-layout: invalid choice: 'bkds' (choose from"),
        (["--ids", "int8"], "argument --ids: invalid choice: 'int8' (choose from"),
        (["--head", "some"], "argument --head: invalid choice: 'some' (choose from"),
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
    (model / "config.json").write_text(json.dumps({**config, "model_type": "gpt_oss"}))
    assert "model_type 'gpt_oss' is not supported; supported: arcee, cohere, " in said()
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


def test_export_as_json_is_one_object_on_stdout(run: Run, source: Path, tmp_path: Path) -> None:
    code, out, err = run("export", source, "-o", tmp_path / "b", *LENGTHS, "--json")
    assert code == 0
    steps = ["trace", "passes prefill", "passes decode", "hashes"]
    assert err.splitlines() == [f"rollkv export: {step}" for step in steps]
    summary = json.loads(out)
    assert (summary["max_lm_input_len"], summary["chunk_size"], summary["max_kvcache_len"]) == (120, 8, 160)
    assert summary["bundle"] == str(tmp_path / "b")
    on_disk = sum(item.stat().st_size for item in (tmp_path / "b").iterdir() if item.name != "manifest.json")
    assert summary["bytes"] == on_disk
    assert summary["mask_operand_bytes"] == 2 * 6 * 8 * 160


def test_the_mask_operand_is_that_of_the_widest_mask_that_a_graph_takes(
    run: Run, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    code, out, _ = run("export", checkpoint("mistral-window"), "-o", tmp_path / "b", *LENGTHS, "--json")
    assert code == 0
    assert json.loads(out)["mask_operand_bytes"] == 2 * 6 * 8 * (9 - 1 + 8)  # every layer has a window of 9


def test_export_says_when_there_is_no_tokenizer_and_when_the_mask_is_large(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# info


def test_info_says_what_the_bundle_holds(run: Run, text_bundle: Bundle) -> None:
    code, out, err = run("info", text_bundle.path)
    assert (code, err) == (0, "")
    for words in (
        "tïny (llama), 2 layers, H = 36, V = 320",
        "L = 120 prompt tokens, c = 8 rows a run, C = 160 slots",
        "bskd, float32, 0.0 MiB",
        "prefill.onnx: prefill, 8 rows, 160 slots, logits of last, opset 17, IR ",
        "decode.onnx: decode, 1 rows, 160 slots, logits of last, opset 17, IR ",
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
    run: Run, text_bundle: Bundle, source: Path, tmp_path: Path
) -> None:
    code, out, err = run("verify", text_bundle.path, "--reference", source, "--json-out", tmp_path / "r.json")
    assert code == 0
    assert "BROKEN" not in out
    assert [line for line in err.splitlines() if not line.startswith("rollkv verify: ")] == []
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ok"] is True
    assert report["fault"] is None
    rungs = {row["rung"] for row in report["rows"]}
    assert rungs == {"files", "torch", "traced", "graph", "runtime", "roll", "feeds"}
    assert {1, 7, 8, 9, 120} <= {row["n"] for row in report["rows"]}
    assert all(rung in out for rung in rungs)


def test_verify_names_the_rung_and_the_place_of_changed_weights(run: Run, copy: Path, source: Path) -> None:
    from onnx import load

    graph = load(copy / "decode.onnx", load_external_data=False).graph
    tensor = next(t for t in graph.initializer if t.name == "layers__1__attention__v__weight")
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    weights = np.fromfile(copy / "weights.bin", np.float32)
    weights[offset // 4 : offset // 4 + 12] *= 1.05
    weights.tofile(copy / "weights.bin")
    reseal(copy)
    code, out, err = run("verify", copy, "--reference", source, "--json")
    assert code == 1
    report = json.loads(out)
    assert report["ok"] is False
    assert [row["rung"] for row in report["rows"]] == ["files"]
    fault = report["fault"]
    assert fault.startswith("rung files, weights: layers.1.")
    assert fault.endswith(" differs from the checkpoint")
    assert err.splitlines()[-1] == f"rollkv: verification failed: {fault}"


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


def test_ctrl_c_inside_exec_ends_with_130_too(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom rollkv.runtime import bundle\nfrom rollkv.export.cli import main\n"
        "bundle.open_bundle = lambda path: exec('raise KeyboardInterrupt')\n"
        "sys.exit(main(['info', 'x']))\n"
    )
    (tmp_path / "entry.py").write_text(script)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "entry"], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


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
        "import sys\nfrom rollkv.runtime import chat\n"
        "chat.Reply._run = lambda self, *_: iter(['🙂 grüße'])\n"
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


def test_a_closed_stderr_sends_nothing_to_stdout(text_bundle: Bundle, source: Path, tmp_path: Path) -> None:
    def shell(arguments: str) -> subprocess.CompletedProcess[str]:
        line = f"exec {sys.executable} -m rollkv.export.cli {arguments} 2>&-"
        return subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, text=True, check=False, timeout=120)

    done = shell("info /nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    done = shell(f"verify '{text_bundle.path}' --reference /nowhere")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_flag_is_not_taken_by_its_beginning(run: Run, text_bundle: Bundle) -> None:
    code, out, err = run("run", text_bundle.path, "--prompt", "x", "--max-new", 3)
    assert (code, out) == (2, "")
    assert "unrecognized arguments: --max-new" in err
