"""Which files and tensors of a folder are read, and which are knowingly passed over."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from conftest import make_checkpoint
from family_shapes import make_family
from safetensors.numpy import load_file, save_file

from rollkv.models.checkpoint import open_checkpoint


def test_a_single_file_goes_before_shards_and_that_is_said(tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "one", "llama")
    other = make_checkpoint(
        tmp_path / "other", "llama", max_shard_size="20KB", tie_word_embeddings=False, rms_norm_eps=1e-5
    )
    shutil.copy(one / "model.safetensors", other)
    told: list[str] = []
    checkpoint = open_checkpoint(str(other), told.append)
    assert checkpoint.files == (other / "config.json", other / "model.safetensors")
    index = other / "model.safetensors.index.json"
    assert told == [f"{index} is passed over: model.safetensors is there, which transformers reads too"]


def test_masks_of_older_checkpoints_are_passed_over_whatever_their_type(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "m", "gpt_neox")
    tensors = load_file(folder / "model.safetensors")
    plain = open_checkpoint(str(folder))
    tensors["gpt_neox.layers.0.attention.bias"] = np.tril(np.ones((1, 1, 8, 8), bool))
    tensors["gpt_neox.layers.0.attention.masked_bias"] = np.array(-np.inf, np.float16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert [weight.name for weight in open_checkpoint(str(folder)).weights] == [weight.name for weight in plain.weights]
