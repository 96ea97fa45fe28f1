"""The worst error of every tiny model of the tests against transformers, as the table of docs/families.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from proof import MODELS, prove


def main() -> int:
    print("| model_type | tiny model | every row, every n mod c | verify, worst rung |\n|---|---|---|---|")
    for name, model in sorted(MODELS.items(), key=lambda item: (item[1].model_type, item[0])):
        with tempfile.TemporaryDirectory() as folder:
            worst = prove(model.save(Path(folder) / "source"), Path(folder) / "bundle")
        print(f"| {model.model_type} | {name} | {worst['rows']:.1e} | {worst['ladder']:.1e} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
