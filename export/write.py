"""A bundle onto the disk: weights streamed into one file, graphs bound to it, the manifest, and one rename at the end.

Everything is written into a folder beside the final one; a failure leaves the previous bundle as it was.
Memory holds one block of a tensor at a time: the weight file is mapped, and its pages belong to the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from rollkv.export.signature import ExportError
from rollkv.models.config import FLOAT16_MAX, CheckpointError
from rollkv.models.tensors import Parameter
from rollkv.runtime.bundle import FileInfo, Manifest, hash_file

WEIGHTS_FILE = "weights.bin"
ALIGNMENT = 4096  # bytes; a tensor starts on a page, so that it can be mapped


@dataclass(frozen=True)
class FolderKind:
    """What a folder that may be replaced is called, and the keys of its JSON file that show it to be one."""

    name: str
    file: str
    keys: frozenset[str]


BUNDLE = FolderKind("bundle", "manifest.json", frozenset({"format", "rollkv", "graphs"}))


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies in the weight file."""

    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: str = "float32"


def check_output(final: Path, kind: FolderKind = BUNDLE) -> None:
    """Raise ExportError when a folder of this kind cannot take the name `final`: a file, a link, another folder."""
    if final.name in ("", ".."):
        raise ExportError(f"-o {final}: must end in the name of a folder")
    if final.is_symlink():
        raise ExportError(f"-o {final}: is a symbolic link; give the name of the folder itself")
    if final.exists() and not final.is_dir():
        raise ExportError(f"-o {final}: exists and is not a folder")
    if final.is_dir() and any(final.iterdir()) and not _is_one(final, kind):
        raise ExportError(f"-o {final}: exists and is not a {kind.name}; give another name or remove it")
    nearest = next(folder for folder in final.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise ExportError(f"-o {final}: {nearest} is not a folder")


@contextlib.contextmanager
def replacing_folder(final: Path, kind: FolderKind = BUNDLE) -> Iterator[Path]:
    """A new folder to write into, which takes the name `final` when the block ends without an error.

    Raises ExportError as `check_output` does.
    """
    check_output(final, kind)
    missing = [folder for folder in final.absolute().parents if not folder.exists()]
    work = final.parent / f".{final.name}.{secrets.token_hex(4)}.partial"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(0o700)
        yield work
        work.chmod(0o777 & ~_umask())
        _sync(work)
        if final.exists():
            _exchange(work, final)
        else:
            os.rename(work, final)
        _sync(final.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(final)  # a write to an open file does not say which
        _remove(work, missing)
        raise
    _remove(work)


def place_weights(
    weights: Sequence[Parameter], tables: Mapping[str, NDArray[np.float32]], dtype: str = "float32"
) -> dict[str, Placed]:
    """Offsets in the weight file, each tensor once, as float32 or float16."""
    placed: dict[str, Placed] = {}
    offset = 0
    for name, shape in [*((w.name, w.shape) for w in weights), *((n, t.shape) for n, t in tables.items())]:
        length = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        placed[name] = Placed(offset, length, tuple(shape), dtype)
        offset += -(-length // ALIGNMENT) * ALIGNMENT
    return placed


def write_weights(
    path: Path,
    weights: Sequence[Parameter],
    tables: Mapping[str, NDArray[np.float32]],
    placed: Mapping[str, Placed],
    progress: Callable[[int], None],
) -> None:
    """Stream every tensor to its place, in float16 rounded to nearest, ties to even. progress: is told of the bytes.

    Raises CheckpointError when a value is not finite or above 65504; OSError when the disk is full (the space is
    reserved first, so that a full disk is an error and not a fault on a mapped page).
    """
    size = max(p.offset + p.length for p in placed.values())
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    for weight in weights:
        target = map_tensor(path, placed[weight.name], "r+")
        if target.dtype == np.float32:
            weight.copy_to(target)
            _check_range(weight.origin, target)
        else:  # what is too large would be inf, or be rounded down
            for where, block in weight.blocks():
                _check_range(weight.origin, block)
                target[where] = block
        progress(placed[weight.name].length)
    for name, table in tables.items():
        target = map_tensor(path, placed[name], "r+")
        target[...] = table
        progress(placed[name].length)
    _sync(path)


def map_tensor(path: Path, place: Placed, mode: str = "r") -> NDArray[Any]:
    """A tensor of the weight file as an array over the mapped file."""
    return np.memmap(path, place.dtype, mode, place.offset, place.shape)  # type: ignore[call-overload,no-any-return]


def bind_weights(model: onnx.ModelProto, placed: Mapping[str, Placed], file: str) -> onnx.ModelProto:
    """The weights, until now inputs of the graph, become initializers that lie in `file`, beside the graph."""
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    inputs = [value for value in bound.graph.input if value.name not in placed]
    read = {name for node in bound.graph.node for name in node.input}
    for name, place in placed.items():
        if name not in read:
            continue
        kind = TensorProto.FLOAT if place.dtype == "float32" else TensorProto.FLOAT16
        tensor = TensorProto(name=name, data_type=kind, dims=place.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (("location", file), ("offset", str(place.offset)), ("length", str(place.length))):
            tensor.external_data.add(key=key, value=text)
        bound.graph.initializer.append(tensor)
    del bound.graph.input[:]
    bound.graph.input.extend(inputs)
    return bound


def write_file(path: Path, data: bytes) -> None:
    """Write bytes to a new file, and onto the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def file_infos(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, FileInfo]:
    """Size and hash of every file of a folder. known: hashes that were taken already, by name."""
    known = known or {}
    return {
        path.name: FileInfo(size=path.stat().st_size, sha256=known.get(path.name) or hash_file(path))
        for path in sorted(folder.iterdir())
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """manifest.json, the last file of a bundle."""
    write_file(folder / "manifest.json", manifest.to_json().encode())


def serialize(model: onnx.ModelProto) -> bytes:
    """The same bytes for the same graph."""
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _check_range(origin: str, values: NDArray[np.float32]) -> None:
    rows = values.reshape(-1)
    step = 4 << 20
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        largest = max(float(part.max()), -float(part.min()))  # NaN when one value is
        if not np.isfinite(largest):
            raise CheckpointError(f"{origin} holds a value that is not finite; is the file damaged?")
        if largest > FLOAT16_MAX:
            raise CheckpointError(f"{origin} reaches {largest:.6g}; allowed: up to {FLOAT16_MAX:.0f}, as in float16")


def _is_one(folder: Path, kind: FolderKind) -> bool:
    """Whether the JSON file is there and of that kind: web pages have a manifest.json too."""
    try:
        content = json.loads((folder / kind.file).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and kind.keys <= content.keys()


def _remove(folder: Path, parents: Sequence[Path] = ()) -> None:
    """Remove a folder, then its empty parents; what a signal raises meanwhile is raised when that is done."""
    late: BaseException | None = None
    while True:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            for parent in parents:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            break
        except BaseException as signal:
            late = signal
    if late is not None:
        raise late


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, onto the disk: a bundle that has its name is whole, whatever fails."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _exchange(work: Path, final: Path) -> None:
    """Swap two folders in one step where Linux can (renameat2), so that a bundle is always there under its name."""
    at_cwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = (os.fsencode(work), os.fsencode(final))
        if libc.renameat2(at_cwd, names[0], at_cwd, names[1], rename_exchange) == 0:
            return
    aside = work.with_suffix(".old")
    try:
        os.rename(final, aside)
        os.rename(work, final)
    except BaseException:
        if not final.exists():
            os.rename(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)
