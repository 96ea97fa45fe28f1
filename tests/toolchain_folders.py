"""A hand-off of one graph made of a few numbers, and an environment whose Python is this one and that has no tool."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rollkv.export.toolchains import Toolchain, python_of

ROWS, KV_LEN, SAMPLES = 4, 6, 3
OUTPUTS = (
    {"name": "logits", "shape": [1, 1, 5], "dtype": "float32", "role": "logits"},
    {"name": "new_key_10", "shape": [1, ROWS, 2, 3], "dtype": "float32", "role": "new_key", "layer": 10},
    {"name": "new_value_10", "shape": [1, ROWS, 2, 3], "dtype": "float32", "role": "new_value", "layer": 10},
    {"name": "new_key_9", "shape": [1, ROWS, 2, 3], "dtype": "float32", "role": "new_key", "layer": 9},
    {"name": "new_value_9", "shape": [1, ROWS, 2, 3], "dtype": "float32", "role": "new_value", "layer": 9},
)

# A build script without a tool: it copies the golden outputs, and `EDIT` changes them.
STUB = """
import json, sys, numpy as np
from pathlib import Path
arguments = sys.argv[1:]
folder, build = (Path(arguments[arguments.index(flag) + 1]) for flag in ("--folder", "--build"))
handoff = json.loads((folder / "handoff.json").read_text())
name = handoff["graphs"][0]["name"]
print("chatter of the tool")
EDIT = {}
@FAIL@
if "--simulate" in arguments:
    for sample in handoff["golden"][name]:
        target = build / "outputs" / name / Path(sample).name
        target.mkdir(parents=True, exist_ok=True)
        for value in handoff["graphs"][0]["outputs"]:
            array = np.load(folder / sample / "outputs" / (value["name"] + ".npy"))
            if (value["name"], Path(sample).name) in EDIT:
                array = EDIT[value["name"], Path(sample).name](array)
            np.save(target / (value["name"] + ".npy"), array)
off = None if "--simulate" in arguments else {"Gather": 3}
print(json.dumps({"graph": name, "seconds": 1.5, "peak_rss_mb": 7, "not_on_npu": off}))
"""


def make_folder(folder: Path, code: str = "", **changes: Any) -> Path:
    """A hand-off for OpenVINO whose build script runs `code` first; row 0 of run 0 is a pad."""
    golden = [f"golden/prefill/{k}" for k in range(SAMPLES)]
    data = {
        "format": 1,
        "target": "openvino-npu",
        "tool": "openvino==2026.4.0",
        "precision": "float16",
        "kv_layout": "bskd",
        "mask_value": -32768.0,
        "graphs": [
            {
                "name": "prefill",
                "file": "prefill.onnx",
                "role": "prefill",
                "rows": ROWS,
                "kv_len": KV_LEN,
                "inputs": [
                    {
                        "name": "attention_mask",
                        "shape": [1, 1, ROWS, KV_LEN],
                        "dtype": "float32",
                        "role": "attention_mask",
                    }
                ],
                "outputs": list(OUTPUTS),
            }
        ],
        "golden": {"prefill": golden},
        "golden_runs": {"prefill": [{"path": place, "pads": int(k == 0)} for k, place in enumerate(golden)]},
    }
    random = np.random.default_rng(0)
    for k, place in enumerate(golden):
        for part in ("inputs", "outputs"):
            (folder / place / part).mkdir(parents=True)
        mask = np.zeros((1, 1, ROWS, KV_LEN), np.float32)
        if k == 0:
            mask[:, :, 0] = -32768.0
        np.save(folder / place / "inputs" / "attention_mask.npy", mask)
        for value in OUTPUTS:
            array = random.normal(size=value["shape"]).astype(np.float32)
            np.save(folder / place / "outputs" / f"{value['name']}.npy", array)
    (folder / "handoff.json").write_text(json.dumps(data | changes))
    (folder / "build.py").write_text(STUB.replace("@FAIL@", code))
    return folder


def make_environment(folder: Path, toolchain: Toolchain) -> Path:
    """What looks like a complete environment."""
    python = python_of(folder)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    name, _, version = toolchain.requirement.replace("-", "_").partition("==")
    (folder / "lib" / "python3.11" / "site-packages" / f"{name}-{version}.dist-info").mkdir(parents=True)
    return folder
