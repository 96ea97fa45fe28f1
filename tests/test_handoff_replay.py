"""replay.py as a board engineer runs it: on outputs that are right, damaged, missing, cut off, not finite."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollkv.export import handoff
from rollkv.export.handoff import hand_over
from rollkv.export.targets import TARGETS
from rollkv.runtime.bundle import Bundle

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(text_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("replay")
    (base / "t.txt").write_text("the quick brown fox says hello to köln. " * 20, encoding="utf-8")
    hand_over(text_bundle, base / "t.txt", base / "folder", TARGETS["universal"], samples=1)
    return base / "folder"


@pytest.fixture
def outputs(folder: Path, tmp_path: Path) -> Path:
    """What a board without a fault writes."""
    for run in (folder / "golden").glob("*/*"):
        shutil.copytree(run / "outputs", tmp_path / "outputs" / run.parent.name / run.name)
    return tmp_path / "outputs"


@pytest.fixture
def replay(folder: Path) -> Replay:
    def call(*arguments: Any) -> tuple[int, str, str]:
        command = [sys.executable, str(folder / "replay.py"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    return call


def change(file: Path, how: Callable[[np.ndarray], np.ndarray]) -> None:
    np.save(file, how(np.load(file)))


def test_outputs_that_are_right_agree_in_layer_order(outputs: Path, replay: Replay) -> None:
    code, out, _ = replay(outputs)
    assert code == 0
    *lines, last = out.splitlines()
    assert last == "all outputs agree: cosine at least 0.9999, relative difference at most 0.0283"
    order = ["new_key_0", "new_value_0", "new_key_1", "new_value_1", "logits"]
    assert [line.split()[:2] for line in lines] == [
        [f"{graph}/{k}", name] for graph in ("prefill", "decode") for k in range(3) for name in order
    ]
    assert all("cosine 1.000000  max abs 0.00e+00  relative 0.00e+00" in line for line in lines)


@pytest.mark.parametrize("name", ["new_key_1", "new_value_0", "logits"])
def test_the_first_tensor_that_diverges_is_named(name: str, outputs: Path, replay: Replay) -> None:
    noise = np.random.default_rng(1)
    for later in ("logits", name):
        change(
            outputs / f"prefill/1/{later}.npy", lambda a: a + noise.normal(0, 0.1 * a.std(), a.shape).astype(a.dtype)
        )
    code, out, _ = replay(outputs)
    assert code == 1
    assert out.splitlines()[-1].startswith(f"the first tensor that diverges is {name} of prefill/1: cosine 0.99")
    assert [line.split()[:2] for line in out.splitlines() if "<--" in line] == [
        ["prefill/1", each] for each in dict.fromkeys([name, "logits"])
    ]


def test_a_wrong_size_of_numbers_diverges_though_its_cosine_is_one(outputs: Path, replay: Replay) -> None:
    change(outputs / "decode/2/new_value_1.npy", lambda a: a * np.float32(1.1))
    code, out, _ = replay(outputs)
    assert code == 1
    assert out.splitlines()[-1] == (
        "the first tensor that diverges is new_value_1 of decode/2: differs by 1.00e-01 of its size, above 0.0283"
    )
    assert replay(outputs, "--cosine", "0.99")[0] == 0


def test_rows_of_pads_are_not_compared(outputs: Path, replay: Replay) -> None:
    change(outputs / "prefill/0/new_key_1.npy", lambda a: np.concatenate((a[:, :3] * 50, a[:, 3:]), 1))
    assert replay(outputs)[0] == 0
    change(outputs / "prefill/0/new_key_1.npy", lambda a: np.concatenate((a[:, :3], a[:, 3:4] * 50, a[:, 4:]), 1))
    assert "the first tensor that diverges is new_key_1 of prefill/0" in replay(outputs)[1]


def test_missing_cut_off_and_unreadable_outputs_are_named(outputs: Path, replay: Replay) -> None:
    (outputs / "prefill/0/new_key_0.npy").unlink()
    whole = (outputs / "prefill/1/logits.npy").read_bytes()
    (outputs / "prefill/1/logits.npy").write_bytes(whole[:-8])
    (outputs / "prefill/2/logits.npy").write_bytes(whole[:20])
    array = np.load(outputs / "decode/0/logits.npy")
    (outputs / "decode/0/logits.npy").unlink()
    (outputs / "decode/0/logits.bin").write_bytes(array.tobytes()[:-4])
    change(outputs / "decode/1/logits.npy", lambda a: a[..., :-1])
    change(outputs / "decode/2/logits.npy", lambda a: a.astype(np.int8))
    code, out, _ = replay(outputs)
    assert code == 1
    assert (
        f"prefill/0                new_key_0                  <-- missing: no new_key_0.npy, .bin or .raw in {outputs}"
        in out
    )
    assert out.count("logits.npy cannot be read: ") == 2
    assert "logits.bin has 1276 bytes, want 1280 (float32) or 640 (float16)" in out
    assert "logits.npy has the shape [1, 1, 319], want [1, 1, 320]" in out
    assert "logits.npy holds int8, want float32 or float16" in out
    assert out.splitlines()[-1].startswith(
        "6 outputs could not be compared, the first is new_key_0 of prefill/0: missing"
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_named(bad: float, outputs: Path, replay: Replay) -> None:
    def spoil(array: np.ndarray) -> np.ndarray:
        array[0, 5, 1, 2] = bad
        return array

    change(outputs / "prefill/2/new_key_0.npy", spoil)
    code, out, _ = replay(outputs)
    assert code == 1
    assert (
        out.splitlines()[-1]
        == "the first tensor that diverges is new_key_0 of prefill/2: 1 of 96 numbers are not finite"
    )


@pytest.mark.parametrize("kind", ["<f4", "<f2"])
@pytest.mark.parametrize("suffix", ["bin", "raw"])
def test_raw_files_of_either_type_are_read(kind: str, suffix: str, outputs: Path, replay: Replay) -> None:
    for file in outputs.glob("*/*/*.npy"):
        file.with_suffix(f".{suffix}").write_bytes(np.load(file).astype(kind).tobytes())
        file.unlink()
    code, out, _ = replay(outputs)
    assert code == 0, out


def test_a_flat_array_and_one_with_moved_axes_are_read(outputs: Path, replay: Replay) -> None:
    for file in outputs.glob("*/*/*.npy"):
        change(file, lambda a: np.transpose(a, (0, 2, 3, 1)).ravel() if a.ndim == 4 else a)
    assert replay(outputs)[0] == 1
    assert replay(outputs, "--layout", "nhwc")[0] == 0
    for file in outputs.glob("*/*/new_*.npy"):
        array = np.load(file)
        graph = file.parent.parent.name
        np.save(file, array.reshape(1, 2, 6, 8 if graph == "prefill" else 1))
    assert replay(outputs, "--layout", "nhwc")[0] == 0


def test_one_graph_alone_can_be_compared(outputs: Path, replay: Replay) -> None:
    shutil.rmtree(outputs / "prefill")
    assert replay(outputs)[0] == 1
    assert replay(outputs, "--graph", "decode")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either OUTPUTS or --onnxruntime"),
        (["nowhere"], "OUTPUTS nowhere: no such folder"),
        ([".", "--onnxruntime"], "give either OUTPUTS or --onnxruntime"),
        ([".", "--cosine", "1.5"], "--cosine is 1.5, allowed: above 0, at most 1"),
        ([".", "--graph", "prefil"], "--graph prefil is not in this folder; it has prefill, decode"),
    ],
)
def test_a_wrong_command_is_said(arguments: list[str], said: str, replay: Replay) -> None:
    code, out, err = replay(*arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_a_folder_that_is_not_whole_is_no_fault_of_the_board(folder: Path, outputs: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "golden/prefill/1/outputs/logits.npy").unlink()
    (damaged / "golden/decode/0/inputs/input_ids.npy").write_bytes(b"x")
    command = [sys.executable, str(damaged / "replay.py")]
    for arguments, name in (
        (["--graph", "prefill", str(outputs)], "logits.npy"),
        (["--graph", "decode", "--onnxruntime"], "input_ids.npy"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"{name}: " in done.stderr
        assert done.stderr.rstrip().endswith("; check the folder with sha256sum -c SHA256SUMS")
    (damaged / "decode.onnx").write_bytes(b"x")
    done = subprocess.run([*command, "--graph", "decode", "--onnxruntime"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "decode.onnx: " in done.stderr


@pytest.mark.parametrize("script", ["replay.py", "build.py"])
def test_without_onnxruntime_it_is_said(script: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError")
    arguments = ["--onnxruntime"] if script == "replay.py" else ["--build", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(folder / script), *arguments],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "onnxruntime" in done.stderr
    assert "not installed: pip install onnxruntime" in done.stderr


def test_a_graph_that_was_changed_is_found_by_replaying_the_folder_itself(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    data = np.fromfile(copied / "weights.bin", np.float32)
    data[data.nonzero()[0][::5]] *= 2
    data.tofile(copied / "weights.bin")
    done = subprocess.run(
        [sys.executable, str(copied / "replay.py"), "--onnxruntime"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("the first tensor that diverges is new_key_0 of prefill/0")


@pytest.mark.parametrize("script", [path.name for path in handoff.KIT.glob("*.py") if path.name != "__init__.py"])
def test_a_script_of_the_kit_stands_alone_and_is_python_3_8(script: str) -> None:
    source = (handoff.KIT / script).read_text("utf-8")
    tree = ast.parse(source, feature_version=(3, 8))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(str(node.module))
    assert not {name for name in names if name.startswith("rollkv")}
    if script in ("replay.py", "build_generic.py", "jobs.py"):
        allowed = sys.stdlib_module_names | {"numpy", "onnxruntime", "jobs"}
        assert {name.partition(".")[0] for name in names} <= allowed


def test_the_tolerance_follows_the_precision(folder: Path) -> None:
    data = json.loads((folder / "handoff.json").read_text("utf-8"))
    assert data["tolerances"] == {"cosine": 0.9999, "relative": pytest.approx(2 * (2e-4) ** 0.5, abs=1e-6)}
