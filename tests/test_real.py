"""The real models of the presets: `make test-real`. Downloads what is not in the cache, and takes minutes each."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import export_preset

from benchmarks import greedy
from rollkv.export.verify import verify_bundle
from rollkv.models.checkpoint import open_checkpoint

pytestmark = pytest.mark.real
PRESETS = ("smollm2-135m", "qwen2.5-coder-0.5b")


@pytest.mark.parametrize("name", PRESETS)
def test_every_rung_holds_on_the_real_model(name: str, tmp_path: Path) -> None:
    report = verify_bundle(export_preset(name, tmp_path / name), open_checkpoint(name), print)
    assert report.fault is None


@pytest.mark.parametrize("name", PRESETS)
def test_64_greedy_tokens_of_every_prompt_are_those_of_transformers(name: str) -> None:
    assert greedy.main([name]) == 0
