"""What an export writes: the same bytes everywhere, what is at -o before and after, values of the weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundle_exports import CHECKOUT, LENGTHS, SETTINGS, command, content
from conftest import export, make_checkpoint
from test_checkpoint import change_tensors

import rollkv.export
from rollkv.export.cli import main
from rollkv.runtime.bundle import Bundle, open_bundle

# Identical bytes


@pytest.fixture(scope="module")
def other_process(text_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Path]]:
    """The same export in a process of its own, in another folder and environment; waits for it when called."""
    root = tmp_path_factory.mktemp("elsewhere with spaces")
    copy = Path(shutil.copytree(text_source, root / "other place" / text_source.name))
    for item in copy.iterdir():
        os.utime(item, (1, 1))
    (root / "tmp").mkdir()
    other = {**os.environ, "PYTHONHASHSEED": "77", "TMPDIR": str(root / "tmp"), "TZ": "Asia/Tokyo", "LANG": "C"}
    paths = os.environ.get("PYTHONPATH", "")
    other["PYTHONPATH"] = os.pathsep.join(str(Path(part).absolute()) for part in paths.split(os.pathsep) if part)
    whole = subprocess.Popen(
        command("export", Path("other place", text_source.name), "-o", "b/ü/bundle", *LENGTHS),
        cwd=root, env=other, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def finish() -> Path:
        out, err = whole.communicate(timeout=120)
        assert whole.returncode == 0, err
        assert out.startswith("b/ü/bundle: L = 120, c = 8, C = 160, ")
        assert not list((root / "tmp").iterdir())
        return root / "b" / "ü" / "bundle"

    yield finish
    if whole.poll() is None:
        whole.kill()
        whole.wait()


def test_two_folders_and_two_processes_give_the_same_bytes(other_process: Callable[[], Path], previous: Path) -> None:
    here, there = content(previous), content(other_process())
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name]] == []


def test_a_bundle_holds_no_path_of_the_machine(previous: Path, source: Path) -> None:
    homes = [
        CHECKOUT,
        Path(rollkv.export.__path__[0]).parent,
        source,
        source.parent,
        previous.parent,
        Path(onnx.__file__).parent,
    ]
    words = [os.fsencode(path) for path in homes] + [b"site-packages", b".py", b"/tmp", b"/home", b"/root"]
    for name, data in content(previous).items():
        if name.endswith(".onnx") or name == "manifest.json":
            assert not [word for word in words if word in data], name


def test_a_bundle_holds_the_files_that_its_manifest_lists_and_no_more(previous: Path, source: Path) -> None:
    listed = json.loads((previous / "manifest.json").read_text())["files"]
    held = content(previous)
    assert held.keys() == {*listed, "manifest.json"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert held[name] == (source / name).read_bytes()
    assert all(len(held[name]) == info["size"] for name, info in listed.items())
    open_bundle(previous).check()


def test_a_bundle_can_be_read_by_whom_the_umask_lets(source: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        export(source, tmp_path / "bundle", **SETTINGS)
    finally:
        os.umask(before)
    assert (tmp_path / "bundle").stat().st_mode & 0o777 == 0o755
    assert all(item.stat().st_mode & 0o777 == 0o644 for item in (tmp_path / "bundle").iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_is_stored_once(tied: bool, tmp_path: Path) -> None:
    wide = {"vocab_size": 2048, "hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 1}
    folder = make_checkpoint(tmp_path / "wide", "llama", **wide, tie_word_embeddings=tied)
    from safetensors.numpy import load_file

    unique = sum(4 * tensor.size for tensor in load_file(folder / "model.safetensors").values())
    bundle = export(folder, tmp_path / "bundle", simplify=False, chunk_size=1)  # both graphs are one trace
    graphs = sum((bundle.path / graph.file).stat().st_size for graph in bundle.manifest.graphs)
    total = sum(item.stat().st_size for item in bundle.path.iterdir())
    assert unique < total <= 1.02 * unique + graphs
    assert bundle.manifest.weights.unique_bytes <= 1.01 * unique
    assert graphs < 100_000


# What is at -o


def test_a_smaller_export_leaves_nothing_of_a_larger_one(previous: Path, source: Path) -> None:
    (previous / "prefill_c512.onnx").write_bytes(b"of a larger export")
    with (previous / "weights.bin").open("ab") as file:
        file.write(b"\0" * 100_000)
    assert main(["export", str(source), "-o", str(previous), *LENGTHS]) == 0
    open_bundle(previous).check()
    assert "prefill_c512.onnx" not in content(previous)
    assert [item.name for item in previous.parent.iterdir()] == ["bundle"]


def refused_output(source: Path, output: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["export", str(source), "-o", str(output), *LENGTHS]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("rollkv: ").rstrip("\n")


def test_a_file_or_a_folder_that_is_no_bundle_is_not_touched(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "letter.txt").write_text("mine")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "manifest.json").write_text('{"name": "a web page", "icons": []}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    (tmp_path / "link").symlink_to("folder")
    before = content(tmp_path)
    said = "exists and is not a bundle; give another name or remove it"
    for name, why in (
        ("file", "exists and is not a folder"),
        ("folder", said),
        ("page", said),
        ("broken", said),
        ("link", "is a symbolic link; give the name of the folder itself"),
        ("file/bundle", f"{tmp_path / 'file'} is not a folder"),
        ("file/more/bundle", f"{tmp_path / 'file'} is not a folder"),
        ("folder/..", "must end in the name of a folder"),
    ):
        assert refused_output(source, tmp_path / name, capsys) == f"-o {tmp_path / name}: {why}"
        assert content(tmp_path) == before
    assert refused_output(source, source, capsys).endswith(said)


def test_the_current_folder_is_no_name_for_a_bundle(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".", "", "./"):
        assert refused_output(source, name, capsys) == "-o .: must end in the name of a folder"
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_may_become_a_bundle(source: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    assert main(["export", str(source), "-o", str(tmp_path / "bundle"), *LENGTHS]) == 0
    open_bundle(tmp_path / "bundle").check()


# Values of the weights


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((value, "holds a value that is not finite; is the file damaged?") for value in (np.nan, np.inf, -np.inf)),
        (65600.0, "reaches 65600; allowed: up to 65504, as in float16"),
        (-1e30, "reaches 1e+30; allowed: up to 65504, as in float16"),
    ],
)
def test_a_weight_that_is_not_finite_or_too_large_is_named(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    value: float,
    said: str,
) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    change_tensors(
        folder / "model.safetensors",
        lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].__setitem__((3, 4), value),
    )
    assert main(["export", str(folder), "-o", str(tmp_path / "bundle"), *LENGTHS]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (f"rollkv: {folder}: tensor model.layers.1.mlp.down_proj.weight {said}")
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_the_largest_float16_is_allowed(source: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    change_tensors(folder / "model.safetensors", lambda t: t["model.norm.weight"].__setitem__(0, -65504.0))
    opened: Bundle = export(folder, tmp_path / "bundle", **SETTINGS)
    opened.check()


def test_swapping_works_where_the_system_cannot_do_it_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollkv.export import write as writing

    monkeypatch.setattr(writing.ctypes, "CDLL", lambda *_, **__: object())
    old = tmp_path / "bundle"
    old.mkdir()
    (old / "manifest.json").write_text('{"format": 1, "rollkv": "0", "graphs": []}')
    with writing.replacing_folder(old) as work:
        (work / "manifest.json").write_text("new")
    assert content(tmp_path) == {"bundle/manifest.json": b"new"}
    (old / "manifest.json").write_text('{"format": 1, "rollkv": "0", "graphs": []}')
    before = content(tmp_path)
    real = os.rename

    def rename(a: Any, b: Any) -> None:
        if str(a).endswith(".partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(a, b)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output error"), writing.replacing_folder(old) as work:
        (work / "manifest.json").write_text("newer")
    assert content(tmp_path) == before
