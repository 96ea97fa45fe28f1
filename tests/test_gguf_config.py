"""What the metadata of gemma2, gemma3 and phi3 mean, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import metadata, random_tensors, shapes, write_gguf

from rollkv.models.config import CheckpointError
from rollkv.models.gguf_file import read_gguf
from rollkv.models.settings import read_config

SHORT, LONG = (f"rope_factors_{length}.weight" for length in ("short", "long"))
FACTORS = {SHORT: np.full(8, 1.1, np.float32), LONG: np.full(8, 4.0, np.float32)}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Any]:
    """The config of a tiny file of an architecture with some keys, None leaving one out, and some tensors more."""

    def write(architecture: str, tensors: Any = None, **values: Any) -> Any:
        named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}
        path = tmp_path / "tiny.gguf"
        found = random_tensors(shapes()) | (tensors or {})
        write_gguf(path, metadata(architecture) | named, found, architecture=architecture)
        return read_gguf(path).config

    return write


def layers(count: int) -> dict[str, Any]:
    """Tensors that make a file have so many layers."""
    return {f"blk.{i}.attn_norm.weight": np.zeros(64, np.float32) for i in range(count)}


def test_absent_keys_of_gemma2_are_those_of_the_models(config: Any) -> None:
    got = config("gemma2")
    assert (got["model_type"], got["hidden_activation"]) == ("gemma2", "gelu_pytorch_tanh")
    assert (got["attn_logit_softcapping"], got["final_logit_softcapping"], got["sliding_window"]) == (50.0, 30.0, 4096)
    assert got["layer_types"] == [SLIDING, FULL]
    assert got["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_layers_of_gemma3_slide_only_with_a_window(config: Any) -> None:
    got = config("gemma3", layers(7), block_count=7, attention__sliding_window=32, rope__freq_base=1e6)
    assert got["layer_types"] == [SLIDING] * 5 + [FULL, SLIDING]
    assert got["final_logit_softcapping"] is None
    local = {"rope_type": "default", "rope_theta": 10000.0}
    assert got["rope_parameters"] == {FULL: {"rope_type": "default", "rope_theta": 1e6}, SLIDING: local}
    for none in (None, 0):
        got = config("gemma3", layers(7), block_count=7, attention__sliding_window=none, final_logit_softcapping=0.0)
        assert (got["layer_types"], got["sliding_window"]) == ([FULL] * 7, None)
        assert read_config(got, "file").windows == (None,) * 7


@pytest.mark.parametrize(
    ("pattern", "slides"),
    [(1, [0, 0, 0, 0]), (2, [1, 0, 1, 0]), (0, [1, 1, 1, 1]), ([True, True, False, True], [1, 1, 0, 1])],
)
def test_a_pattern_in_the_file_says_which_layers_slide(config: Any, pattern: Any, slides: list[int]) -> None:
    got = config("gemma2", layers(4), block_count=4, attention__sliding_window_pattern=pattern)
    assert got["layer_types"] == [SLIDING if slide else FULL for slide in slides]


def test_a_linear_factor_and_a_local_base_of_gemma3_are_read(config: Any) -> None:
    scaling = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base_swa": 500.0}
    got = config("gemma3", attention__sliding_window=32, **scaling)["rope_parameters"]
    assert got[FULL] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    assert got[SLIDING] == {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(("architecture", "depth_of_27b"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_are_scaled_by_the_heads_size_save_in_the_27b_models(
    config: Any, architecture: str, depth_of_27b: int
) -> None:
    wide = {"attention__key_length": 32, "attention__value_length": 32}  # 64 / 4 heads is 16
    for depth, scalar in ((2, 32), (depth_of_27b - 1, 32), (depth_of_27b, 16)):
        got = config(architecture, layers(depth), block_count=depth, **wide)
        assert got["query_pre_attn_scalar"] == scalar


def test_phi3_turns_part_of_a_head_with_a_window_on_every_layer(config: Any) -> None:
    got = read_config(config("phi3", rope__dimension_count=12, attention__sliding_window=9), "file")
    assert got.ropes[0].rotary_dim == 12
    assert got.windows == (9, 9)
    assert read_config(config("phi3", attention__sliding_window=0), "file").windows == (None, None)


def test_every_part_of_a_head_comes_back_as_it_was(config: Any) -> None:
    size = {"embedding_length": 98, "attention__head_count": 1, "attention__head_count_kv": 1}
    table = {"token_embd.weight": np.zeros((7, 98), np.float32)}
    for rotary in range(2, 98, 2):  # 98 * (2 / 98) is 1.9999999999999998
        got = read_config(config("phi3", table, **size, rope__dimension_count=rotary), "file")
        assert got.ropes[0].rotary_dim == rotary


def test_factors_of_phi3_are_longrope(config: Any) -> None:
    keys = {"rope__scaling__original_context_length": 64, "rope__scaling__attn_factor": 1.25}
    rope = read_config(config("phi3", FACTORS, **keys), "file").ropes[0]
    assert (rope.type, rope.original_max_position, rope.attention_scaling) == ("longrope", 64, 1.25)
    assert (rope.short_factor, rope.long_factor) == ((1.1,) * 8, (4.0,) * 8)


@pytest.mark.parametrize(
    ("architecture", "tensors", "values", "message"),
    [
        (
            "gemma2",
            {},
            {"attn_logit_softcapping": 0.0},
            "'gemma2.attn_logit_softcapping' is 0.0, not a finite number ab",
        ),
        ("gemma2", {}, {"attention__sliding_window": 0}, "'gemma2.attention.sliding_window' is 0, not an integer of 1"),
        ("gemma2", {}, {"rope__freq_base_swa": 5.0}, "key 'gemma2.rope.freq_base_swa' = 5.0 is not understood"),
        ("gemma2", {}, {"attention__scale": 0.1}, "key 'gemma2.attention.scale' = 0.1 is not understood"),
        ("gemma2", {}, {"attention__sliding_window_pattern": [True]}, "is an array of 1 x bool, not an array of 2 int"),
        ("gemma2", {}, {"rope__dimension_count": 8}, "gemma2.rope.dimension_count is 8; only the head's size, 16"),
        ("gemma2", {}, {"attention__value_length": 8}, "gemma2.attention.value_length is 8; only the head's size, 16"),
        (
            "gemma2",
            layers(46),
            {"block_count": 46, "attention__head_count": 3, "attention__key_length": 16},
            "block_count 46 means queries scaled by embedding_length / .*, and 64 is no multiple of 3",
        ),
        ("gemma3", {}, {"attn_logit_softcapping": 50.0}, "key 'gemma3.attn_logit_softcapping' = 50.0 is not underst"),
        ("gemma3", {}, {"rope__local__freq_base": 1e4}, "key 'gemma3.rope.local.freq_base' = 10000.0 is not underst"),
        ("phi3", {}, {"attention__key_length": 32}, r"key_length is 32; only embedding_length / .*, 64 / 4, is supp"),
        ("phi3", {}, {"rope__dimension_count": 0}, "'phi3.rope.dimension_count' is 0, not an integer of 1"),
        (
            "phi3",
            {},
            {"rope__scaling__attn_factor": 1.2},
            "has phi3.rope.scaling.attn_factor, but no tensor 'rope_fact",
        ),
        ("phi3", FACTORS, {}, "the metadata has no key 'phi3.rope.scaling.attn_factor'"),
        ("phi3", {SHORT: FACTORS[SHORT]}, {}, "needs the tensors .* of 8 numbers each; the file has rope_factors_sho"),
        (
            "phi3",
            FACTORS,
            {"rope__dimension_count": 12},
            r"of 6 numbers each; .* rope_factors_short.weight of shape \[8",
        ),
        (
            "phi3",
            FACTORS,
            {"rope__scaling__factor": 2.0},
            "has both rope scaling 'linear' and tensor 'rope_factors_long",
        ),
        ("phi3", {}, {"rope__scaling__type": "longrope"}, "type is 'longrope'; supported: 'none', 'linear'"),
    ],
)
def test_what_is_not_understood_is_refused(
    config: Any, architecture: str, tensors: Any, values: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: .*{message}"):
        config(architecture, tensors, **values)
