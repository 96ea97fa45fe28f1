"""Families with norms after attention and MLP, proved against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_shapes import shapes_of
from proof import prove

FAMILIES = "gemma2 gemma3_text olmo2 olmo3 glm4 exaone4"


@pytest.mark.parametrize("name", shapes_of(*FAMILIES.split()))
def test_every_row_and_every_rung_equals_transformers(name: str, tmp_path: Path) -> None:
    prove(name, tmp_path)
