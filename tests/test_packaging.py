from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rollkv.export.cli import main

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("export", "models", "runtime")


def documented() -> dict[str, set[str]]:
    """Command -> flags and placeholders of the README's command block."""
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```")
    block = next(block for block in blocks if "\nrollkv export MODEL" in block)
    words: dict[str, set[str]] = {}
    for line in block.strip().splitlines():
        if line.startswith("rollkv "):
            command = line.split()[1]
        words.setdefault(command, set()).update(re.findall(r"(?<![\w-])(--?[A-Za-z][\w-]*|MODEL|BUNDLE)", line))
    return words


def modules() -> list[str]:
    """Every Python file of the package, as the wheel should call it."""
    return sorted(f"rollkv/{file.relative_to(ROOT)}" for top in TOPS for file in (ROOT / top).rglob("*.py"))


def packages() -> list[str]:
    """`packages` of pyproject.toml, which Python 3.10 has no reader for."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith('packages = ["rollkv.'))
    return [word.strip(' "') for word in line.partition("[")[2].rstrip("]").split(",")]


def test_the_packages_are_the_folders_that_hold_python_files() -> None:
    folders = {str(Path(name).parent).replace("/", ".") for name in modules()}
    assert sorted(packages()) == sorted(folders)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing is left in the checkout."""
    pytest.importorskip("build")
    work = tmp_path_factory.mktemp("wheel")
    (work / "source").mkdir()
    for name in (*TOPS, "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, work / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).is_file():
            shutil.copy(ROOT / name, work / "source" / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", work, work / "source"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(work.glob("*.whl"))


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = sorted(name for name in archive.namelist() if ".dist-info/" not in name)
    assert held == modules()


def test_the_wheel_runs_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        tmp_path / "lib",
        wheel,
    ]
    subprocess.run(install, check=True, capture_output=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(tmp_path / "lib")}

    def python(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    where = python("-c", "import rollkv.runtime as r, sys; print(r.__file__); print(r.Session, r.Chat)")
    assert where.startswith(str(tmp_path / "lib"))
    assert "rollkv.runtime.session.Session" in where
    assert "usage: rollkv" in python("-m", "rollkv.runtime.cli", "--help")
    assert "usage: rollkv run" in python("-m", "rollkv.runtime.cli", "run", "--help")
    script = tmp_path / "lib" / "bin" / "rollkv"
    assert "usage: rollkv" in python(str(script), "--help")


@pytest.mark.parametrize("command", ["chat", "export", "handoff", "info", "run", "verify"])
def test_the_help_names_every_flag_of_the_readme(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    words = capsys.readouterr().out.replace(",", " ").replace("{", " ").replace("}", " ").replace("[", " ").split()
    assert documented()[command]
    assert documented()[command] - set(words) == set()


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    listed = {line.split()[0] for line in out.splitlines() if re.match(r"    \w", line)}
    assert listed == set(documented())


def test_the_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom rollkv.export.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"numpy", "onnxruntime", "torch", "onnx", "rich", "tokenizers", "jinja2"} & set(done.stderr.split())
