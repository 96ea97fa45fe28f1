"""Families with layer norms, proved against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from proof import MODELS, models_of, prove

from rollkv.models.families_layer_norm import ROWS


@pytest.mark.parametrize("name", models_of(*(row.model_type for row in ROWS)))
def test_every_row_and_every_rung_equals_transformers(name: str, tmp_path: Path) -> None:
    prove(MODELS[name].save(tmp_path / "source"), tmp_path / "bundle")
