"""The rows of the table, against transformers' own classes: defaults, names and shapes of tensors, logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHAPES, make_checkpoint
from family_shapes import FAMILY_SHAPES, make_family

from rollkv.export.signature import ExportOptions, graph_inputs
from rollkv.export.trace import make_decoder
from rollkv.models.checkpoint import Checkpoint, load_decoder, open_checkpoint
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
    """But for internlm3, whose model is llama's with other names of settings."""
    made = {family for family, _ in (*SHAPES.values(), *FAMILY_SHAPES.values())}
    assert made == set(FAMILIES) - {"internlm3"}


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
    assert compared > 5
    assert not set(differing) - set(OTHERWISE), differing
    off = {key: value for key, value in differing.items() if key != "sliding_window"}
    assert all(ours is None for ours, _ in off.values()), off
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
    made = make_decoder(config, options(24))
    from_files = {tensor.decoder for tensor in tensor_names(config)}
    assert from_files == {key for key, _ in made.named_parameters() if not key.startswith("rope.")}


# Logits


def options(slots: int) -> ExportOptions:
    return ExportOptions(max_lm_input_len=slots, chunk_size=8, max_kvcache_len=slots, head="all")


def in_chunks(opened: Checkpoint, ids: np.ndarray, chosen: ExportOptions) -> np.ndarray:
    """Logits of every token, c at a time over a cache in plain NumPy. The length of ids is a multiple of c."""
    config, rows, slots = opened.config, chosen.chunk_size, chosen.max_kvcache_len
    decoder = make_decoder(config, chosen).eval()
    load_decoder(decoder, opened, slots)
    window = next((layer.window for layer in config.layers if layer.window), slots)
    pieces: dict[str, list[np.ndarray]] = {}
    logits = []
    for start in range(0, len(ids), rows):
        positions = np.arange(start, start + rows)
        feeds: dict[str, np.ndarray] = {}
        for value in graph_inputs(config, chosen, rows):
            if value.role == "ids":
                feeds[value.name] = ids[None, positions]
            elif value.role == "position_ids":
                feeds[value.name] = positions[None]
            elif value.role.endswith("mask"):
                keys = np.arange(start + rows - value.shape[-1], start + rows)
                distance = positions[:, None] - keys[None, :]
                seen = (distance >= 0) & (keys >= 0) & (distance < (window if "sliding" in value.name else slots))
                feeds[value.name] = np.where(seen, 0, -32768).astype(np.float32)[None, None]
            else:
                empty = np.zeros(value.shape, np.float32)
                held = np.concatenate([empty, *pieces.get(value.name.replace("past", "new"), [])], 1)
                feeds[value.name] = held[:, -value.shape[1] :]
        with torch.no_grad():
            values = decoder({name: torch.from_numpy(array) for name, array in feeds.items()})
        logits.append(values["logits"][0].numpy())
        for name in values:
            if name.startswith("new_"):
                pieces.setdefault(name, []).append(values[name].numpy())
    return np.concatenate(logits)


@pytest.mark.parametrize("name", ALL)
def test_logits_of_every_family_are_those_of_transformers(name: str, folder: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    opened = open_checkpoint(str(folder(name)))
    theirs = AutoModelForCausalLM.from_pretrained(
        folder(name), attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    for n in (24, 48):  # at 48 types dynamic and longrope have changed their frequencies
        ids = np.random.default_rng(n).integers(3, 200, n)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            wanted = theirs(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
        got = in_chunks(opened, ids, options(n))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_internlm3_is_llama_with_biases_of_its_own_choice(tmp_path: Path) -> None:
    """Its q, k, v follow qkv_bias, the rest bias; what lacks one is a llama whose bias there is zero."""
    import json

    from safetensors.numpy import load_file, save_file
    from transformers import AutoModelForCausalLM

    made = make_checkpoint(tmp_path / "internlm3", "llama-bias", head_dim=6)
    raw: dict[str, Any] = json.loads((made / "config.json").read_text())
    del raw["attention_bias"], raw["mlp_bias"]
    raw |= {"model_type": "internlm3", "qkv_bias": True, "bias": False, "architectures": ["InternLM3ForCausalLM"]}
    tensors = load_file(made / "model.safetensors")
    wanted_state = {k: v if ".bias" not in k or k.split(".")[-2][0] in "qkv" else 0 * v for k, v in tensors.items()}
    save_file(wanted_state, made / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(made, attn_implementation="eager").eval()
    kept = {k: v for k, v in tensors.items() if ".bias" not in k or k.split(".")[-2][0] in "qkv"}
    assert len(kept) == len(tensors) - 2 * 4
    save_file(kept, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text(json.dumps(raw))
    ids = np.random.default_rng(0).integers(3, 200, 24)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids)[None]).logits[0].numpy()
    got = in_chunks(open_checkpoint(str(made)), ids, options(24))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
