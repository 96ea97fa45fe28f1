"""Families with norms after attention and MLP, proved against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_shapes import make_family, shapes_of
from proof import prove

from rollkv.models.families_post_norm import ROWS


@pytest.mark.parametrize("name", shapes_of(*(row.model_type for row in ROWS)))
def test_every_row_and_every_rung_equals_transformers(name: str, tmp_path: Path) -> None:
    prove(make_family(tmp_path / "source", name), tmp_path / "bundle")
