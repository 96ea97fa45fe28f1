"""What the tests of exports to the disk share: settings, the command, what a folder holds."""

from __future__ import annotations

import sys
from pathlib import Path

LENGTHS = ["-L", "120", "-c", "8", "-C", "160"]
SETTINGS = {"max_lm_input_len": 120, "chunk_size": 8, "max_kvcache_len": 160}
CHECKOUT = Path(__file__).resolve().parent.parent


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "rollkv.export.cli", *map(str, arguments)]
