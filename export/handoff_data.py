"""Calibration samples and golden vectors as files: each tool's own format, written one sample at a time.

Knows arrays by name and folders, no tokens and no graphs. `WRITERS` has a writer for every `Target.calibration`. The
same arrays give the same bytes.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from rollkv.runtime.backend import Array


class SampleWriter(ABC):
    """Samples of one graph in calibration/<graph> of a folder. Closed when all are added."""

    list_name: str | None = None  # of the file that lists them, where the tool takes one

    def __init__(self, root: Path, graph: str, names: Sequence[str]) -> None:
        """graph: stem of its file. names: its inputs, in order."""
        self.root, self.names, self.count = root, list(names), 0
        self.path = f"calibration/{graph}"  # from the folder, as is every path in a list
        self.folder = root / "calibration" / graph
        self.folder.mkdir(parents=True)
        self._lines: list[str] = []

    @property
    def list_path(self) -> str | None:
        """The list, from the folder."""
        return None if self.list_name is None else f"{self.path}/{self.list_name}"

    def add(self, inputs: Mapping[str, Array]) -> None:
        """One sample: every input by name."""
        self._write(f"{self.count:03d}", {name: inputs[name] for name in self.names})
        self.count += 1

    def close(self) -> None:
        """Write what comes last."""
        if self.list_path is not None:
            (self.root / self.list_path).write_text("".join(self._lines), encoding="utf-8")

    @abstractmethod
    def _write(self, sample: str, inputs: Mapping[str, Array]) -> None:
        """One sample's files."""


class RknnWriter(SampleWriter):
    """<sample>/<input>.npy; dataset.txt has a line for each sample: the paths of all inputs in the graph's order."""

    list_name = "dataset.txt"

    def _write(self, sample: str, inputs: Mapping[str, Array]) -> None:
        (self.folder / sample).mkdir()
        paths = []
        for name, array in inputs.items():
            save_npy(self.folder / sample / f"{name}.npy", array)
            paths.append(f"{self.path}/{sample}/{name}.npy")
        self._lines.append(" ".join(paths) + "\n")


class QnnWriter(SampleWriter):
    """<sample>/<input>.raw: float32 or int32, little-endian; input_list.txt has `name:=path` of every input."""

    list_name = "input_list.txt"

    def _write(self, sample: str, inputs: Mapping[str, Array]) -> None:
        (self.folder / sample).mkdir()
        paths = []
        for name, array in inputs.items():
            kind = "<f4" if array.dtype.kind == "f" else "<i4"
            (self.folder / sample / f"{name}.raw").write_bytes(array.astype(kind).tobytes())
            paths.append(f"{name}:={self.path}/{sample}/{name}.raw")
        self._lines.append(" ".join(paths) + "\n")


class NpzWriter(SampleWriter):
    """<sample>.npz: the arrays by input name."""

    def _write(self, sample: str, inputs: Mapping[str, Array]) -> None:
        with zipfile.ZipFile(self.folder / f"{sample}.npz", "x") as archive:
            for name, array in inputs.items():
                entry = zipfile.ZipInfo(f"{name}.npy")  # with the same time always
                with archive.open(entry, "w", force_zip64=True) as file:
                    _write_npy(file, array)


class HorizonWriter(SampleWriter):
    """<input>/<sample>.npy."""

    def _write(self, sample: str, inputs: Mapping[str, Array]) -> None:
        for name, array in inputs.items():
            (self.folder / name).mkdir(exist_ok=True)
            save_npy(self.folder / name / f"{sample}.npy", array)


class AxeraWriter(SampleWriter):
    """<input>.tar, in it <sample>.npy."""

    def __init__(self, root: Path, graph: str, names: Sequence[str]) -> None:
        super().__init__(root, graph, names)
        self._tars: dict[str, tarfile.TarFile] = {}

    def _write(self, sample: str, inputs: Mapping[str, Array]) -> None:
        for name, array in inputs.items():
            if name not in self._tars:
                self._tars[name] = tarfile.open(self.folder / f"{name}.tar", "x", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
            data = io.BytesIO()
            _write_npy(data, array)
            entry = tarfile.TarInfo(f"{sample}.npy")
            entry.size = data.tell()
            data.seek(0)
            self._tars[name].addfile(entry, data)

    def close(self) -> None:
        """Write the end of every tar."""
        for tar in self._tars.values():
            tar.close()


WRITERS: dict[str, type[SampleWriter]] = {
    "rknn": RknnWriter,
    "qnn": QnnWriter,
    "sophgo": NpzWriter,
    "axera": AxeraWriter,
    "horizon": HorizonWriter,
    "npz": NpzWriter,
}


def write_golden(root: Path, path: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """One golden run: <path>/inputs/<name>.npy and <path>/outputs/<name>.npy, in the graph's types."""
    for part, arrays in (("inputs", inputs), ("outputs", outputs)):
        (root / path / part).mkdir(parents=True)
        for name, array in arrays.items():
            save_npy(root / path / part / f"{name}.npy", array)


def save_npy(path: Path, array: Array) -> None:
    """A .npy file. Unlike numpy.save it says why it fails when the disk is full."""
    with path.open("xb") as file:
        _write_npy(file, array)


def _write_npy(file: IO[bytes], array: Array) -> None:
    whole = np.asarray(array, order="C")
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(whole))
    file.write(whole.data)
