"""Tiny models of every `model_type`, and the proof of one: every row of every prompt, then the whole ladder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gemma4_models
import numpy as np
import vision_models
from conftest import SHAPES, export, make_checkpoint
from family_shapes import FAMILY_SHAPES, make_family

from rollkv.export.reference import Reference
from rollkv.export.verify import verify_bundle
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime.backend import Backend, OrtBackend
from rollkv.runtime.session import Session

LENGTHS = (1, 2, 7, 8, 9, *range(17, 25), 31, 40)  # every n mod c for c = 8, within the first chunk and far beyond
BOUND = 1e-4  # of the largest logit of a prompt


@dataclass(frozen=True)
class TinyModel:
    """A random model that transformers' own class saves."""

    model_type: str
    save: Callable[[Path], Path]  # into a folder


MODELS: dict[str, TinyModel] = {
    **{name: TinyModel(family, partial(make_checkpoint, name=name)) for name, (family, _) in SHAPES.items()},
    **{name: TinyModel(family, partial(make_family, name=name)) for name, (family, _) in FAMILY_SHAPES.items()},
    **{
        f"gemma4-{name}": TinyModel("gemma4_text", partial(gemma4_models.save, **settings))
        for name, settings in gemma4_models.EXPORTED.items()
    },
    **{f"{name}-whole": TinyModel(name, partial(vision_models.save, name=name)) for name in vision_models.MODELS},
}


def models_of(*model_types: str) -> list[str]:
    """Names of the models of some types."""
    return [name for name, model in MODELS.items() if model.model_type in model_types]


class RowsBackend:
    """Keeps the logits of every row of every run."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.rows: list[Any] = []

    def run(self, graph: Any, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs = self._inner.run(graph, feeds)
        self.rows.append(np.array(outputs["logits"][0]))
        return outputs


def prove(source: Path, folder: Path, **settings: Any) -> dict[str, float]:
    """Export a checkpoint and compare it with transformers; returns the worst error of rows and of the ladder.

    settings: of the export, by the names of `signature.resolve`.
    """
    bundle = export(source, folder, head="all", **settings)
    checkpoint = open_checkpoint(str(source))
    reference = Reference(checkpoint, bundle.manifest.max_kvcache_len)
    backend = RowsBackend(OrtBackend(bundle))
    session = Session(bundle, backend=backend)
    worst = 0.0
    for n in LENGTHS:
        ids = np.random.default_rng(n).integers(11, bundle.manifest.vocab_size, n).tolist()  # no image's id
        backend.rows.clear()
        session.reset()
        session.prefill(ids)
        got = np.concatenate(backend.rows)[-n:]  # the pads stand in front
        wanted = np.stack(reference.rows(ids))
        error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
        assert error < BOUND, f"prompt of {n}: {error:.1e}"
        worst = max(worst, error)
    report = verify_bundle(bundle, checkpoint, lambda line: None)
    assert report.fault is None, report.fault
    assert all(row.skipped is None for row in report.rows)
    assert report.rows[0].rung == "files"
    assert [row.rung for row in report.rows if row.n == 40] == ["torch", "traced", "graph", "runtime", "feeds"]
    assert {row.n % 8 for row in report.rows if row.rung == "runtime"} == {0, 1, 7}
    assert any(row.rung == "roll" and row.n > 48 for row in report.rows)
    return {"rows": worst, "ladder": max(row.relative for row in report.rows)}
