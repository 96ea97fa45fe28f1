"""Every calibration format, read back as its tool reads it, gives the recorded outputs bit for bit."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from rollkv.export.handoff_data import WRITERS, SampleWriter, save_npy
from rollkv.export.handoff_runs import Recorded, Tap, calibration_stops, record
from rollkv.export.handoff_text import read_corpus
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle, GraphInfo
from rollkv.runtime.loaded import LoadedBundle

Sample = dict[str, np.ndarray]
KINDS = {"float32": "<f4", "float16": "<f4", "int32": "<i4", "int64": "<i4"}


def read_rknn(root: Path, writer: SampleWriter, graph: GraphInfo) -> Iterator[Sample]:
    """A line per sample, the inputs in the graph's order, paths from the folder."""
    for line in (root / str(writer.list_path)).read_text().splitlines():
        paths = line.split(" ")
        yield {value.name: np.load(root / path) for value, path in zip(graph.inputs, paths, strict=True)}


def read_qnn(root: Path, writer: SampleWriter, graph: GraphInfo) -> Iterator[Sample]:
    shapes = {value.name: (value.shape, KINDS[value.dtype]) for value in graph.inputs}
    for line in (root / str(writer.list_path)).read_text().splitlines():
        pairs = [item.split(":=") for item in line.split(" ")]
        assert [name for name, _ in pairs] == list(shapes)
        yield {name: np.fromfile(root / path, shapes[name][1]).reshape(shapes[name][0]) for name, path in pairs}


def read_npz(root: Path, writer: SampleWriter, graph: GraphInfo) -> Iterator[Sample]:
    for file in sorted((root / writer.path).iterdir()):
        assert file.suffix == ".npz"
        with np.load(file) as sample:
            yield dict(sample)


def read_axera(root: Path, writer: SampleWriter, graph: GraphInfo) -> Iterator[Sample]:
    columns: dict[str, list[np.ndarray]] = {}
    for value in graph.inputs:
        with tarfile.open(root / writer.path / f"{value.name}.tar") as tar:
            members = tar.getmembers()
            assert [member.name for member in members] == [f"{i:03d}.npy" for i in range(len(members))]
            assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}
            columns[value.name] = [np.load(io.BytesIO(tar.extractfile(m).read())) for m in members]  # type: ignore[union-attr]
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def read_horizon(root: Path, writer: SampleWriter, graph: GraphInfo) -> Iterator[Sample]:
    first = root / writer.path / graph.inputs[0].name
    for file in sorted(first.iterdir()):
        yield {value.name: np.load(root / writer.path / value.name / file.name) for value in graph.inputs}


READERS: dict[str, Callable[[Path, SampleWriter, GraphInfo], Iterator[Sample]]] = {
    "rknn": read_rknn,
    "qnn": read_qnn,
    "sophgo": read_npz,
    "axera": read_axera,
    "horizon": read_horizon,
    "npz": read_npz,
}


@pytest.fixture(scope="module")
def recorded(text_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Recorded]]:
    """Runs of both graphs over a text."""
    file = tmp_path_factory.mktemp("data") / "t.txt"
    file.write_text("the quick brown fox says hello to köln 你好世界. " * 30, encoding="utf-8")
    corpus = read_corpus(file, text_bundle, chat=False)
    tap = Tap(OrtBackend(text_bundle))
    loaded = LoadedBundle(text_bundle, backend=tap)
    runs: dict[str, list[Recorded]] = {}
    for graph in text_bundle.manifest.graphs:
        kept = runs[graph.file] = []
        stops = calibration_stops(text_bundle.manifest, graph, len(corpus), 9)
        assert record(loaded, tap, corpus, stops, kept.append) == 9
    return runs


def test_a_writer_has_a_reader_here() -> None:
    assert set(READERS) == set(WRITERS)


@pytest.mark.parametrize("name", list(WRITERS))
def test_samples_read_back_give_the_recorded_outputs_bit_for_bit(
    name: str, recorded: Mapping[str, list[Recorded]], text_bundle: Bundle, tmp_path: Path
) -> None:
    for graph in text_bundle.manifest.graphs:
        writer = WRITERS[name](tmp_path, Path(graph.file).stem, [value.name for value in graph.inputs])
        for run in recorded[graph.file]:
            writer.add(run.inputs)
        writer.close()
        session = onnxruntime.InferenceSession(str(text_bundle.path / graph.file), providers=["CPUExecutionProvider"])
        names = [value.name for value in graph.outputs]
        samples = list(READERS[name](tmp_path, writer, graph))
        assert len(samples) == writer.count == 9
        for sample, run in zip(samples, recorded[graph.file], strict=True):
            for value in graph.inputs:
                array = sample[value.name]
                assert (array.shape, array.dtype) == (tuple(value.shape), value.dtype)
                assert np.array_equal(array, run.inputs[value.name])
            for output, got in zip(names, session.run(names, sample), strict=True):
                assert np.array_equal(got, run.outputs[output]), output


def test_samples_are_different_runs(recorded: Mapping[str, list[Recorded]]) -> None:
    for runs in recorded.values():
        assert len({(run.start, run.stop.position, run.ids) for run in runs}) == 9


@pytest.mark.parametrize("name", list(WRITERS))
@pytest.mark.parametrize("dtype", ["float16", "int64", "float32"])
def test_types_other_than_those_of_today_are_kept_but_for_qnn(name: str, dtype: str, tmp_path: Path) -> None:
    array = np.arange(6).reshape(1, 2, 3).astype(dtype)[:, ::-1]  # not contiguous either
    value = type("Value", (), {"name": "x", "shape": [1, 2, 3], "dtype": dtype})()
    graph: Any = type("Graph", (), {"inputs": [value]})()
    writer = WRITERS[name](tmp_path, "g", ["x"])
    writer.add({"x": array, "not an input": array})
    writer.close()
    (sample,) = READERS[name](tmp_path, writer, graph)
    assert np.array_equal(sample["x"], array)
    assert sample["x"].dtype == (KINDS[dtype] if name == "qnn" else dtype)


def test_a_list_is_named_only_where_the_tool_takes_one(tmp_path: Path) -> None:
    lists = {name: kind(tmp_path / name, "g", ["x"]).list_path for name, kind in WRITERS.items()}
    assert {name: path for name, path in lists.items() if path} == {
        "rknn": "calibration/g/dataset.txt",
        "qnn": "calibration/g/input_list.txt",
    }


def test_an_array_is_saved_as_numpy_saves_it(tmp_path: Path) -> None:
    for array in (np.zeros((1, 2), np.float32), np.array(3, np.int32), np.ones((2, 0), np.float16)):
        save_npy(tmp_path / "a.npy", array)
        np.save(tmp_path / "b.npy", array)
        assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
        (tmp_path / "a.npy").unlink()
