"""The proof of one tiny model: every real row of every prompt, then the whole ladder, on the bundle's own files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from conftest import export

from rollkv.export.reference import Reference
from rollkv.export.verify import verify_bundle
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.session import Session

LENGTHS = (1, 2, 7, 8, 9, *range(17, 25), 31, 40)  # every n mod c for c = 8, within the first chunk and far beyond
BOUND = 1e-4  # of the largest logit of a prompt


class RowsBackend:
    """Keeps the logits of every row of every run."""

    def __init__(self, inner: OrtBackend) -> None:
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
    bundle = export(source, folder / "bundle", head="all", **settings)
    checkpoint = open_checkpoint(str(source))
    reference = Reference(checkpoint, bundle.manifest.max_kvcache_len)
    backend = RowsBackend(OrtBackend(bundle))
    session = Session(bundle, backend=backend)
    worst = 0.0
    for n in LENGTHS:
        ids = np.random.default_rng(n).integers(0, bundle.manifest.vocab_size, n).tolist()
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
    return {"rows": worst, "ladder": max(row.relative for row in report.rows)}
