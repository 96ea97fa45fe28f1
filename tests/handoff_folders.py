"""A handed-off folder, written from a bundle: graphs, weights, golden runs, handoff.json and a build script."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollkv.export.feeds import RecordingBackend
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle
from rollkv.runtime.session import Session

KIT = Path(__file__).resolve().parent.parent / "export" / "kit"
SAMPLES = 3

TEXT = "the quick brown fox. hello, how are you?\ngrüße aus köln 你好世界 🙂🙃 don't stop\n\nnow\n" * 20


def hand_off(bundle: Bundle, folder: Path, target: str, script: str | None, prompt: Sequence[int]) -> Path:
    """Golden runs of `prompt` (its first run is padded where c does not divide its length) and of three steps more."""
    m = bundle.manifest
    folder.mkdir(parents=True)
    for name in {graph.file for graph in m.graphs} | {m.weights.file}:
        shutil.copyfile(bundle.path / name, folder / name)
    if script is not None:
        shutil.copyfile(KIT / script, folder / "build.py")
        shutil.copyfile(KIT / "jobs.py", folder / "jobs.py")
    recorder = RecordingBackend(OrtBackend(bundle))
    session = Session(bundle, backend=recorder)
    session.prefill(prompt)
    for token in range(3, 3 + SAMPLES):
        session.decode(token)
    golden: dict[str, list[str]] = {}
    lists: dict[str, list[str]] = {}
    for graph, feeds, outputs in recorder.runs:
        name = Path(graph.file).stem
        samples = golden.setdefault(name, [])
        if len(samples) == SAMPLES:
            continue
        place = f"golden/{name}/{len(samples)}"
        for kind, arrays in (("inputs", feeds), ("outputs", outputs)):
            (folder / place / kind).mkdir(parents=True)
            for value, array in arrays.items():
                np.save(folder / place / kind / f"{value}.npy", array)
        lists.setdefault(name, []).append(" ".join(f"../../{place}/inputs/{value.name}.npy" for value in graph.inputs))
        samples.append(place)
    for name, lines in lists.items():
        (folder / "calibration" / name).mkdir(parents=True)
        (folder / "calibration" / name / "dataset.txt").write_text("\n".join(lines) + "\n")
    (folder / "handoff.json").write_text(json.dumps(describe(bundle, target, golden), indent=2))
    return folder


def describe(bundle: Bundle, target: str, golden: dict[str, list[str]]) -> dict[str, Any]:
    """handoff.json."""
    from rollkv.export.targets import TARGETS

    m, profile = bundle.manifest, TARGETS[target]

    def values(infos: Sequence[Any]) -> list[dict[str, Any]]:
        keys = ("name", "shape", "dtype", "role")
        return [{key: dataclasses.asdict(info)[key] for key in keys} for info in infos]

    return {
        "format": 1,
        "target": target,
        "tool": profile.tool,
        "precision": profile.precision,
        "model": m.source.id,
        "max_kvcache_len": m.max_kvcache_len,
        "chunk_size": m.chunk_size,
        "kv_layout": m.kv_layout,
        "mask_value": m.mask_value,
        "graphs": [
            {
                "name": Path(graph.file).stem,
                "file": graph.file,
                "role": graph.role,
                "rows": graph.rows,
                "kv_len": graph.kv_len,
                "opset": graph.opset,
                "inputs": values(graph.inputs),
                "outputs": values(graph.outputs),
            }
            for graph in m.graphs
        ],
        "calibration": {
            "format": profile.calibration,
            "graphs": {
                name: {
                    "samples": len(samples),
                    "path": f"calibration/{name}",
                    "list": f"calibration/{name}/dataset.txt",
                }
                for name, samples in golden.items()
            },
        },
        "golden": golden,
    }
