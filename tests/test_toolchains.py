"""The data of the toolchains, and `rollkv toolchain list` and `install`, without a tool and without the index."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from commands import Run, user_error
from toolchain_folders import make_environment

from rollkv.export import toolchains
from rollkv.export.targets import TARGETS
from rollkv.export.toolchain_try import KIT
from rollkv.export.toolchains import TOOLCHAINS, python_of, toolchain_of

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLKV_TOOLCHAINS", str(tmp_path / "tools"))
    return tmp_path / "tools"


@pytest.fixture
def any_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every toolchain takes this Python."""
    from dataclasses import replace

    changed = {name: replace(toolchain, pythons=(HERE,)) for name, toolchain in TOOLCHAINS.items()}
    monkeypatch.setattr(toolchains, "TOOLCHAINS", changed)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run; `venv` makes the interpreter, and the tool's package leaves its dist-info."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if command[1:3] == ["-m", "venv"]:
            python_of(Path(command[-1])).parent.mkdir(parents=True, exist_ok=True)
            python_of(Path(command[-1])).touch()
        elif "pip" in command:
            site = Path(command[0]).parent.parent / "lib" / "python3.11" / "site-packages"
            name, _, version = command[-1].replace("-", "_").partition("==")
            (site / f"{name}-{version}.dist-info").mkdir(parents=True, exist_ok=True)
            if name == "tpu_mlir":
                (site / "tpu_mlir" / "lib" / "third_party").mkdir(parents=True)
                for library in ("libc.so.6", "libm.so.6", "libz.so.1"):
                    (site / "tpu_mlir" / "lib" / "third_party" / library).touch()
        return subprocess.CompletedProcess(command, 0, "torch-2.13.0+cu130", "")

    monkeypatch.setattr(toolchains.subprocess, "run", run)
    monkeypatch.setattr(toolchains, "_version", lambda python: HERE)
    return calls


@pytest.mark.parametrize("toolchain", TOOLCHAINS.values(), ids=str)
def test_every_pin_is_exact_and_the_tool_comes_last(toolchain: toolchains.Toolchain) -> None:
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", package) for package in toolchain.packages)
    names = [package.partition("==")[0].lower() for package in toolchain.packages]
    assert len(set(names)) == len(names)
    assert "numpy" in names
    assert toolchain.packages[-1] == toolchain.requirement
    assert all(re.fullmatch(r"3\.\d+", version) for version in toolchain.pythons)
    assert toolchain.megabytes > 0
    assert toolchain.licence
    assert (KIT / toolchain.script).is_file()


def test_every_tool_of_a_target_has_a_toolchain_of_that_version() -> None:
    for target in TARGETS.values():
        if target.tool is not None:
            found = toolchain_of(target.tool)
            assert found is not None
            assert found.requirement == target.tool
    assert toolchain_of("hbdk==1.0") is None


def test_the_list_says_size_licence_and_what_is_installed(run: Run, home: Path) -> None:
    make_environment(home / "mnn", TOOLCHAINS["mnn"])
    code, out, _ = run("toolchain", "list")
    assert code == 0
    assert f"MNN==3.6.1, Python 3.11 or 3.12 or 3.10 or 3.13, {TOOLCHAINS['mnn'].megabytes} MB" in out
    assert "for work with Rockchip products only" in out
    assert f"not installed in {home / 'rknn'}" in out
    assert f" installed in {home / 'mnn'}" in out
    rows = json.loads(run("toolchain", "list", "--json")[1])
    assert {row["name"]: row["installed"] for row in rows} == {name: name == "mnn" for name in TOOLCHAINS}


def test_an_unknown_toolchain_is_refused_with_those_there_are(run: Run) -> None:
    message = user_error(run("toolchain", "install", "hailo", "--yes"))
    assert message == "toolchain 'hailo' is unknown; allowed: rknn, qnn, sophgo, openvino, mnn"


def test_without_yes_size_and_licence_are_said_and_nothing_is_installed(run: Run, home: Path, called: Any) -> None:
    message = user_error(run("toolchain", "install", "rknn"))
    assert message == (
        f"rknn-toolkit2==2.5.0 takes 1500 MB in {home / 'rknn'}; licence: Rockchip's own: for work with Rockchip "
        "products only; nothing was installed: say --yes to install it"
    )
    assert not called
    assert not home.exists()


def test_install_takes_torch_from_the_cpu_index_and_the_tool_last(
    run: Run, home: Path, called: list[list[str]], any_python: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchains.sys, "platform", "linux")
    code, _, err = run("toolchain", "install", "rknn", "--yes")
    assert code == 0, err
    assert "1500 MB" in err
    assert "licence: Rockchip's own" in err
    assert called[0] == [sys.executable, "-m", "venv", "--clear", str(home / "rknn")]
    torch, rest, last = called[-3:]
    assert torch[-3:] == ["--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0"]
    assert set(rest) > {"numpy==1.26.4", "onnx==1.18.0"}
    assert last[-1] == "rknn-toolkit2==2.5.0"
    assert all("--no-deps" in command for command in (torch, rest, last))
    before = len(called)
    code, _, err = run("toolchain", "install", "rknn", "--yes")
    assert code == 0
    assert f"rknn-toolkit2==2.5.0 is installed in {home / 'rknn'}" in err
    assert len(called) == before


def test_an_index_for_torch_can_be_given(run: Run, called: list[list[str]], any_python: None) -> None:
    code, _, err = run("toolchain", "install", "rknn", "--yes", "--torch-index", "https://example.org/whl")
    assert code == 0, err
    assert [command[-2] for command in called if command[-1] == "torch==2.13.0"] == ["https://example.org/whl"]


def test_libraries_of_a_wheel_that_break_a_newer_system_are_moved_away(
    run: Run, home: Path, called: Any, any_python: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchains.sys, "platform", "linux")
    assert run("toolchain", "install", "sophgo", "--yes")[0] == 0
    left = home / "sophgo" / "lib" / "python3.11" / "site-packages" / "tpu_mlir" / "lib" / "third_party"
    assert [file.name for file in left.iterdir()] == ["libz.so.1"]
    (left / "libm.so.6").touch()
    message = user_error(run("toolchain", "try", make_handoff(home / "f", "tpu-mlir==1.30.2")))
    assert "(tpu_mlir/lib/third_party/libm.so.6 was not moved away): rollkv toolchain install sophgo" in message


def make_handoff(folder: Path, tool: str) -> Path:
    from toolchain_folders import make_folder

    return make_folder(folder, tool=tool)


def test_a_python_of_another_version_is_refused(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchains.sys, "platform", "linux")
    monkeypatch.setattr(toolchains, "_version", lambda python: "3.9")
    message = user_error_after_terms(run("toolchain", "install", "sophgo", "--yes", "--python", "/x/python"))
    assert message == "--python /x/python: is Python 3.9; sophgo needs 3.10"
    assert not home.exists()


def test_a_python_that_is_none_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchains.sys, "platform", "linux")
    message = user_error_after_terms(run("toolchain", "install", "mnn", "--yes", "--python", tmp_path / "no"))
    assert message == f"--python {tmp_path / 'no'}: is no Python; mnn needs 3.11 or 3.12 or 3.10 or 3.13"


def test_where_no_python_fits_the_flag_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchains.sys, "platform", "linux")
    monkeypatch.setattr(toolchains.sys, "version_info", (3, 9, 0))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    message = user_error_after_terms(run("toolchain", "install", "sophgo", "--yes"))
    assert message == "toolchain sophgo needs Python 3.10, which is not on the PATH: pass --python PATH"


def test_a_system_without_packages_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchains.sys, "platform", "darwin")
    message = user_error_after_terms(run("toolchain", "install", "rknn", "--yes"))
    assert message == "toolchain rknn has no packages for darwin; there are some for linux"


def test_a_folder_of_someone_else_is_left_alone(run: Run, tmp_path: Path, called: Any, any_python: None) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    message = user_error_after_terms(run("toolchain", "install", "mnn", "--yes", "--into", tmp_path / "mine"))
    assert "was not made by rollkv toolchain install; take another folder with --into" in message
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    assert not called


def test_a_failing_pip_leaves_no_environment_and_is_quoted(
    run: Run, home: Path, any_python: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        errors = "" if "venv" in command else "ERROR: no route to the index\nERROR: No matching distribution\nbye\n"
        return subprocess.CompletedProcess(command, bool(errors), "", errors)

    monkeypatch.setattr(toolchains.subprocess, "run", fail)
    code, out, err = run("toolchain", "install", "mnn", "--yes")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"rollkv: pip could not make {home / 'mnn'}: No matching distribution"
    assert not (home / "mnn").exists()


def test_a_package_that_installs_something_else_is_noticed(
    run: Run, home: Path, called: Any, any_python: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchains, "_run", lambda command, what, environment: None)
    code, _, err = run("toolchain", "install", "mnn", "--yes")
    assert code == 1
    assert "toolchain mnn: pip ended well, but there is no Python in it" in err


def test_a_full_disk_is_said_before_and_during_an_install(
    run: Run, home: Path, any_python: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 40, 1 << 40, 5 << 20))
        code, _, err = run("toolchain", "install", "mnn", "--yes")
        assert code == 1
        assert f"{home / 'mnn'}: No space left: mnn takes {TOOLCHAINS['mnn'].megabytes} MB, 5 MB are free" in err
        assert not (home / "mnn").exists()

    def full(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        errors = "" if "venv" in command else "ERROR: Could not install: [Errno 28] No space left on device\n"
        return subprocess.CompletedProcess(command, bool(errors), "", errors)

    monkeypatch.setattr(toolchains.subprocess, "run", full)
    code, _, err = run("toolchain", "install", "mnn", "--yes")
    assert code == 1
    assert err.splitlines()[-1] == f"rollkv: {home / 'mnn'}: No space left on device"
    assert not (home / "mnn").exists()


def test_environments_are_in_the_cache_unless_told_otherwise(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLKV_TOOLCHAINS")
    monkeypatch.setenv("ROLLKV_CACHE", str(tmp_path / "cache"))
    assert os.fspath(tmp_path / "cache" / "toolchains" / "qnn") in run("toolchain", "list")[1]


def user_error_after_terms(result: tuple[int, str, str]) -> str:
    """The line of a user error behind the line with size and licence."""
    code, out, err = result
    assert (code, out) == (2, "")
    terms, last = err.splitlines()
    assert "licence:" in terms
    return last.removeprefix("rollkv: ")
