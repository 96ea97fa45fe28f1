from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, make_checkpoint
from toy_tokenizers import CONFIG, byte_level, metaspace, write

from rollkv.models.checkpoint import Checkpoint, open_checkpoint
from rollkv.models.config import CheckpointError
from rollkv.models.names import tensor_names

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n"


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a tiny llama that a test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


@pytest.fixture
def sharded(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """The same model in several shards."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoint("llama")).save_pretrained(tmp_path / "s", max_shard_size="60KB")
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 2
    return tmp_path / "s"


def refused(model: str | Path) -> str:
    """The message with which a checkpoint is refused, in one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(model))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_config(folder: Path, **settings: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **settings}))


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return dict(load_file(file))


def change_tensors(file: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    from safetensors.numpy import save_file

    tensors = tensors_of(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def assert_equals_transformers(opened: Checkpoint) -> None:
    """Every tensor, bit by bit, against what transformers loads from the same folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(opened.path, dtype=torch.float32)
    theirs = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    for names, weight in zip(tensor_names(opened.config), opened.weights, strict=True):
        assert weight.name == names.decoder
        target = np.full(weight.shape, np.nan, np.float32)
        weight.copy_to(target)
        (stored,) = names.stored
        wanted = theirs.pop(stored)
        np.testing.assert_array_equal(target, wanted.T if names.transposed else wanted)
    assert not theirs


# Reading


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama-bias", "qwen2", "qwen3"])
def test_a_folder_gives_exactly_the_tensors_that_transformers_loads(tmp_path: Path, name: str, dtype: str) -> None:
    import torch

    assert_equals_transformers(open_checkpoint(str(make_checkpoint(tmp_path, name, dtype=getattr(torch, dtype)))))


def test_shards_give_the_same_tensors_as_one_file(sharded: Path) -> None:
    opened = open_checkpoint(str(sharded))
    assert_equals_transformers(opened)
    assert [file.suffix for file in opened.files] == [".json", *[".safetensors"] * (len(opened.files) - 1)]


def test_a_float64_checkpoint_is_rounded_to_float32(folder: Path) -> None:
    change_tensors(folder / "model.safetensors", lambda t: t.update({k: v.astype(np.float64) for k, v in t.items()}))
    assert_equals_transformers(open_checkpoint(str(folder)))


def test_rows_are_read_in_slices_and_blocks_join_without_a_seam(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_checkpoint(str(folder))
    table = tensors_of(folder / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(opened.weights[0].stored.read(3, 10), table[3:10])
    monkeypatch.setattr("rollkv.models.checkpoint.BLOCK_BYTES", 4 * 36 * 7)  # 7 rows of 307 at a time
    assert_equals_transformers(opened)


def test_a_tied_head_has_no_tensor_of_its_own(checkpoint: Callable[[str], Path]) -> None:
    opened = open_checkpoint(str(checkpoint("qwen3")))
    assert opened.config.tied_head
    assert "head.weight" not in [weight.name for weight in opened.weights]
    assert_equals_transformers(opened)


def test_the_hash_follows_the_content_and_not_the_folder(folder: Path, checkpoint: Callable[[str], Path]) -> None:
    before = open_checkpoint(str(folder)).sha256()
    assert before == open_checkpoint(str(checkpoint("llama"))).sha256()
    change_tensors(folder / "model.safetensors", lambda t: t["model.norm.weight"].__setitem__(0, 3.5))
    assert open_checkpoint(str(folder)).sha256() != before


def test_a_trailing_slash_and_a_dot_do_not_change_what_a_folder_is_called(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_checkpoint(f"{folder}/").id == "llama"
    monkeypatch.chdir(folder)
    assert open_checkpoint(".").id == "llama"


# Shards


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert refused(sharded) == f"{shard}: this shard is missing"


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, -1])
def test_a_shard_that_is_cut_short_is_named(sharded: Path, keep: float) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * keep) if keep == 0.5 else int(keep)])
    assert refused(sharded).startswith(f"{shard}: damaged or cut short: ")


def test_a_shard_of_another_model_is_named_with_a_tensor_that_it_lacks(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    held = sorted(tensors_of(second))
    shutil.copy(first, second)
    assert refused(sharded) == (
        f"{second}: tensor {held[0]} should be in this shard and is not; is it of another model?"
    )


def test_a_shard_with_its_tensors_under_other_names_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[f"base.{name}"] = tensors.pop(name)

    change_tensors(shard, rename)
    assert "should be in this shard and is not" in refused(sharded)


def test_a_tensor_that_two_shards_hold_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(tensors_of(first).items()))
    change_tensors(second, lambda tensors: tensors.update({name: tensor + 1}))
    assert refused(sharded) == f"{second}: tensor {name} is in another shard too ({first.name})"


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no weight_map of tensor names to files"),
        ('{"weight_map": {}}', "no weight_map of tensor names to files"),
        ('{"weight_map": {"a": 3}}', "no weight_map of tensor names to files"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "file '../x.safetensors' lies outside of the folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "file '/etc/passwd' lies outside of the folder"),
    ],
)
def test_a_damaged_index_is_refused(sharded: Path, index: str, match: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    said = refused(sharded)
    assert match in said
    assert str(sharded / "model.safetensors.index.json") in said


def test_a_git_lfs_pointer_is_told_from_weights(folder: Path, sharded: Path) -> None:
    (folder / "model.safetensors").write_text(LFS)
    said = refused(folder)
    assert said == (
        f"{folder / 'model.safetensors'}: a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
    )
    shard = sorted(sharded.glob("*.safetensors"))[2]
    shard.write_text(LFS)
    assert refused(sharded).startswith(f"{shard}: a Git LFS pointer")


# Tensors


def test_a_missing_tensor_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder / "model.safetensors", lambda tensors: tensors.pop(name))
    assert refused(folder) == f"{folder}: tensor {name} is missing"


def test_a_tensor_that_no_part_of_the_decoder_uses_is_named(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": np.zeros(36, np.float32)}
    change_tensors(folder / "model.safetensors", lambda tensors: tensors.update(extra))
    assert refused(folder) == (
        f"{folder}: 1 tensors are not used by a llama decoder, among them model.layers.0.self_attn.q_proj.bias"
    )


def test_a_layer_more_than_the_config_says_is_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)
    assert "tensors are not used by a llama decoder, among them model.layers.1." in refused(folder)


def test_rotary_frequencies_that_older_checkpoints_hold_are_recomputed(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    change_tensors(folder / "model.safetensors", lambda tensors: tensors.update(extra))
    assert_equals_transformers(open_checkpoint(str(folder)))


def test_a_shape_unlike_the_config_is_named(folder: Path) -> None:
    change_config(folder, intermediate_size=51)
    assert refused(folder) == (
        f"{folder}: tensor model.layers.0.mlp.gate_proj.weight has shape (50, 36), the config asks for (51, 36)"
    )


@pytest.mark.parametrize(("dtype", "code"), [(np.int8, "I8"), (np.uint8, "U8"), (np.int32, "I32")])
def test_a_tensor_of_integers_is_refused(folder: Path, dtype: Any, code: str) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(folder / "model.safetensors", lambda t: t.update({name: np.zeros((50, 36), dtype)}))
    assert refused(folder) == (
        f"{folder / 'model.safetensors'}: tensor {name} is {code}; allowed: F32, F16, BF16, F64 "
        "(a quantised checkpoint must be dequantised first)"
    )


def test_a_stored_head_beside_a_tied_one_must_equal_the_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    table = tensors_of(file)["model.embed_tokens.weight"]
    change_tensors(file, lambda tensors: tensors.update({"lm_head.weight": table.copy()}))
    assert [weight.name for weight in open_checkpoint(str(folder)).weights].count("head.weight") == 0
    for other in (table + np.float32(1e-3), table[:-1].copy()):
        change_tensors(file, lambda tensors, other=other: tensors.update({"lm_head.weight": other}))
        assert refused(folder) == (
            f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding; set it to false"
        )


# The folder's other files


def test_a_folder_without_a_config_is_no_checkpoint(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refused(folder) == f"{folder}: no config.json in this folder, so it is no Hugging Face checkpoint"


@pytest.mark.parametrize("text", ["{", "", "nonsense", '{"a": }', "[" * 100_000, b"\xff\xfe{}"])
def test_a_config_that_is_not_json_is_refused(folder: Path, text: str | bytes) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert refused(folder).startswith(f"{folder / 'config.json'}: not JSON: ")


def test_a_config_that_is_not_an_object_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    assert refused(folder) == f"{folder / 'config.json'}: not a JSON object"


def test_a_folder_without_weights_says_what_it_has_instead(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refused(folder) == (
        f"{folder}: neither model.safetensors nor model.safetensors.index.json; found pytorch_model.bin: "
        "convert to safetensors, or pass a .gguf file itself"
    )
    (folder / "pytorch_model.bin").unlink()
    assert refused(folder).endswith("model.safetensors.index.json")


def eos_ids(folder: Path, *, config: Any = None, generation: Any = None, token: Any = None) -> tuple[int, ...]:
    change_config(folder, eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    write(folder, byte_level(), eos_token=token)
    return open_checkpoint(str(folder)).config.eos_token_ids


def test_eos_ids_are_the_union_of_config_generation_config_and_tokenizer(folder: Path) -> None:
    assert eos_ids(folder, config=7) == (7,)
    assert eos_ids(folder, config=[7, 9], generation=8) == (7, 8, 9)
    assert eos_ids(folder, config=7, generation=[8, 7], token="<|im_end|>") == (3, 7, 8)
    assert eos_ids(folder, token={"__type": "AddedToken", "content": "</s>", "special": True}) == (1,)
    assert eos_ids(folder, token="<not in the vocabulary>") == ()
    assert eos_ids(folder) == ()
    assert eos_ids(folder, config=5, token=["</s>"]) == (5,)


def test_the_eos_token_may_be_a_piece_of_the_vocabulary(folder: Path) -> None:
    change_config(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    write(folder, byte_level(), eos_token="a")
    assert open_checkpoint(str(folder)).config.eos_token_ids == (byte_level().token_to_id("a"),)
    write(folder, metaspace(), eos_token="c")
    assert open_checkpoint(str(folder)).config.eos_token_ids == (metaspace().token_to_id("c"),)


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_text_file_that_is_not_json_is_named(folder: Path, file: str) -> None:
    write(folder, byte_level(), **CONFIG)
    (folder / file).write_text("{")
    assert refused(folder).startswith(f"{folder / file}: not JSON: ")


def test_an_eos_id_of_a_wrong_kind_is_named_with_its_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert refused(folder) == (
        f"{folder / 'generation_config.json'}: eos_token_id is '</s>', must be a token id or a list of them"
    )


@pytest.mark.parametrize("added", ['[{"id": 3}]', "[3]", '"x"', '{"a": 1}'])
def test_damaged_added_tokens_are_refused(folder: Path, added: str) -> None:
    write(folder, byte_level(), **CONFIG)
    raw = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**raw, "added_tokens": json.loads(added)}))
    assert refused(folder) == f"{folder / 'tokenizer.json'}: added_tokens must be a list of objects with content and id"


def test_the_text_files_are_kept_as_they_are(folder: Path) -> None:
    write(folder, byte_level(), **CONFIG)
    opened = open_checkpoint(str(folder))
    assert sorted(opened.text) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name, data in opened.text.items():
        assert data == (folder / name).read_bytes()


def test_the_tiny_models_have_odd_sizes() -> None:
    assert SMALL["hidden_size"] % 16, "sizes that are powers of two hide a mixed-up shape"


def test_a_tokenizer_that_cannot_be_read_is_refused_at_export(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer that can be read"):
        open_checkpoint(str(folder))
