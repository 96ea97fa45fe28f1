"""The same tiny llama as safetensors and as GGUF: same weights, same ids, same logits, and the ladder holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import export, make_checkpoint
from tiny_gguf import converted_metadata, converted_tensors, write_gguf
from toy_tokenizers import CHATML, TEXTS, byte_level, write

from rollkv.export.verify import verify_bundle
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime import Session
from rollkv.runtime.text import Tokenizer

HEADS, KV_HEADS, HIDDEN, WIDTH = 4, 2, 64, 96
VOCAB = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(
        tmp_path_factory.mktemp("original") / "tiny",
        "llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype=torch.float16,  # so that an F16 file holds the same numbers
    )
    return write(made, byte_level(), bos_token="<s>", eos_token="<|im_end|>", chat_template=CHATML)


def as_gguf(folder: Path, path: Path, kind: str) -> Path:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    values = {
        **converted_metadata(folder, "llama"),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3 if token.startswith("<") and len(token) > 2 else 1 for token in vocab],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": vocab.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHATML,
    }
    return write_gguf(path, values, converted_tensors(folder, "llama"), kind=kind)


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_a_gguf_bundle_is_that_of_the_safetensors_original(kind: str, folder: Path, tmp_path: Path) -> None:
    original = export(folder, tmp_path / "original")
    other = export(as_gguf(folder, tmp_path / "tiny.gguf", kind), tmp_path / "other")
    assert other.manifest.eos_token_ids == original.manifest.eos_token_ids == [1, 3]
    for file in ("weights.bin", "prefill.onnx", "decode.onnx"):
        assert (other.path / file).read_bytes() == (original.path / file).read_bytes()
    ours, theirs = Tokenizer(other.path), Tokenizer(original.path)
    messages = [{"role": "user", "content": "hello 🙂"}]
    assert ours.chat_ids(messages) == theirs.chat_ids(messages)
    here, there = Session(other), Session(original)
    for text in TEXTS:
        ids = theirs.encode(text)[:40]
        assert ours.encode(text)[:40] == ids
        here.reset(), there.reset()
        np.testing.assert_array_equal(here.prefill(ids), there.prefill(ids))


@pytest.mark.parametrize("projections", ["separate", "joined"])
def test_the_ladder_holds_on_a_gguf_file(projections: str, folder: Path, tmp_path: Path) -> None:
    path = as_gguf(folder, tmp_path / "tiny.gguf", "F32")
    made = export(path, tmp_path / "bundle", projections=projections)
    report = verify_bundle(made, open_checkpoint(str(path)), lambda line: None)
    assert report.fault is None
    assert max(row.relative for row in report.rows) < 2e-5
