"""Families with layer norms, proved against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_shapes import shapes_of
from proof import prove

FAMILIES = "phi starcoder2 stablelm gpt_neox gpt2 cohere cohere2 nemotron"


@pytest.mark.parametrize("name", shapes_of(*FAMILIES.split()))
def test_every_row_and_every_rung_equals_transformers(name: str, tmp_path: Path) -> None:
    prove(name, tmp_path)
