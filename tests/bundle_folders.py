"""A bundle's folder whose graphs are no graphs, ways to damage it, and to read what is said of it."""

import copy
import hashlib
import json

import pytest
from toy_model import toy_bundle

from rollkv.runtime.bundle import BundleError, open_bundle

FILES = {"prefill.onnx": b"prefill", "decode.onnx": b"decode", "weights.bin": b"w" * 1000, "tokenizer.json": b"{}"}


def plain_folder(tmp_path):
    """A bundle's folder; the graphs in it are no graphs, which nobody looks at when it is opened."""
    path = tmp_path / "b"
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    raw = json.loads(toy_bundle(window=5, eos=[2]).manifest.to_json())
    raw["rope"] = {"full": {"inv_freq": [1.0, 0.5], "rotary_dim": 4, "interleaved": False, "attention_scaling": 1.0}}
    raw["files"] = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in FILES.items()
    }
    save(path, raw)
    return path


def load(folder):
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def save(folder, raw):
    (folder / "manifest.json").write_text(json.dumps(raw), "utf-8")


def at(raw, path):
    for key in path:
        raw = raw[key]
    return raw


def refusal(folder):
    """The message of opening it, one line that names the manifest or the file."""
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    return message


def listing(folder):
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}


JUNK = [
    None,
    True,
    0,
    -1,
    2**70,
    -(10**400),
    1.5,
    1e999,
    float("nan"),
    "",
    "\ud800",
    "../x",
    "\0",
    [],
    {},
    [[]],
    {"a": 1},
]


def corrupted(raw, rng):
    """One to three values anywhere in it replaced, removed or added."""
    raw = copy.deepcopy(raw)
    for _ in range(rng.randint(1, 3)):
        node = raw
        while True:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], (dict, list)) and rng.random() < 0.8:
                node = node[key]
                continue
            if rng.random() < 0.3:
                del node[key]
            else:
                node[key] = copy.deepcopy(rng.choice(JUNK))
            break
        if isinstance(node, dict) and rng.random() < 0.2:
            node[rng.choice(["", "..", "a/b", "\ud800", "\0", "x" * 300])] = copy.deepcopy(rng.choice(JUNK))
    return raw


def opens_or_is_refused(folder):
    try:
        open_bundle(folder)
    except BundleError as error:
        message = str(error)
    else:
        return
    assert message.startswith(str(folder))
