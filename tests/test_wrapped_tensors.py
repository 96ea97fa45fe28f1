"""Tensors of a vision-language checkpoint, and adapters for it; against transformers and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from vision_models import OTHER_NAMES, TEXT, change_config, contents, load, rename, save, some_ids

from rollkv.models.checkpoint import open_checkpoint
from rollkv.models.config import CheckpointError

# Names of tensors


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_the_other_names_of_a_checkpoint_hold_the_same_weights(name: str, saved: Any, tmp_path: Path) -> None:
    folder = rename(saved(name).folder, tmp_path / "other", OTHER_NAMES[name])
    assert not load_file(folder / "model.safetensors").keys() & {"model.embed_tokens.weight", "visual.x"}
    theirs = load(folder).state_dict()  # transformers takes these names too
    for key, tensor in saved(name).model.state_dict().items():
        assert torch.equal(theirs[key], tensor), key
    want, got = contents(open_checkpoint(str(saved(name).folder))), contents(open_checkpoint(str(folder)))
    assert got.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llava", "language_model.model.layers.0.mlp.extra.weight"),
        ("llava", "audio_tower.conv.weight"),
        ("llava", "model.layers.0.mlp.up_proj.weight"),
        ("qwen2_vl", "model.norm.bias"),
        ("smolvlm", "model.text_model.layers.2.input_layernorm.weight"),
        ("gemma3", "lm_head.weight"),  # of the other form
        ("gemma4", "model.language_model.layers.2.self_attn.v_norm.weight"),  # of a layer with keys of its own
        ("gemma4", "model.layers.3.self_attn.k_proj.weight"),
    ],
)
def test_a_tensor_that_is_neither_the_decoders_nor_left_aside_is_refused(
    name: str, extra: str, saved: Any, tmp_path: Path
) -> None:
    folder = rename(saved(name).folder, tmp_path / "more", {})
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, extra: np.ones(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"1 tensors are not used by a \w+ decoder, among them {extra}"):
        open_checkpoint(str(folder))


def test_unread_keys_of_layers_that_share_are_known_inside_of_a_whole_model(saved: Any, tmp_path: Path) -> None:
    folder = rename(saved("gemma4").folder, tmp_path / "published", {})  # published Gemma 4 has them
    extra = {
        f"model.language_model.layers.{i}.self_attn.{part}.weight": np.ones(3, np.float32)
        for i in (3, 5)
        for part in ("k_proj", "v_proj", "k_norm")
    }
    tensors = load_file(folder / "model.safetensors")
    assert not tensors.keys() & extra.keys()
    save_file({**tensors, **extra}, folder / "model.safetensors")
    want, got = contents(open_checkpoint(str(saved("gemma4").folder))), contents(open_checkpoint(str(folder)))
    assert got.keys() == want.keys()


@pytest.mark.parametrize(
    ("name", "lost", "message"),
    [
        ("llava", "language_model.model.norm.weight", "tensor language_model.model.norm.weight is missing"),
        ("llava", "language_model.lm_head.weight", "tensor language_model.lm_head.weight is missing"),
        (
            "llava",
            "language_model.model.embed_tokens.weight",
            "tensor model.language_model.embed_tokens.weight or language_model.model.embed_tokens.weight is missing",
        ),
    ],
)
def test_a_missing_tensor_is_named_as_the_checkpoint_would(
    name: str, lost: str, message: str, saved: Any, tmp_path: Path
) -> None:
    folder = rename(saved(name).folder, tmp_path / "less", {})
    tensors = load_file(folder / "model.safetensors")
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(folder))


def test_two_text_decoders_in_one_file_are_refused(saved: Any, tmp_path: Path) -> None:
    folder = rename(saved("llava").folder, tmp_path / "two", {})
    tensors = load_file(folder / "model.safetensors")
    table = tensors["language_model.model.embed_tokens.weight"]
    save_file({**tensors, "model.language_model.embed_tokens.weight": table}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="are both here; allowed: one text decoder"):
        open_checkpoint(str(folder))


def test_what_is_left_aside_may_be_of_any_type(saved: Any, tmp_path: Path) -> None:
    folder = rename(saved("llava").folder, tmp_path / "ids", {})
    tensors = load_file(folder / "model.safetensors")
    ids = {"vision_tower.vision_model.embeddings.position_ids": np.arange(17)}
    save_file({**tensors, **ids}, folder / "model.safetensors")
    assert open_checkpoint(str(folder)).config.family == "llama"


def test_a_head_in_the_file_is_the_head_when_no_level_says_whether_it_is_tied(saved: Any, tmp_path: Path) -> None:
    def silent(raw: dict[str, Any]) -> None:
        del raw["tie_word_embeddings"], raw["text_config"]["tie_word_embeddings"]

    folder = change_config(saved("internvl").folder, tmp_path / "silent", silent)
    ids = torch.tensor([some_ids(9)])
    with torch.no_grad():  # transformers reads it so, with a warning
        assert torch.equal(load(folder)(ids).logits, saved("internvl").model(ids).logits)
    want, got = contents(open_checkpoint(str(saved("internvl").folder))), contents(open_checkpoint(str(folder)))
    np.testing.assert_array_equal(got["head.weight"], want["head.weight"])


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "phi3", "olmo2", "qwen2_moe"])
def test_the_text_decoder_may_be_of_any_family(kind: str, tmp_path: Path) -> None:
    experts = {"num_experts": 3, "num_experts_per_tok": 2} if kind == "qwen2_moe" else {}
    text = {**TEXT, "model_type": kind, **experts}
    opened = open_checkpoint(str(save(tmp_path / kind, "llava", text_config=text)))
    model = load(tmp_path / kind)
    assert opened.config.family == kind
    got = contents(opened)
    layer = model.model.language_model.layers[1]
    np.testing.assert_array_equal(got["head.weight"], model.lm_head.weight.detach().numpy().T)
    want = layer.self_attn.o_proj.weight.detach().numpy().T
    np.testing.assert_array_equal(got["layers.1.attention.out.weight"], want)


# LoRA


def adapter(model: Any, folder: Path, **settings: Any) -> Any:
    """An adapter that peft makes for the whole model and saves; the model with it merged."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **settings))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()


@pytest.fixture(scope="module")
def adapted(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An adapter on q_proj and up_proj of text and vision tower of the llava model, and transformers' merged model."""
    folder = tmp_path_factory.mktemp("lora") / "both"
    return folder, adapter(load(saved("llava").folder), folder, target_modules=["q_proj", "up_proj"])


def merged_contents(base: Path, lora: Path, lines: list[str]) -> dict[str, np.ndarray]:
    return contents(open_checkpoint(str(base), lines.append, lora))


@pytest.mark.parametrize("form", ["saved", "other"])
def test_an_adapter_of_the_whole_model_is_merged_into_its_text_decoder(
    form: str, saved: Any, adapted: tuple[Path, Any], tmp_path: Path
) -> None:
    base, (folder, model) = saved("llava").folder, adapted
    if form == "other":
        base = rename(base, tmp_path / "other", OTHER_NAMES["llava"])
    lines: list[str] = []
    got = merged_contents(base, folder, lines)
    text = model.model.language_model
    for i, layer in enumerate(text.layers):
        for ours, theirs in (("attention.q", layer.self_attn.q_proj), ("mlp.up", layer.mlp.up_proj)):
            want = theirs.weight.detach().numpy().T
            np.testing.assert_allclose(got[f"layers.{i}.{ours}.weight"].reshape(want.shape), want, atol=1e-5)
    assert lines == [f"{folder}: 2 updates are of the vision part, which is not in the bundle"]


def test_an_adapter_with_the_names_of_an_older_transformers_gives_the_same(
    saved: Any, adapted: tuple[Path, Any], tmp_path: Path
) -> None:
    old = {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower."}
    renamed = {f"base_model.model.{new}": f"base_model.model.{then}" for new, then in old.items()}
    folder = tmp_path / "old"
    folder.mkdir()
    tensors = {}
    for name, array in load_file(adapted[0] / "adapter_model.safetensors").items():
        new = next(new for new in renamed if name.startswith(new))
        tensors[renamed[new] + name.removeprefix(new)] = array
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes((adapted[0] / "adapter_config.json").read_bytes())
    base = saved("llava").folder
    want, got = merged_contents(base, adapted[0], []), merged_contents(base, folder, [])
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    both = {**tensors, **load_file(adapted[0] / "adapter_model.safetensors")}
    save_file(both, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds language_model\.model\.layers.* twice"):
        merged_contents(base, folder, [])


def test_an_adapter_of_the_vision_tower_alone_is_refused(saved: Any, tmp_path: Path) -> None:
    adapter(load(saved("llava").folder), tmp_path / "eye", target_modules=r".*vision_tower.*q_proj")
    with pytest.raises(CheckpointError, match="changes no tensor of the text decoder; it is about images alone"):
        open_checkpoint(str(saved("llava").folder), lora=tmp_path / "eye")
