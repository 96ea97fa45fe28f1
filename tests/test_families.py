"""Rows against transformers' own classes: defaults, names and shapes of tensors. For logits see test_proof_*.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHAPES, make_checkpoint
from family_shapes import FAMILY_SHAPES, make_family

from rollkv.models.checkpoint import load_decoder, open_checkpoint
from rollkv.models.decoder import Decoder
from rollkv.models.families import FAMILIES
from rollkv.models.family import REQUIRED
from rollkv.models.names import tensor_names

ALL = [*SHAPES, *FAMILY_SHAPES]
# Settings that a row has otherwise than transformers' class, and why that gives the same model. What each amounts to is
# compared in test_settings.py, which reads a bare config and the one that transformers fills in.
OTHERWISE = {
    "num_key_value_heads": "null stands for as many as query heads, which is where the class ends too",
    "head_dim": "null stands for hidden_size / num_attention_heads, which is where the class ends too",
    "rope_parameters": "the class keeps theta and the part that turns in it; rows have them as fields of their own",
    "layer_types": "the class writes out what the row's windows say",
    "per_layer_config": "the class writes out that layers of full attention have the head_dim of their own type",
    "no_rope_layers": "the class writes out what the row's interval says",
    "mlp_only_layers": "null and an empty list say the same",
    "sliding_window": "the class drops it while use_sliding_window is off",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder(name): a tiny checkpoint, saved by transformers once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            make = make_checkpoint if name in SHAPES else make_family
            made[name] = make(tmp_path_factory.mktemp("family") / name, name)
        return made[name]

    return get


def test_every_family_has_a_toy_model() -> None:
    """That of gemma4_text is in gemma4_models.py, with tests of its own."""
    made = {family for family, _ in (*SHAPES.values(), *FAMILY_SHAPES.values())}
    assert made == set(FAMILIES) - {"gemma4_text"}


# Defaults


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_defaults_of_a_row_are_those_of_transformers_class(family: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family).to_dict()
    compared, differing = 0, {}
    for key, value in FAMILIES[family].settings.items():
        if value is not REQUIRED and key in theirs:
            compared += 1
            if theirs[key] != value:
                differing[key] = (value, theirs[key])
    assert compared >= 5
    assert not set(differing) - set(OTHERWISE), differing
    off = {key: value for key, value in differing.items() if key != "sliding_window"}
    assert all(ours in (None, "by layer type") for ours, _ in off.values()), off
    if "sliding_window" in differing:
        assert FAMILIES[family].settings["use_sliding_window"] is False
        assert not theirs["sliding_window"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_setting_that_transformers_class_has_is_known(family: str) -> None:
    """But for those whose default says that the feature is off."""
    from transformers import AutoConfig, PretrainedConfig

    from rollkv.models.settings import _HARMLESS

    own = set(AutoConfig.for_model(family).to_dict()) - set(PretrainedConfig().to_dict())
    row = FAMILIES[family]
    assert own - set(row.settings) - set(row.fixed) - _HARMLESS <= {"attention_bias", "mlp_bias"}
    if own & {"attention_bias", "mlp_bias"} - set(row.settings) - set(row.fixed):
        assert family == "internlm3"  # whose own code calls them otherwise


# Tensors


@pytest.mark.parametrize("name", ALL)
def test_names_and_shapes_are_those_that_transformers_saves(name: str, folder: Callable[[str], Path]) -> None:
    from safetensors import safe_open

    config = open_checkpoint(str(folder(name))).config
    with safe_open(folder(name) / "model.safetensors", "np") as file:
        theirs = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    ours = {stored: tensor.stored_shape for tensor in tensor_names(config) for stored in tensor.stored}
    assert ours == theirs
    with torch.device("meta"):
        made = Decoder(config)
    from_files = {tensor.decoder for tensor in tensor_names(config)}
    assert from_files == {key for key, _ in made.named_parameters() if not key.startswith("rope.")}


# A family that transformers does not have


def test_internlm3_is_llama_with_biases_of_its_own_choice(tmp_path: Path) -> None:
    """Its q, k, v follow qkv_bias, the rest bias; what lacks one is a llama whose bias there is zero."""
    from safetensors.numpy import load_file, save_file
    from transformers import AutoModelForCausalLM

    made = make_checkpoint(tmp_path / "internlm3", "llama-bias", head_dim=6)
    tensors = load_file(made / "model.safetensors")
    lacking = [
        name for name in tensors if name.endswith(("o_proj.bias", "gate_proj.bias", "up_proj.bias", "down_proj.bias"))
    ]
    save_file(
        {**tensors, **{name: 0 * tensors[name] for name in lacking}}, made / "model.safetensors", {"format": "pt"}
    )
    theirs = AutoModelForCausalLM.from_pretrained(made, attn_implementation="eager").eval()

    save_file({name: tensors[name] for name in tensors if name not in lacking}, made / "model.safetensors")
    raw: dict[str, Any] = json.loads((made / "config.json").read_text())
    del raw["attention_bias"], raw["mlp_bias"]
    raw |= {"model_type": "internlm3", "qkv_bias": True, "bias": False}
    (made / "config.json").write_text(json.dumps(raw))
    opened = open_checkpoint(str(made))
    decoder = Decoder(opened.config, head="all").eval()
    load_decoder(decoder, opened, 24)
    ids, hidden = torch.arange(3, 27)[None], torch.full((24, 24), -32768.0).triu(1)
    past = {f"past_{part}_{i}": torch.zeros(1, 24, 2, 6) for part in ("key", "value") for i in range(2)}
    with torch.no_grad():
        wanted = theirs(ids).logits
        feeds = {"input_ids": ids, "position_ids": torch.arange(24)[None], "attention_mask": hidden[None, None], **past}
        got = decoder(feeds)["logits"]
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
