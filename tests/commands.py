"""What the tests of the command share: its result, judged, and a bundle that was changed on purpose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., tuple[int, str, str]]


def user_error(result: tuple[int, str, str]) -> str:
    """The one line of a user error, without the name of the program."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("rollkv")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.rstrip("\n").partition(": ")[2]


def reseal(folder: Path, **changes: Any) -> None:
    """Make the manifest's sizes and hashes those of the files, as one who changes a bundle on purpose would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= changes
    for name in [*manifest["files"], "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        manifest["files"].pop(name, None)
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
