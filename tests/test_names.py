"""Every layout in which a checkpoint stores a tensor, assembled from stored arrays and compared with plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bare_configs import BARE
from family_shapes import make_family

from rollkv.models.checkpoint import open_checkpoint
from rollkv.models.config import CheckpointError, DecoderConfig
from rollkv.models.families import FAMILIES
from rollkv.models.names import TensorName, head_name, tensor_names
from rollkv.models.settings import read_config

Array = np.ndarray[Any, Any]
H, N, K, D = 36, 6, 2, 6  # hidden size, query heads, key/value heads, head dimension of BARE
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 22}


@dataclass(frozen=True)
class Stored:
    """An array as a tensor of a file."""

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, start: int, stop: int) -> Array:
        return self.array[start:stop]


def config(family: str, **settings: Any) -> DecoderConfig:
    theirs = FAMILIES[family].keys
    raw = {theirs.get(key, key): value for key, value in {**BARE, "model_type": family, **settings}.items()}
    return read_config({key: value for key, value in raw.items() if value is not None}, "config.json")


def stored_arrays(cfg: DecoderConfig, column: str = "hf") -> dict[str, Array]:
    """Random arrays under every name that a checkpoint of this config holds."""
    draw = np.random.default_rng(5)
    return {
        stored: draw.standard_normal(name.stored_shape).astype(np.float32)
        for name in tensor_names(cfg, column)
        for stored in name.stored
    }


def assemble_all(cfg: DecoderConfig, found: Mapping[str, Stored], column: str = "hf") -> list[Any]:
    return [(name, name.assemble(found, "here")) for name in tensor_names(cfg, column)]


def assembled(cfg: DecoderConfig, arrays: dict[str, Array], column: str = "hf") -> dict[str, Array]:
    """The decoder's parameters, linear maps as (in, out)."""
    found = {name: Stored(array) for name, array in arrays.items()}
    made = {}
    for name, tensor in assemble_all(cfg, found, column):
        half = tensor.shape[0] // 2
        whole = np.concatenate([tensor.read(0, half), tensor.read(half, tensor.shape[0])])
        made[name.decoder] = whole.T if name.transposed else whole
    return made


def layer_of(made: dict[str, Array], i: int = 1) -> Callable[[str], Array]:
    return lambda name: made[f"layers.{i}.{name}"]


# Layouts


def test_a_plain_tensor_is_what_is_stored() -> None:
    cfg = config("llama", attention_bias=True, mlp_bias=True)
    arrays = stored_arrays(cfg)
    made = assembled(cfg, arrays)
    assert len(made) == len(arrays)
    ours = layer_of(made)
    np.testing.assert_array_equal(made["embedding.weight"], arrays["model.embed_tokens.weight"])
    np.testing.assert_array_equal(made["head.weight"], arrays["lm_head.weight"].T)
    for part, name in (("attention.k", "self_attn.k_proj"), ("attention.out", "self_attn.o_proj")):
        np.testing.assert_array_equal(ours(f"{part}.weight"), arrays[f"model.layers.1.{name}.weight"].T)
        np.testing.assert_array_equal(ours(f"{part}.bias"), arrays[f"model.layers.1.{name}.bias"])
    np.testing.assert_array_equal(ours("mlp_norm.weight"), arrays["model.layers.1.post_attention_layernorm.weight"])


def test_queries_keys_and_values_are_cut_out_of_a_fused_tensor() -> None:
    cfg = config("phi3", head_dim=None, num_key_value_heads=2)
    arrays = stored_arrays(cfg)
    fused = arrays["model.layers.1.self_attn.qkv_proj.weight"]
    assert fused.shape == ((N + 2 * K) * D, H)
    ours = layer_of(assembled(cfg, arrays))
    for x, rows in zip("qkv", np.split(fused, [N * D, (N + K) * D]), strict=True):
        np.testing.assert_array_equal(ours(f"attention.{x}.weight"), rows.T)


@pytest.mark.parametrize(("family", "settings"), [("phi3", {"head_dim": None}), ("glm", {"head_dim": 8}), ("glm4", {})])
def test_gate_and_up_are_halves_of_a_fused_tensor(family: str, settings: dict[str, Any]) -> None:
    cfg = config(family, **settings)
    arrays = stored_arrays(cfg)
    gate, up = np.split(arrays["model.layers.1.mlp.gate_up_proj.weight"], 2)
    ours = layer_of(assembled(cfg, arrays))
    np.testing.assert_array_equal(ours("mlp.gate.weight"), gate.T)
    np.testing.assert_array_equal(ours("mlp.up.weight"), up.T)


def test_queries_keys_and_values_of_each_head_may_lie_together() -> None:
    cfg = config("gpt_neox", num_key_value_heads=None, rope_theta=None, partial_rotary_factor=0.34)
    arrays = stored_arrays(cfg)
    weight = arrays["gpt_neox.layers.1.attention.query_key_value.weight"].reshape(N, 3, D, H)
    bias = arrays["gpt_neox.layers.1.attention.query_key_value.bias"].reshape(N, 3, D)
    ours = layer_of(assembled(cfg, arrays))
    for which, x in enumerate("qkv"):
        np.testing.assert_array_equal(ours(f"attention.{x}.weight"), weight[:, which].reshape(-1, H).T)
        np.testing.assert_array_equal(ours(f"attention.{x}.bias"), bias[:, which].reshape(-1))


def test_a_tensor_may_be_stored_from_in_to_out() -> None:
    cfg = config("gpt2", num_key_value_heads=None)
    arrays = stored_arrays(cfg)
    ours = layer_of(assembled(cfg, arrays))
    fused, bias = arrays["transformer.h.1.attn.c_attn.weight"], arrays["transformer.h.1.attn.c_attn.bias"]
    assert fused.shape == (H, 3 * H)
    for which, x in enumerate("qkv"):
        columns = slice(which * H, (which + 1) * H)
        np.testing.assert_array_equal(ours(f"attention.{x}.weight"), fused[:, columns])
        np.testing.assert_array_equal(ours(f"attention.{x}.bias"), bias[columns])
    np.testing.assert_array_equal(ours("attention.out.weight"), arrays["transformer.h.1.attn.c_proj.weight"])
    np.testing.assert_array_equal(ours("mlp.up.weight"), arrays["transformer.h.1.mlp.c_fc.weight"])
    np.testing.assert_array_equal(ours("mlp.down.bias"), arrays["transformer.h.1.mlp.c_proj.bias"])
    np.testing.assert_array_equal(assembled(cfg, arrays)["positions.weight"], arrays["transformer.wpe.weight"])


def test_vectors_of_each_head_become_rows() -> None:
    cfg = config("stablelm", qk_layernorm=True, head_dim=None, partial_rotary_factor=0.34)
    arrays = stored_arrays(cfg)
    ours = layer_of(assembled(cfg, arrays))
    for x, heads in (("q", N), ("k", K)):
        rows = [arrays[f"model.layers.1.self_attn.{x}_layernorm.norms.{head}.weight"] for head in range(heads)]
        np.testing.assert_array_equal(ours(f"attention.{x}_norm.weight"), np.stack(rows))
        assert ours(f"attention.{x}_norm.weight").shape == (heads, D)


def test_experts_lie_one_behind_the_other() -> None:
    cfg = config("mixtral", num_local_experts=3)
    arrays = stored_arrays(cfg)
    ours = layer_of(assembled(cfg, arrays))
    experts = [f"model.layers.1.block_sparse_moe.experts.{e}" for e in range(3)]
    for part, name in (("gate", "w1"), ("up", "w3")):
        wide = np.concatenate([arrays[f"{expert}.{name}.weight"] for expert in experts], 0)  # (E W, H)
        np.testing.assert_array_equal(ours(f"mlp.{part}.weight"), wide.T)
    wide = np.concatenate([arrays[f"{expert}.w2.weight"] for expert in experts], 1)  # (H, E W)
    np.testing.assert_array_equal(ours("mlp.down.weight"), wide.T)
    np.testing.assert_array_equal(ours("mlp.router.weight"), arrays["model.layers.1.block_sparse_moe.gate.weight"].T)


def test_a_shared_expert_and_layers_without_experts_have_their_own_names() -> None:
    cfg = config("qwen2_moe", **MOE, head_dim=None, shared_expert_intermediate_size=18, mlp_only_layers=[0])
    arrays = stored_arrays(cfg)
    made = assembled(cfg, arrays)
    np.testing.assert_array_equal(made["layers.0.mlp.down.weight"], arrays["model.layers.0.mlp.down_proj.weight"].T)
    place = "model.layers.1.mlp"
    for part in ("gate", "up", "down"):
        np.testing.assert_array_equal(
            made[f"layers.1.mlp.shared.{part}.weight"], arrays[f"{place}.shared_expert.{part}_proj.weight"].T
        )
    np.testing.assert_array_equal(
        made["layers.1.mlp.shared_gate.weight"], arrays[f"{place}.shared_expert_gate.weight"].T
    )
    assert made["layers.1.mlp.shared.up.weight"].shape == (H, 18)


def test_a_shared_expert_with_biases_asks_for_its_own() -> None:
    cfg = config("qwen2_moe", **MOE, head_dim=None, shared_expert_intermediate_size=18)
    names = {name.decoder: name.stored for name in tensor_names(replace(cfg, biases=frozenset({"mlp"})))}
    place = "model.layers.1.mlp.shared_expert"
    for part in ("gate", "up", "down"):
        for kind in ("weight", "bias"):
            assert names[f"layers.1.mlp.shared.{part}.{kind}"] == (f"{place}.{part}_proj.{kind}",)


# Values and rows that the decoder has otherwise


def in_halves(array: Array, heads: int, rotary: int) -> Array:
    """Rows of each head: the even ones of those that turn, the odd ones, the rest."""
    by_head = array.reshape(heads, -1, *array.shape[1:])
    turning, rest = by_head[:, :rotary], by_head[:, rotary:]
    return np.concatenate([turning[:, 0::2], turning[:, 1::2], rest], 1).reshape(array.shape)


@pytest.mark.parametrize(
    ("family", "settings", "rotary"),
    [
        ("glm", {"head_dim": 8}, 4),
        ("glm", {"head_dim": 8, "partial_rotary_factor": 1.0}, 8),
        ("ernie4_5", {"head_dim": 8, "use_bias": True}, 8),
        ("helium", {"head_dim": 8, "attention_bias": True}, 8),
    ],
)
def test_rows_that_turn_in_pairs_are_put_in_halves(family: str, settings: dict[str, Any], rotary: int) -> None:
    cfg = config(family, **settings)
    arrays = stored_arrays(cfg)
    ours = layer_of(assembled(cfg, arrays))
    for x, heads in (("q", N), ("k", K)):
        name = f"model.layers.1.self_attn.{x}_proj"
        np.testing.assert_array_equal(
            ours(f"attention.{x}.weight"), in_halves(arrays[f"{name}.weight"], heads, rotary).T
        )
        np.testing.assert_array_equal(ours(f"attention.{x}.bias"), in_halves(arrays[f"{name}.bias"], heads, rotary))
    values = arrays["model.layers.1.self_attn.v_proj.weight"]
    np.testing.assert_array_equal(ours("attention.v.weight"), values.T)


def test_norms_of_queries_and_keys_follow_the_order_of_their_rows() -> None:
    cfg = config("cohere", use_qk_norm=True)
    arrays = stored_arrays(cfg)
    ours = layer_of(assembled(cfg, arrays))
    for x in "qk":
        stored = arrays[f"model.layers.1.self_attn.{x}_norm.weight"]  # (heads, D)
        np.testing.assert_array_equal(
            ours(f"attention.{x}_norm.weight"), np.concatenate([stored[:, 0::2], stored[:, 1::2]], 1)
        )


def test_layers_that_do_not_turn_keep_their_rows() -> None:
    kinds = ["sliding_attention", "full_attention"]  # of which only the first turns
    cfg = config("cohere2", layer_types=kinds)
    arrays = stored_arrays(cfg)
    made = assembled(cfg, arrays)
    turns, rests = (arrays[f"model.layers.{i}.self_attn.k_proj.weight"] for i in range(2))
    np.testing.assert_array_equal(made["layers.0.attention.k.weight"], in_halves(turns, K, D).T)
    np.testing.assert_array_equal(made["layers.1.attention.k.weight"], rests.T)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "nemotron"])
def test_norm_weights_that_lack_one_get_it_and_nothing_else_does(family: str) -> None:
    cfg = config(family, head_dim=6 if family != "nemotron" else 8)
    arrays = stored_arrays(cfg)
    made = assembled(cfg, arrays)
    names = {name.decoder: name.stored[0] for name in tensor_names(cfg)}
    for ours, theirs in names.items():
        stored = arrays[theirs].T if made[ours].ndim == 2 and ours != "embedding.weight" else arrays[theirs]
        one = np.float32("norm.weight" in ours)
        np.testing.assert_array_equal(made[ours], stored + one, err_msg=ours)


def test_gguf_files_have_the_one_in_their_norms_already() -> None:
    cfg = config("gemma2", head_dim=6)
    arrays = stored_arrays(cfg, "gguf")
    made = assembled(cfg, arrays, "gguf")
    np.testing.assert_array_equal(made["layers.1.mlp_post_norm.weight"], arrays["blk.1.post_ffw_norm.weight"])
    np.testing.assert_array_equal(made["head.norm.weight"], arrays["output_norm.weight"])


def test_fused_tensors_of_gguf_files_have_names_of_their_own() -> None:
    cfg = config("phi3", head_dim=None)
    arrays = stored_arrays(cfg, "gguf")
    ours = layer_of(assembled(cfg, arrays, "gguf"))
    fused, both = arrays["blk.1.attn_qkv.weight"], arrays["blk.1.ffn_up.weight"]
    np.testing.assert_array_equal(ours("attention.k.weight"), fused[N * D : (N + K) * D].T)
    np.testing.assert_array_equal(ours("mlp.gate.weight"), both[:50].T)
    np.testing.assert_array_equal(ours("mlp.up.weight"), both[50:].T)


# What must be there


@pytest.mark.parametrize(
    ("family", "settings", "name", "shape"),
    [
        ("llama", {}, "model.layers.1.mlp.up_proj.weight", (50, 36)),
        ("phi3", {"head_dim": None}, "model.layers.1.self_attn.qkv_proj.weight", (60, 36)),
        ("glm", {"head_dim": 8}, "model.layers.0.mlp.gate_up_proj.weight", (100, 36)),
        (
            "gpt_neox",
            {"num_key_value_heads": None, "partial_rotary_factor": 0.34},
            "gpt_neox.layers.1.attention.query_key_value.bias",
            (108,),
        ),
        ("gpt2", {"num_key_value_heads": None}, "transformer.h.0.attn.c_attn.weight", (36, 108)),
        (
            "stablelm",
            {"qk_layernorm": True, "head_dim": None, "partial_rotary_factor": 0.34},
            "model.layers.1.self_attn.q_layernorm.norms.5.weight",
            (6,),
        ),
        ("mixtral", {"num_local_experts": 3}, "model.layers.1.block_sparse_moe.experts.2.w2.weight", (36, 50)),
        ("cohere", {"use_qk_norm": True}, "model.layers.1.self_attn.k_norm.weight", (2, 6)),
        ("olmo2", {}, "model.layers.1.self_attn.k_norm.weight", (12,)),
    ],
)
def test_a_tensor_that_is_missing_or_has_another_shape_is_named(
    family: str, settings: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    cfg = config(family, **settings)
    arrays = stored_arrays(cfg)
    assert arrays[name].shape == shape
    found = {key: Stored(array) for key, array in arrays.items()}

    def refused(found: dict[str, Stored]) -> str:
        with pytest.raises(CheckpointError) as caught:
            assemble_all(cfg, found)
        return str(caught.value)

    assert refused({key: value for key, value in found.items() if key != name}) == f"here: tensor {name} is missing"
    other = (*shape[:-1], shape[-1] + 1)
    assert refused({**found, name: Stored(np.zeros(other, np.float32))}) == (
        f"here: tensor {name} has shape {other}, the config asks for {shape}"
    )


def test_an_expert_more_than_the_config_says_is_named(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "m", "mixtral")
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"num_local_experts": 5', '"num_local_experts": 4'))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    assert str(caught.value).startswith(
        f"{folder}: tensor model.layers.0.block_sparse_moe.gate.weight has shape (5, 36)"
    )


@pytest.mark.parametrize("column", ["hf", "gguf"])
def test_every_name_of_the_decoder_is_asked_for_once(column: str) -> None:
    for family in FAMILIES:
        if column == "gguf" and FAMILIES[family].gguf is None:
            continue
        cfg = config(family, **GEOMETRY.get(family, {}))
        names: list[TensorName] = list(tensor_names(cfg, column))
        assert len({name.decoder for name in names}) == len(names), family
        whole = [name.stored for name in names if name.pick is None]
        assert len(set(whole)) == len(whole), family


GEOMETRY: dict[str, dict[str, Any]] = {
    **{family: {"head_dim": 8} for family in ("glm", "glm4", "nemotron")},
    "internlm3": {"head_dim": 6, "rms_norm_eps": 1e-5},
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0}},
    **{family: {"partial_rotary_factor": 0.34} for family in ("phi", "stablelm")},
    "gpt_neox": {"partial_rotary_factor": 0.34, "num_key_value_heads": None},
    "gpt2": {"num_key_value_heads": None},
}


def test_a_tied_head_has_no_name_and_an_untied_one_has_the_familys() -> None:
    tied = config("llama", tie_word_embeddings=True)
    assert "head.weight" not in [name.decoder for name in tensor_names(tied)]
    assert head_name(tied) == "lm_head.weight"
    assert head_name(tied, "gguf") == "output.weight"
    neox = config("gpt_neox", **GEOMETRY["gpt_neox"])
    assert head_name(neox) == "embed_out.weight"
    assert [name.stored for name in tensor_names(neox) if name.decoder == "head.weight"] == [("embed_out.weight",)]


def test_biases_of_a_head_are_asked_for_where_a_family_has_them() -> None:
    names = {name.decoder: name.stored for name in tensor_names(config("phi", **GEOMETRY["phi"]))}
    assert names["head.bias"] == ("lm_head.bias",)
    assert names["head.norm.bias"] == ("model.final_layernorm.bias",)
