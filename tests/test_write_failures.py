"""An export that fails or is stopped: the previous bundle stays, and nothing else is left."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundle_exports import LENGTHS, SETTINGS, command, content
from conftest import export

from rollkv.export import background, pipeline, write
from rollkv.export.audit import AuditError
from rollkv.export.cli import main
from rollkv.export.trace import TraceError
from rollkv.runtime.bundle import open_bundle


def fail_with(kind: type[BaseException], *arguments: Any) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise kind(*arguments)

    return fail


@pytest.mark.parametrize(
    ("place", "failure", "code", "said"),
    [
        ("pipeline.audit_graph", lambda *_: ["op Loop is not allowed", "input x is not used"], 1,
         "prefill.onnx: 2 findings: op Loop is not allowed; input x is not used"),
        ("background.write_weights", fail_with(OSError, errno.EIO, "Input/output error"), 1,
         "{final}: Input/output error"),
        ("pipeline.write_manifest", fail_with(OSError, errno.ENOSPC, "No space left on device"), 1,
         "{final}: No space left on device"),
        ("pipeline.file_infos", fail_with(KeyboardInterrupt), 130, ""),
    ],
)  # fmt: skip
def test_a_failed_export_leaves_the_previous_bundle_and_nothing_else(
    previous: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    failure: Any,
    code: int,
    said: str,
) -> None:
    before = content(previous)
    capsys.readouterr()
    monkeypatch.setattr(f"rollkv.export.{place}", failure)
    for final in (previous, previous.parent / "new" / "deep" / "bundle"):
        assert main(["export", str(source), "-o", str(final), *LENGTHS]) == code
        out, err = capsys.readouterr()
        assert out == ""
        last = err.splitlines()[-1] if said else ""
        assert last == (f"rollkv: {said.format(final=final)}" if said else "")
    assert content(previous) == before
    assert [item.name for item in previous.parent.iterdir()] == ["bundle"]


def test_a_trace_that_fails_stops_the_weights_on_their_way(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is begun after the failure, and the folder goes only when nothing writes into it any more."""
    begun, failed = threading.Event(), threading.Event()
    seen: list[str] = []

    class Slow:
        name, origin, shape = "slow", "slow", (4,)

        def copy_to(self, target: np.ndarray) -> None:
            begun.set()
            assert failed.wait(30)
            target[...] = 1
            seen.append("first")

    class Never(Slow):
        name = "never"

        def copy_to(self, target: np.ndarray) -> None:
            seen.append("second")

    def fails(*_: Any) -> Any:
        assert begun.wait(30)
        threading.Timer(0.2, failed.set).start()  # while the failure is on its way out
        raise TraceError("torch cannot export it")

    monkeypatch.setattr(pipeline, "graph_weights", lambda *_: [Slow(), Never()])
    monkeypatch.setattr(pipeline, "trace_graphs", fails)
    with pytest.raises(TraceError, match="torch cannot export it"):
        export(source, tmp_path / "bundle", **SETTINGS)
    assert seen == ["first"]
    assert list(tmp_path.iterdir()) == []


def test_weights_that_fail_end_the_export_before_the_next_graph(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(background, "write_weights", fails)
    monkeypatch.setattr(pipeline, "run_passes", lambda model, _: made.append("passes") or model)
    with pytest.raises(OSError, match="No space left"):
        export(source, tmp_path / "bundle", **SETTINGS)
    assert made == []
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_old_bundle_is_removed_leaves_none_of_it(
    previous: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, calls = shutil.rmtree, []

    def interrupted(*arguments: Any, **more: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        remove(*arguments, **more)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    assert main(["export", str(source), "-o", str(previous), *LENGTHS]) == 130
    open_bundle(previous).check()
    assert [item.name for item in previous.parent.iterdir()] == ["bundle"]


def test_a_rejected_graph_carries_all_findings(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "trace_graphs", lambda *_: [onnx.ModelProto()] * 2)
    monkeypatch.setattr(pipeline, "run_passes", lambda model, _: model)
    with pytest.raises(AuditError) as caught:
        export(source, tmp_path / "bundle", **SETTINGS)
    assert len(caught.value.findings) > 2
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_leaves_the_previous_bundle(
    previous: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(previous)
    monkeypatch.setattr(os, "posix_fallocate", fail_with(OSError, errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert main(["export", str(source), "-o", str(previous), *LENGTHS]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"rollkv: {previous}: No space left on device"
    assert content(previous) == before
    assert [item.name for item in previous.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("size", ["16k", "128k"])  # too small for the graphs; too small for the weights
def test_a_small_file_system_stays_empty(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no right to mount a file system")
    try:
        assert main(["export", str(source), "-o", str(mount / "a" / "bundle"), *LENGTHS]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines()[-1] == f"rollkv: {mount / 'a' / 'bundle'}: No space left on device"
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", mount], check=True)


def test_ctrl_c_leaves_the_previous_bundle_and_no_other_file(previous: Path, source: Path) -> None:
    before = content(previous)
    with subprocess.Popen(
        command("export", source, "-o", previous, *LENGTHS, "--no-simplify"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stderr is not None
        assert running.stderr.readline() == "rollkv export: trace\n"
        assert len(list(previous.parent.iterdir())) == 2
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert content(previous) == before
    assert [item.name for item in previous.parent.iterdir()] == ["bundle"]


def test_signals_that_keep_coming_do_not_keep_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while tracing, and again at each step of the clean-up."""
    remove, calls = shutil.rmtree, []

    def interrupted(*arguments: Any, **more: Any) -> None:
        calls.append(1)
        if len(calls) < 4:
            raise KeyboardInterrupt
        remove(*arguments, **more)

    monkeypatch.setattr(shutil, "rmtree", interrupted)

    def stopped() -> None:
        with write.replacing_folder(tmp_path / "a" / "bundle") as folder:
            (folder / "weights.bin").write_bytes(b"some")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert len(calls) == 4
    assert list(tmp_path.iterdir()) == []


def test_a_second_ctrl_c_does_not_let_the_weights_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = background.WeightsWriter(tmp_path, [], {}, {}, {}, 0)
    asked: list[float | None] = []

    def running(seconds: float | None) -> bool:
        asked.append(seconds)
        if seconds is None and asked.count(None) < 3:
            raise KeyboardInterrupt
        return asked.count(None) < 3

    monkeypatch.setattr(writer._work, "running", running)
    with pytest.raises(KeyboardInterrupt), writer:
        raise TraceError("torch cannot export it")
    assert asked.count(None) == 3
