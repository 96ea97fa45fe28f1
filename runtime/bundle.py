"""A bundle on disk: reading its manifest, and the sizes and hashes of its files.

The format belongs to this file and to `manifest.py`, whose names it gives out; the exporter writes with them. What the
values must satisfy is in `manifest_checks.py`. Knows nothing of ONNX or of what the graphs compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkv.runtime.manifest import (
    DECODE_ATTENTIONS,
    DTYPES,
    FORMAT,
    GQAS,
    KV_LAYOUTS,
    NORMS,
    PROJECTIONS,
    SLOT_AXES,
    TABLE_BYTES,
    BundleError,
    FileInfo,
    GraphInfo,
    LayerInfo,
    Manifest,
    RopeInfo,
    SourceInfo,
    TableInfo,
    ValueInfo,
    WeightsInfo,
)
from rollkv.runtime.manifest_checks import check_manifest

__all__ = [
    "DECODE_ATTENTIONS",
    "DTYPES",
    "FORMAT",
    "GQAS",
    "KV_LAYOUTS",
    "NORMS",
    "PROJECTIONS",
    "SLOT_AXES",
    "TABLE_BYTES",
    "Bundle",
    "BundleError",
    "FileInfo",
    "GraphInfo",
    "LayerInfo",
    "Manifest",
    "RopeInfo",
    "SourceInfo",
    "TableInfo",
    "ValueInfo",
    "WeightsInfo",
    "hash_file",
    "open_bundle",
]

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
HASHED_AT_OPEN = 16 << 20  # bytes; larger files are hashed by Bundle.check only


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest was read and checked, the sizes of all files and the hashes of small ones too."""

    path: Path
    manifest: Manifest

    def check(self) -> None:
        """Hash every file. Raises BundleError that names the first one that differs from the manifest."""
        for name, info in self.manifest.files.items():
            _check_hash(self.path / name, info)


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle's folder.

    Raises BundleError: no folder, no or a damaged manifest, a newer format, a file that is missing or changed.
    """
    folder = Path(path)
    file = folder / "manifest.json"
    if not os.path.isfile(file):  # unlike Path's own, these raise for no name
        why = (
            "no such folder"
            if not os.path.exists(folder)
            else "not a folder"
            if not os.path.isdir(folder)
            else "no manifest.json in it"
        )
        raise BundleError(f"{folder}: {why}; give the folder that `rollkv export` wrote")
    manifest = _read_manifest(file)
    for name, info in manifest.files.items():
        item = folder / name
        if not os.path.isfile(item):
            raise BundleError(_missing(item))
        if item.stat().st_size != info.size:
            raise BundleError(f"{item}: {item.stat().st_size} bytes, the manifest says {info.size}; export it again")
        if info.size <= HASHED_AT_OPEN:
            _check_hash(item, info)
    for name in TEXT_FILES:
        if name not in manifest.files and (folder / name).exists():
            raise BundleError(f"{folder / name}: the manifest does not list it; remove it, or export the bundle again")
    return Bundle(folder, manifest)


def hash_file(path: Path) -> str:
    """sha256 of a file's content, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _check_hash(path: Path, info: FileInfo) -> None:
    try:
        found = hash_file(path)
    except FileNotFoundError:
        raise BundleError(_missing(path)) from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    if found != info.sha256:
        raise BundleError(f"{path}: its content is not what the manifest's sha256 says; export the bundle again")


def _missing(path: Path) -> str:
    return f"{path}: missing from the bundle; export it again"


def _read_manifest(file: Path) -> Manifest:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: not JSON: {error}") from None
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error.strerror}") from None
    if not isinstance(raw, dict):
        raise BundleError(f"{file}: not a JSON object")
    version = raw.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleError(f"{file}: format is {version!r}, must be a positive integer")
    if version > FORMAT:
        raise BundleError(
            f"{file}: format {version} is newer than {FORMAT}, the newest this rollkv reads; upgrade rollkv"
        )
    manifest: Manifest = _build(Manifest, raw, str(file))
    check_manifest(manifest, str(file))
    return manifest


def _build(kind: Any, value: Any, where: str) -> Any:
    """A value of the type `kind` out of parsed JSON; unknown keys are ignored, anything else is a BundleError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise BundleError(f"{where}: must be an object, got {_short(value)}")
        hints, given = typing.get_type_hints(kind), {}
        for item in dataclasses.fields(kind):
            if item.name in value:
                given[item.name] = _build(hints[item.name], value[item.name], f"{where}: {item.name}")
            elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise BundleError(f"{where}: {item.name} is missing")
        return kind(**given)
    if origin is list and isinstance(value, list):
        return [_build(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _build(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _build(arguments[0], value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # JSON's integers have no end
            return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise BundleError(f"{where}: must be {getattr(kind, '__name__', kind)}, got {_short(value)}")


def _short(value: Any) -> str:
    return repr(value)[:60]
