"""No damage of a manifest gives anything but a refusal, or a bundle that opens."""

import json
import random

import pytest
from bundle_folders import corrupted, load, opens_or_is_refused, plain_folder, refusal, save


@pytest.fixture
def folder(tmp_path):
    return plain_folder(tmp_path)


def test_no_corrupted_manifest_gives_anything_but_a_refusal(folder):
    raw, rng = load(folder), random.Random(11)
    for _ in range(600):
        save(folder, corrupted(raw, rng))
        opens_or_is_refused(folder)


def test_no_damaged_bytes_of_a_manifest_give_anything_but_a_refusal(folder):
    file, rng = folder / "manifest.json", random.Random(12)
    text = file.read_bytes()
    for _ in range(400):
        damaged = bytearray(text[: rng.choice([len(text), rng.randrange(len(text))])])
        for _ in range(rng.randint(0, 4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.choice(b'{}[]",:0-9e.nt\\ \xff\x00')
        file.write_bytes(bytes(damaged))
        opens_or_is_refused(folder)


@pytest.mark.parametrize("depth", [100, 900, 960, 980, 990, 1000, 5000])
def test_a_manifest_however_deep_is_refused(folder, depth):
    text = json.dumps({**load(folder), "chunk_size": "HERE"}).replace('"HERE"', "[" * depth + "]" * depth)
    (folder / "manifest.json").write_text(text, "utf-8")
    refusal(folder)
