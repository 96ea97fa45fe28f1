"""Families with RMS norms before attention and MLP, proved against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_shapes import shapes_of
from proof import prove

FAMILIES = (
    "llama mistral qwen2 qwen3 gemma phi3 smollm3 granite glm ernie4_5 hunyuan_v1_dense seed_oss helium internlm3 "
    "arcee ministral3"
)


@pytest.mark.parametrize("name", shapes_of(*FAMILIES.split()))
def test_every_row_and_every_rung_equals_transformers(name: str, tmp_path: Path) -> None:
    prove(name, tmp_path)
