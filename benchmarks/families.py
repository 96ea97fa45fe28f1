"""The worst error of every tiny model of the tests against transformers, as the table of docs/families.md."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import gemma4_models
import vision_models
from conftest import SHAPES, make_checkpoint
from family_shapes import FAMILY_SHAPES, make_family
from proof import prove


def models() -> Iterator[tuple[str, str, Any]]:
    """model_type, name, and what saves the model in a folder."""
    for name, (family, _) in SHAPES.items():
        yield family, name, partial(make_checkpoint, name=name)
    for name, (family, _) in FAMILY_SHAPES.items():
        yield family, name, partial(make_family, name=name)
    for name, settings in gemma4_models.EXPORTED.items():
        yield "gemma4_text", f"gemma4-{name}", partial(gemma4_models.save, **settings)
    for name in vision_models.MODELS:
        yield name, name, partial(vision_models.save, name=name)


def main() -> None:
    print("| model_type | tiny model | every row, every n mod c | verify, worst rung |\n|---|---|---|---|")
    for family, name, save in models():
        with tempfile.TemporaryDirectory() as folder:
            worst = prove(save(Path(folder) / "source"), Path(folder) / "bundle")
        print(f"| {family} | {name} | {worst['rows']:.1e} | {worst['ladder']:.1e} |", flush=True)


if __name__ == "__main__":
    main()
