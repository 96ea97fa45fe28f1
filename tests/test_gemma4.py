"""Gemma 4's text decoder against transformers' own class: logits, caches, what a bundle says, what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import export
from gemma4_models import BASE, EXPERTS, EXPORTED, FULL, IN_TORCH, ROPE, SHARED, SLIDING, save
from proof import RowsBackend, prove

from rollkv.models.checkpoint import open_checkpoint
from rollkv.models.config import CheckpointError, DecoderConfig
from rollkv.models.settings import read_config
from rollkv.runtime.bundle import Bundle
from rollkv.runtime.session import Session

Made = Callable[[str], tuple[Path, Bundle]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Bundle]]:
    """made(name): the folder of a checkpoint of EXPORTED and its bundle with c = 8, C = 48 and logits of every row."""
    kept: dict[str, tuple[Path, Bundle]] = {}

    def get(name: str) -> tuple[Path, Bundle]:
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            source = save(folder / "source", **EXPORTED[name])
            kept[name] = source, export(source, folder / "bundle", head="all")
        return kept[name]

    return get


def in_torch(source: Path, folder: Path, **settings: Any) -> Session:
    """The decoder and the runtime without graphs: the torch decoder is run as the manifest says."""
    from rollkv.export.pipeline import describe
    from rollkv.export.reference_backends import TorchBackend
    from rollkv.export.signature import resolve
    from rollkv.export.tables import host_tables, write_table

    checkpoint = open_checkpoint(str(source))
    lengths = {"max_lm_input_len": 40, "chunk_size": 8, "max_kvcache_len": 48}
    options = resolve(checkpoint.config, head="all", **lengths, **settings)
    folder.mkdir()
    for table in host_tables(checkpoint, options).values():
        write_table(folder / table.info.file, table, lambda count: None)
    return Session(Bundle(folder, describe(checkpoint, options)), backend=TorchBackend(checkpoint, options))


def reference(source: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()


def worst_error(model: Any, session: Session, lengths: Sequence[int], decoded: int = 0) -> float:
    """Largest |difference| / largest |logit| over every real row; the last `decoded` tokens come one by one."""
    import torch

    inner, tables, worst = session.backend, session.loaded.tables, 0.0
    for n in lengths:
        ids = np.random.default_rng(n).integers(0, BASE["vocab_size"], n).tolist()
        rows = RowsBackend(inner)
        session = Session(session.bundle, backend=rows)
        session.loaded.tables = tables
        session.prefill(ids[: n - decoded])
        for token in ids[n - decoded :]:
            session.decode(token)
        with torch.no_grad():
            wanted = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        got = np.concatenate(rows.rows)[-n:]
        worst = max(worst, float(np.abs(got - wanted).max() / np.abs(wanted).max()))
    return worst


# Numbers


@pytest.mark.parametrize("name", EXPORTED)
def test_every_row_and_every_rung_equals_transformers(made: Made, name: str, tmp_path: Path) -> None:
    prove(made(name)[0], tmp_path / "bundle")


@pytest.mark.parametrize("name", IN_TORCH)
def test_other_shapes_equal_transformers_too(tmp_path: Path, name: str) -> None:
    settings, graphs = IN_TORCH[name]
    source = save(tmp_path / "source", **{"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], **settings})
    session = in_torch(source, tmp_path / "tables", **graphs)
    assert worst_error(reference(source), session, [1, 7, 9, 16, 27, 40]) < 1e-4
    assert worst_error(reference(source), session, [29], decoded=6) < 1e-4


def test_every_norm_scalar_and_table_is_large_enough_that_its_lack_would_show(tmp_path: Path) -> None:
    import torch

    source = save(tmp_path / "source", **{**SHARED, **EXPERTS})
    session, model = in_torch(source, tmp_path / "tables"), reference(source)
    assert worst_error(model, session, [9]) < 1e-4
    lacking = {}
    for name, parameter in session.backend._decoder.named_parameters():  # type: ignore[attr-defined]
        kind = re.sub(r"layers\.\d+", "layers", name)
        if parameter.ndim == 1 and kind not in lacking:
            kept = parameter.detach().clone()
            with torch.no_grad():
                parameter.fill_(1.0)
                lacking[kind] = worst_error(model, session, [9])
                parameter.copy_(kept)
    assert len(lacking) == 15
    assert min(lacking.values()) > 1e-3, lacking
    table = session.loaded.tables["per_layer_inputs"]
    table._table = np.zeros_like(table._table)
    assert worst_error(model, session, [9]) > 1e-2


def test_a_layer_that_reads_another_s_cache_has_none(made: Made) -> None:
    m = made("shared")[1].manifest
    assert [layer.kv_from for layer in m.layers] == [None, None, None, 1, 1, 2]
    assert [layer.head_dim for layer in m.layers] == [8, 8, 16, 8, 8, 16]
    assert [layer.kv_len for layer in m.layers] == [18, 18, 48, 18, 18, 48]
    assert [layer.rope for layer in m.layers] == ["sliding", "sliding", "full"] * 2
    assert m.kv_pairs == [[f"past_{part}_{i}", f"new_{part}_{i}"] for i in range(3) for part in ("key", "value")]
    for graph in m.graphs:
        shapes = {value.name: value.shape for value in graph.inputs}
        assert shapes["per_layer_inputs"] == [1, graph.rows, 60]
        assert [name for name in shapes if name.startswith("past")] == [past for past, _ in m.kv_pairs]
        assert shapes["past_key_1"] == [1, 18, 2, 8]
        assert shapes["past_value_2"] == [1, 48, 2, 16]


def test_the_table_of_rows_for_each_layer_is_a_file_of_its_own_in_its_storage_type(made: Made) -> None:
    from safetensors.numpy import load_file

    source, bundle = made("shared")
    info = bundle.manifest.per_layer_embedding
    assert info is not None
    assert (info.shape, info.dtype, info.scale) == ([211, 60], "bfloat16", math.sqrt(10))
    stored = load_file(source / "model.safetensors")["model.embed_tokens_per_layer.weight"]
    assert (bundle.path / info.file).read_bytes() == stored.tobytes()
    named = {tensor.name for file in ("prefill.onnx", "decode.onnx") for tensor in initializers(bundle.path / file)}
    assert "per_layer__projection__weight" in named
    assert "per_layer_embedding__weight" not in named


def test_a_model_without_rows_for_each_layer_has_no_input_and_no_table(made: Made) -> None:
    m = made("keys")[1].manifest
    assert m.per_layer_embedding is None
    assert all(value.role != "per_layer_inputs" for graph in m.graphs for value in graph.inputs)
    assert [(layer.kv_heads, layer.head_dim) for layer in m.layers] == [(2, 8), (3, 16)] * 2


def initializers(path: Path) -> Any:
    import onnx

    return onnx.load(path, load_external_data=False).graph.initializer


# Tensors of a checkpoint


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("layers.3.self_attn.k_proj.weight", True),
        ("layers.4.self_attn.v_proj.weight", True),
        ("layers.5.self_attn.k_norm.weight", True),
        ("layers.5.self_attn.v_norm.weight", True),
        ("layers.2.self_attn.v_norm.weight", False),
        ("layers.5.self_attn.v_scale.weight", False),
        ("layers.6.self_attn.k_proj.weight", False),
    ],
)
def test_unread_keys_and_values_of_sharing_layers_are_known_by_name(tmp_path: Path, name: str, read: bool) -> None:
    from safetensors.numpy import load_file, save_file

    source = save(tmp_path / "source", **SHARED)
    tensors = load_file(source / "model.safetensors")
    tensors[f"model.{name}"] = np.ones(3, np.float32)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    if read:
        assert all(name not in weight.origin for weight in open_checkpoint(str(source)).weights)
    else:
        with pytest.raises(CheckpointError, match=f"1 tensors are not used by a gemma4_text decoder.*{name}"):
            open_checkpoint(str(source))


# Settings


def read(**settings: Any) -> DecoderConfig:
    return read_config({"model_type": "gemma4_text", **BASE, **settings}, "config.json")


def test_what_transformers_writes_of_a_config_reads_as_the_config_itself(tmp_path: Path) -> None:
    import json

    from transformers import AutoConfig

    settings = {**BASE, **SHARED, **EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 3}
    AutoConfig.for_model("gemma4_text", **settings).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "global_head_dim" not in written
    assert read_config(written, "config.json") == read(**settings)
    assert {(layer.kv_heads, layer.head_dim) for layer in read(**settings).layers} == {(2, 8), (3, 16)}


def test_an_absent_setting_stands_for_what_transformers_takes_for_it() -> None:
    from transformers import AutoConfig

    bare = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    bare |= {"num_attention_heads": 8, "num_hidden_layers": 7, "max_position_embeddings": 256}
    theirs = AutoConfig.for_model("gemma4_text", **bare)
    config = read_config({"model_type": "gemma4_text", **bare}, "config.json")
    windows = [512 if kind == SLIDING else None for kind in theirs.layer_types]
    assert list(config.windows) == windows == [512] * 5 + [None] * 2
    for ours, layer in zip(config.layers, theirs.per_layer_config, strict=True):
        assert (ours.head_dim, ours.kv_heads) == (layer.head_dim, layer.num_key_value_heads)
    assert config.gemma4 is not None
    assert config.gemma4.per_layer_width == theirs.hidden_size_per_layer_input
    assert config.gemma4.per_layer_vocab == theirs.vocab_size_per_layer_input
    full, sliding = config.ropes
    assert (full.theta, full.type, full.rotary_dim, full.rotated_pairs) == (1e6, "proportional", 512, 64)
    assert (sliding.theta, sliding.type, sliding.rotary_dim) == (1e4, "default", 256)
    assert config.tied_head is theirs.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


def overrides(**layers: Any) -> dict[str, Any]:
    return {"per_layer_config": {key.lstrip("_"): value for key, value in layers.items()}}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"use_bidirectional_attention": "all"}, "is 'all'; allowed for gemma4_text: 'vision', null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; allowed for gemma4_text"),
        ({"attn_logit_softcapping": 50.0}, "setting 'attn_logit_softcapping' = '50.0' is not understood"),
        ({"rope_theta": 1e4}, "setting 'rope_theta' = '10000.0' is not understood"),
        ({"sliding_window": None}, "layer_types has sliding_attention, but sliding_window is null"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, allowed: up to 3"),
        ({"num_kv_shared_layers": 3}, "no layer before the last 3 is a full_attention layer"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1, must be an integer from 0"),
        ({"hidden_size_per_layer_input": "10"}, "hidden_size_per_layer_input is '10', must be an integer from 0"),
        ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input is 0, must be an integer from 1"),
        (
            {"vocab_size_per_layer_input": 210},
            "vocab_size_per_layer_input is 210, below vocab_size 211",
        ),
        ({"global_head_dim": None}, "global_head_dim is None, must be an integer from 1"),
        ({"global_head_dim": 15}, "rotary dimension 15 must be even"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 4}, "is not a multiple of 4 key/value heads"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v is 1, must be true or false"),
        ({"enable_moe_block": True}, "num_experts is None, must be an integer from 1"),
        ({**EXPERTS, "top_k_experts": 6}, "top_k_experts is 6, allowed: up to num_experts 5"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters.full_attention is 'None'"),
        ({"rope_parameters": {**ROPE, FULL: {"rope_type": "yarn"}}}, "rope_type is 'yarn'; supported for gemma4_text"),
        ({"rope_parameters": {**ROPE, FULL: {"rope_type": "default"}}}, "full_attention: rope_theta missing"),
        ({"per_layer_config": [1]}, r"per_layer_config is '\[1\]', must be an object"),
        (overrides(_4={"head_dim": 8}), "per_layer_config has '4', allowed: layers 0 .. 3"),
        (overrides(_1={"intermediate_size": 8}), "per_layer_config.1.intermediate_size is not understood; allowed"),
        (overrides(_1={"head_dim": 0}), "per_layer_config.1: head_dim is 0, must be an integer from 1"),
        (overrides(_1={"head_dim": 12}), "layers of one type must agree"),
    ],
)
def test_a_setting_that_is_wrong_or_would_change_the_numbers_is_refused_by_name(
    settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(CheckpointError, match=match):
        read(**settings)
