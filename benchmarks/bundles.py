"""Bundles of the presets for the other scripts, exported once into bundles/bench/."""

from __future__ import annotations

from pathlib import Path

from rollkv.export.pipeline import export_bundle
from rollkv.export.signature import resolve
from rollkv.models.checkpoint import Checkpoint, open_checkpoint
from rollkv.runtime.bundle import Bundle, BundleError, open_bundle

FOLDER = Path("bundles/bench")


def preset(name: str) -> Checkpoint:
    return open_checkpoint(name, print)


def preset_bundle(name: str, length: int, chunk: int, slots: int) -> Bundle:
    """The preset's bundle with these L, c and C; a bundle of other sources or lengths there is replaced."""
    output = FOLDER / f"{name}-{length}-{chunk}-{slots}"
    checkpoint = preset(name)
    try:
        bundle = open_bundle(output)
        if bundle.manifest.source.sha256 == checkpoint.sha256():
            return bundle
    except BundleError:
        pass
    settings = {"max_lm_input_len": length, "chunk_size": chunk, "max_kvcache_len": slots}
    export_bundle(checkpoint, resolve(checkpoint.config, **settings), output, lambda *_: None)
    return open_bundle(output)
