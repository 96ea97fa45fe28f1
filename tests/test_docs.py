"""What the documents say, where a test can hold them to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from proof import MODELS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_table_of_errors_has_a_line_for_every_tiny_model_within_the_bound() -> None:
    lines = re.findall(r"^\| (\S+) \| (\S+) \| (\S+e-\d+) \| (\S+e-\d+) \|$", read(ROOT / "docs" / "families.md"), re.M)
    assert sorted((family, name) for family, name, *_ in lines) == sorted(
        (model.model_type, name) for name, model in MODELS.items()
    )
    assert all(float(error) < 1e-4 for *_, rows, ladder in lines for error in (rows, ladder))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", read(page)):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:models|export|runtime|tests|benchmarks|docs)/\w+\.(?:py|md))`", read(page)):
        assert (ROOT / name).exists(), name


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")
