from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollkv.export.signature import (
    ExportError,
    ExportOptions,
    graph_inputs,
    graph_outputs,
    kv_pairs,
    layer_infos,
    resolve,
)
from rollkv.export.targets import TARGETS
from rollkv.models.config import DecoderConfig, ExpertsConfig
from rollkv.models.settings import read_config


def config(max_position: int = 8192, **settings: Any) -> DecoderConfig:
    raw = {
        "model_type": "mistral",
        "vocab_size": 307,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position,
        "sliding_window": None,
    }
    return read_config({**raw, **settings}, "config.json")


def lengths(options: ExportOptions) -> tuple[int, int, int]:
    return options.max_lm_input_len, options.chunk_size, options.max_kvcache_len


# Defaults


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (1024, 128, 1280)),
        ({"max_lm_input_len": 1216}, (1216, 128, 1472)),
        ({"max_lm_input_len": 40}, (40, 128, 296)),
        ({"chunk_size": 64}, (1024, 64, 1280)),
        ({"max_kvcache_len": 2048}, (1024, 128, 2048)),
        ({"max_kvcache_len": 1024}, (768, 128, 1024)),
        ({"max_lm_input_len": 1000, "chunk_size": 100, "max_kvcache_len": 1001}, (1000, 100, 1001)),
    ],
)
def test_lengths_that_are_not_given_follow_from_the_others(given: dict[str, int], wanted: tuple[int, int, int]) -> None:
    assert lengths(resolve(config(), **given)) == wanted


@pytest.mark.parametrize("max_position", [2, 3, 16, 100, 256, 511, 512, 513, 600, 1024, 1279, 1280])
def test_a_short_model_gets_lengths_that_it_has_positions_for(max_position: int) -> None:
    length, chunk, slots = lengths(resolve(config(max_position)))
    assert 1 <= length < slots <= max_position
    assert 1 <= chunk <= min(128, slots)


def test_with_the_slots_alone_given_the_prompt_leaves_room_for_an_answer() -> None:
    for slots in (2, 8, 100, 512, 513, 5000):
        length, chunk, got = lengths(resolve(config(), max_kvcache_len=slots))
        assert got == slots
        assert 1 <= length < slots
        assert chunk == min(128, slots)


def test_other_settings_have_the_contracts_defaults() -> None:
    options = resolve(config())
    assert (options.kv_layout, options.ids, options.head) == ("bskd", "int32", "last")
    assert (options.mask_value, options.opset, options.simplify) == (-32768.0, 17, True)


# Refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk_size": 49}, "-c is 49, more than -C 48; allowed: 1 .. 48"),
        ({"max_lm_input_len": 49}, "-C is 48, less than -L 49; allowed: from 50 on"),
        (
            {"max_lm_input_len": 48},
            "-C 48 equals -L: the longest prompt has room for one token only; raise -C, or pass --allow-no-room",
        ),
        ({"max_kvcache_len": 257}, "-C is 257, above the model's 256 positions; allowed: up to 256"),
        ({"max_lm_input_len": 0}, "-L is 0, must be at least 1"),
        ({"max_lm_input_len": -5}, "-L is -5, must be at least 1"),
        ({"chunk_size": 0}, "-c is 0, must be at least 1"),
        ({"chunk_size": -1}, "-c is -1, must be at least 1"),
        ({"chunk_size": ()}, "-c names no size; give one or more, such as 128 or 32,128"),
        ({"chunk_size": (8, 0)}, "-c is 0, must be at least 1"),
        ({"chunk_size": (8, 49)}, "-c is 49, more than -C 48; allowed: 1 .. 48"),
        ({"chunk_size": (8, 4, 8)}, "-c names 8 twice; give each size once"),
        ({"speculate": 1}, "--speculate is 1, allowed: 2 .. 48, which is -C"),
        ({"speculate": -4}, "--speculate is -4, allowed: 2 .. 48, which is -C"),
        ({"speculate": 49}, "--speculate is 49, allowed: 2 .. 48, which is -C"),
        ({"max_kvcache_len": 0}, "-C is 0, must be at least 1"),
        ({"max_kvcache_len": -48}, "-C is -48, must be at least 1"),
        ({"kv_layout": "bkds"}, "--kv-layout is 'bkds', allowed: bskd, bksd, bksd-kt"),
        ({"ids": "int16"}, "--ids is 'int16', allowed: int32, int64"),
        ({"head": "first"}, "--head is 'first', allowed: last, all, none, split"),
        ({"decode_attention": "both"}, "--decode-attention is 'both', allowed: joined, apart"),
        ({"projections": "fused"}, "--projections is 'fused', allowed: separate, joined"),
        ({"opset": 12}, "--opset is 12, allowed: 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23"),
        ({"opset": 24}, "--opset is 24, allowed: 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23"),
        ({"mask_value": 0.0}, "--mask-value is 0.0, allowed: -65504 .. -1"),
        ({"mask_value": 5.0}, "--mask-value is 5.0, allowed: -65504 .. -1"),
        ({"mask_value": -65505.0}, "--mask-value is -65505.0, allowed: -65504 .. -1"),
        ({"mask_value": float("nan")}, "--mask-value is nan, allowed: -65504 .. -1"),
        ({"mask_value": float("-inf")}, "--mask-value is -inf, allowed: -65504 .. -1"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_flag_and_what_is_allowed(given: dict[str, Any], message: str) -> None:
    usual = {"max_lm_input_len": 40, "chunk_size": 8, "max_kvcache_len": 48}
    with pytest.raises(ExportError) as caught:
        resolve(config(256), **{**usual, **given})
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("length", [256, 257, 300, 10_000])
def test_a_prompt_length_that_leaves_the_model_no_position_is_refused_by_its_own_flag(length: int) -> None:
    with pytest.raises(ExportError) as caught:
        resolve(config(256), max_lm_input_len=length)
    assert str(caught.value) == f"-L is {length}, but the model has 256 positions; allowed: up to 255"


def test_a_prompt_may_fill_every_slot_when_that_is_said() -> None:
    given = {"max_lm_input_len": 48, "chunk_size": 8, "max_kvcache_len": 48}
    assert lengths(resolve(config(), **given, allow_no_room=True)) == (48, 8, 48)
    with pytest.raises(ExportError, match="less than -L 49"):
        resolve(config(), **{**given, "max_lm_input_len": 49}, allow_no_room=True)
    assert lengths(resolve(config(256), max_lm_input_len=256, allow_no_room=True)) == (256, 128, 256)


def test_the_extremes_that_are_allowed() -> None:
    assert lengths(resolve(config(256), max_lm_input_len=255, chunk_size=256, max_kvcache_len=256)) == (255, 256, 256)
    assert lengths(resolve(config(256), max_lm_input_len=1, chunk_size=1, max_kvcache_len=2)) == (1, 1, 2)
    assert resolve(config(), mask_value=-65504).mask_value == -65504.0
    assert resolve(config(), mask_value=-1).mask_value == -1.0


def test_several_sizes_are_kept_in_order_and_the_largest_is_c() -> None:
    options = resolve(config(), chunk_size=[128, 32, 512])
    assert (options.chunk_sizes, options.prefill_rows, options.chunk_size) == ((32, 128, 512),) * 2 + (512,)
    assert {options.head_of(rows) for rows in (1, 32, 128, 512)} == {"last"}
    assert resolve(config(), chunk_size=(64,)) == resolve(config(), chunk_size=64)


@pytest.mark.parametrize(("rows", "wanted"), [(8, (8, 32, 128)), (32, (32, 128)), (200, (32, 128, 200))])
def test_the_graph_for_speculation_is_a_size_more_or_one_of_them(rows: int, wanted: tuple[int, ...]) -> None:
    options = resolve(config(), chunk_size=(32, 128), speculate=rows)
    assert (options.chunk_sizes, options.prefill_rows, options.chunk_size) == ((32, 128), wanted, wanted[-1])
    assert [each for each in (1, *wanted) if options.head_of(each) == "all"] == [rows]
    every = resolve(config(), chunk_size=(32, 128), speculate=rows, head="all")
    assert {every.head_of(each) for each in (1, *wanted)} == {"all"}


def test_a_window_has_slots_for_the_largest_run_of_any_graph() -> None:
    cfg = config(sliding_window=9)
    given = {"max_lm_input_len": 40, "max_kvcache_len": 48}
    for sizes, speculate, slots in (((4, 8), None, 16), ((8,), 12, 20), ((12,), 4, 20), ((4, 48), None, 48)):
        options = resolve(cfg, chunk_size=sizes, speculate=speculate, **given)
        assert {layer.kv_len for layer in layer_infos(cfg, options)} == {slots}
        for rows in (1, *options.prefill_rows):
            inputs = {value.name: value.shape for value in graph_inputs(cfg, options, rows)}
            assert inputs["sliding_attention_mask"] == [1, 1, rows, slots]
            assert inputs["past_value_1"] == [1, slots, 2, 6]


# The signature


def signature(rows: int, cfg: DecoderConfig, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    options = resolve(cfg, **{"max_lm_input_len": 40, "chunk_size": 8, "max_kvcache_len": 48, **settings})
    return tuple(  # type: ignore[return-value]
        {value.name: (value.dtype, tuple(value.shape)) for value in values}
        for values in (graph_inputs(cfg, options, rows), graph_outputs(cfg, options, rows))
    )


def test_the_prefill_graph_has_the_contracts_values_in_order() -> None:
    inputs, outputs = signature(8, config(num_hidden_layers=1))
    assert list(inputs.items()) == [
        ("input_ids", ("int32", (1, 8))),
        ("attention_mask", ("float32", (1, 1, 8, 48))),
        ("position_ids", ("int32", (1, 8))),
        ("past_key_0", ("float32", (1, 48, 2, 6))),
        ("past_value_0", ("float32", (1, 48, 2, 6))),
    ]
    assert list(outputs.items()) == [
        ("logits", ("float32", (1, 1, 307))),
        ("new_key_0", ("float32", (1, 8, 2, 6))),
        ("new_value_0", ("float32", (1, 8, 2, 6))),
    ]


@pytest.mark.parametrize(
    ("layout", "past_key", "past_value", "new_key", "new_value"),
    [
        ("bskd", (1, 48, 2, 6), (1, 48, 2, 6), (1, 8, 2, 6), (1, 8, 2, 6)),
        ("bksd", (1, 2, 48, 6), (1, 2, 48, 6), (1, 2, 8, 6), (1, 2, 8, 6)),
        ("bksd-kt", (1, 2, 6, 48), (1, 2, 48, 6), (1, 2, 6, 8), (1, 2, 8, 6)),
    ],
)
def test_each_layout_has_its_shapes(layout: str, past_key: Any, past_value: Any, new_key: Any, new_value: Any) -> None:
    inputs, outputs = signature(8, config(), kv_layout=layout)
    for i in (0, 1):
        assert inputs[f"past_key_{i}"][1] == past_key
        assert inputs[f"past_value_{i}"][1] == past_value
        assert outputs[f"new_key_{i}"][1] == new_key
        assert outputs[f"new_value_{i}"][1] == new_value


def test_the_decode_graph_is_the_same_with_one_row() -> None:
    inputs, outputs = signature(1, config())
    assert inputs["input_ids"] == inputs["position_ids"] == ("int32", (1, 1))
    assert inputs["attention_mask"][1] == (1, 1, 1, 48)
    assert inputs["past_key_1"][1] == (1, 48, 2, 6)
    assert outputs["new_value_1"][1] == (1, 1, 2, 6)
    assert outputs["logits"][1] == (1, 1, 307)


def test_ids_and_logits_follow_their_settings() -> None:
    inputs, outputs = signature(8, config(), ids="int64", head="all")
    assert inputs["input_ids"][0] == inputs["position_ids"][0] == "int64"
    assert inputs["attention_mask"][0] == "float32"
    assert outputs["logits"][1] == (1, 8, 307)


def test_a_float16_graph_takes_and_gives_float16_and_its_ids_stay() -> None:
    inputs, outputs = signature(8, config(), dtype="float16")
    assert {inputs[name][0] for name in ("input_ids", "position_ids")} == {"int32"}
    assert {inputs[name][0] for name in ("attention_mask", "past_key_0", "past_value_1")} == {"float16"}
    assert {dtype for dtype, _ in outputs.values()} == {"float16"}
    assert signature(8, config(), dtype="float16", input="embeds")[0]["inputs_embeds"][0] == "float16"


@pytest.mark.parametrize(("window", "slots"), [(1, 8), (9, 16), (40, 47), (41, 48), (42, 48), (1000, 48)])
def test_a_layer_with_a_window_has_slots_for_it_and_one_run(window: int, slots: int) -> None:
    cfg = config(sliding_window=window)
    options = resolve(cfg, max_lm_input_len=40, chunk_size=8, max_kvcache_len=48)
    assert [(layer.window, layer.kv_len) for layer in layer_infos(cfg, options)] == [(window, slots)] * 2
    for rows in (8, 1):  # the decode graph has the slots of the larger run
        inputs, _ = signature(rows, cfg)
        assert "attention_mask" not in inputs
        assert inputs["sliding_attention_mask"][1] == (1, 1, rows, slots)
        assert inputs["past_key_0"][1] == (1, slots, 2, 6)


def test_a_model_with_both_kinds_of_layer_has_both_masks() -> None:
    cfg = config(model_type="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)
    inputs, _ = signature(8, cfg)
    assert inputs["attention_mask"][1] == (1, 1, 8, 48)
    assert inputs["sliding_attention_mask"][1] == (1, 1, 8, 12)
    assert inputs["past_key_0"][1] == (1, 48, 2, 6)
    assert inputs["past_value_1"][1] == (1, 12, 2, 6)


def test_every_past_input_has_its_new_output() -> None:
    inputs, outputs = signature(8, config())
    pairs = kv_pairs(config())
    assert [past for past, _ in pairs] == [name for name in inputs if name.startswith("past_")]
    assert [new for _, new in pairs] == [name for name in outputs if name.startswith("new_")]
    assert all(past.removeprefix("past_") == new.removeprefix("new_") for past, new in pairs)


def test_a_model_like_gemma_3_holds_three_tenths_of_the_cache() -> None:
    settings = {
        "model_type": "gemma3_text",
        "vocab_size": 1000,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 24,  # one in six without a window
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    }
    config = read_config(settings, "config.json")
    options = resolve(config, max_lm_input_len=4000, chunk_size=128, max_kvcache_len=4096)
    lengths = [layer.kv_len for layer in layer_infos(config, options)]
    assert lengths == ([512 - 1 + 128] * 5 + [4096]) * 4
    assert round(sum(lengths) / (24 * 4096), 2) == 0.30


def test_a_target_sets_the_form_and_a_flag_sets_each_field_alone() -> None:
    target = TARGETS["rk3588"]
    options = resolve(config(256), max_kvcache_len=64, max_lm_input_len=32, target=target)
    assert {name: getattr(options, name) for name in target.form()} == target.form()
    assert options.target == "rk3588"
    options = resolve(config(256), max_kvcache_len=64, max_lm_input_len=32, target=target, input="ids", mask_value=-99)
    assert (options.input, options.mask_value, options.gqa) == ("ids", -99.0, "repeat")


def test_the_rows_that_suit_a_target_are_its_default_where_they_fit() -> None:
    target = TARGETS["horizon"]
    assert resolve(config(1024), target=target).chunk_sizes == (256,)
    assert resolve(config(256), max_lm_input_len=32, max_kvcache_len=64, target=target).chunk_sizes == (64,)


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        (
            "universal",
            {"decode_attention": "apart"},
            "--decode-attention is apart, which --target universal does not take; its own form is joined",
        ),
        ("sophgo-bm1684x", {"opset": 18}, "--opset is 18, --target sophgo-bm1684x takes 13 .. 17"),
        (
            "mnn",
            {"norm": "native", "opset": 22},
            "--opset is 22, but --norm native needs RMSNormalization: allowed from 23",
        ),
        (
            "rk3588",
            {"norm": "rsqrt"},
            "--norm rsqrt needs Reciprocal, which --target rk3588 does not take; its own form is --norm plain",
        ),
    ],
)
def test_a_flag_that_breaks_a_limit_of_the_target_is_refused(target: str, given: dict, message: str) -> None:
    with pytest.raises(ExportError) as caught:
        resolve(config(256), max_lm_input_len=32, max_kvcache_len=64, target=TARGETS[target], **given)
    assert str(caught.value) == message


def test_a_target_that_cannot_route_experts_is_refused_with_the_ops() -> None:
    experts = ExpertsConfig(count=4, top_k=2, width=8, normalise=True, shared_width=0)
    mixture = dataclasses.replace(config(256), experts=experts)
    with pytest.raises(ExportError) as caught:
        resolve(mixture, max_lm_input_len=32, max_kvcache_len=64, target=TARGETS["universal"])
    assert str(caught.value) == (
        "--target universal cannot hold a mixture of experts: its routing needs Cast, Equal, ReduceSum, TopK, which "
        "universal does not take"
    )
    assert resolve(mixture, max_lm_input_len=32, max_kvcache_len=64, target=TARGETS["openvino-npu"]).norm == "rowmax"
