"""Bundles of the presets for the other scripts, exported into bundles/bench/."""

from __future__ import annotations

from pathlib import Path

from rollkv.export.pipeline import export_bundle
from rollkv.export.signature import resolve
from rollkv.models.checkpoint import Checkpoint, open_checkpoint
from rollkv.runtime.bundle import Bundle, open_bundle

FOLDER = Path("bundles/bench")


def preset(name: str) -> Checkpoint:
    return open_checkpoint(name, print)


def preset_bundle(name: str, length: int, chunk: int, slots: int) -> Bundle:
    """The preset's bundle with these L, c and C, exported anew: a figure is one of the code as it is."""
    output = FOLDER / f"{name}-{length}-{chunk}-{slots}"
    checkpoint = preset(name)
    settings = {"max_lm_input_len": length, "chunk_size": chunk, "max_kvcache_len": slots}
    export_bundle(checkpoint, resolve(checkpoint.config, **settings), output, lambda *_: None)
    return open_bundle(output)
