"""The worst error of every tiny model of the tests against transformers, as the table of docs/families.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from family_shapes import FAMILY_SHAPES
from proof import prove


def main() -> None:
    print("| model_type | shape | every row, every n mod c | verify, worst rung |\n|---|---|---|---|")
    for name, (family, _) in FAMILY_SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            worst = prove(name, Path(folder))
        print(f"| {family} | {name} | {worst['rows']:.1e} | {worst['ladder']:.1e} |", flush=True)


if __name__ == "__main__":
    main()
