"""make: what is given reaches the command unchanged, and the folders are named after the model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GIVEN = ("MODEL", "OUT", "BUNDLE", "PROMPT", "REFERENCE", "L", "CHUNK", "C")  # `make test` exports them
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def make(tmp_path: Path):
    """make(target, VARIABLE=value): the arguments of each call of the command, whose place a script takes."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = tmp_path / "rollkv"
    log = tmp_path / "log"
    command.write_text(
        f"#!{sys.executable}\nimport json, sys\nopen({str(log)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    command.chmod(0o755)
    (tmp_path / "ready").touch()

    def call(target: str, **variables: str) -> list[list[str]]:
        words = [f"{name}={value}" for name, value in variables.items()]
        settings = [f"VENV={tmp_path}", f"ROLLKV={command}"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS")) and k not in GIVEN}
        subprocess.run(
            ["make", "-s", "-C", ROOT, target, *settings, *words], check=True, env=clean, capture_output=True
        )
        lines = log.read_text().splitlines()
        log.unlink()
        return [json.loads(line) for line in lines]

    return call


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ('costs $$5 "now"', 'costs $5 "now"'),
        ("it's\ntwo lines", "it's\ntwo lines"),
        ("back\\slash `id` ;|&", "back\\slash `id` ;|&"),
        ("--chat", "--chat"),
        ("北京 🙂", "北京 🙂"),
    ],
)
def test_a_prompt_reaches_the_command_unchanged(make, given: str, prompt: str) -> None:
    assert make("run", BUNDLE="a b", PROMPT=given) == [["run", "a b", f"--prompt={prompt}"]]


def test_lengths_and_folders_reach_export(make) -> None:
    got = make("export", MODEL="some dir/x", L="1216", CHUNK="128", C="1344", OUT="out $$(id)")
    assert got == [["export", "some dir/x", "-o", "out $(id)", "-L", "1216", "-c", "128", "-C", "1344"]]
    assert make("export", MODEL="x", L="$$(id)")[0][-1] == "$(id)"
    assert make("export", MODEL="x", CHUNK="32,128")[0][-2:] == ["-c", "32,128"]


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("qwen2.5-coder-0.5b", "bundles/qwen2.5-coder-0.5b"),
        ("models/Qwen2.5-1.5B/", "bundles/Qwen2.5-1.5B"),
        ("files/tiny.Q4_1.gguf", "bundles/tiny.Q4_1"),
    ],
)
def test_the_default_folder_is_named_after_the_whole_model(make, model: str, folder: str) -> None:
    assert make("export", MODEL=model) == [["export", model, "-o", folder]]


def test_demo_exports_answers_and_verifies_one_bundle(make) -> None:
    calls = make("demo")
    assert [call[0] for call in calls] == ["export", "info", "run", "verify"]
    assert calls[0][1:] == ["smollm2-135m", "-o", "bundles/smollm2-135m"]
    assert {call[1] for call in calls[1:]} == {"bundles/smollm2-135m"}
    assert make("info") == [["info", "bundles/smollm2-135m"]]
