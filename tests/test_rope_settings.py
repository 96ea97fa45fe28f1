"""Rotary settings of a config.json: both forms, what each type reads, what is refused and in which words."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, Olmo3Config, Phi3Config, Qwen2VLTextConfig

from rollkv.models.config import CheckpointError, RopeConfig
from rollkv.models.rope_settings import merge_rope, read_rope

ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, ORIGINAL: 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 8192}
LONGROPE = {"rope_type": "longrope", ORIGINAL: 4096, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LINEAR = {"rope_type": "linear", "factor": 8.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def read(settings: dict[str, Any], **changes: Any) -> tuple[RopeConfig, int]:
    geometry: dict[str, Any] = {"head_dim": 16, "rotary_dim": 16, "max_position": 32768, "interleaved": False}
    return read_rope({"rope_theta": 10000.0, **settings}, where="config.json", **{**geometry, **changes})


def refused(settings: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(settings, **changes)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


def test_no_settings_are_the_plain_type() -> None:
    rope, positions = read({}, interleaved=True, name="sliding", rotary_dim=8)
    assert rope == RopeConfig(name="sliding", type="default", theta=10000.0, rotary_dim=8, interleaved=True)
    assert positions == 32768


def test_old_names_of_types_are_understood() -> None:
    assert read({**LONGROPE, "rope_type": "su"}) == read(LONGROPE)
    assert read({"type": "linear", "factor": 2})[0].type == "linear"
    assert read({"type": "linear", "rope_type": "default"})[0].type == "default", "as transformers: the newer key goes"
    mrope = read({"type": "mrope", "mrope_section": [2, 3, 3]})[0]
    assert (mrope.type, mrope.sections) == ("default", (2, 3, 3))
    assert read({**YARN, "mrope_section": [2, 3, 3], "mrope_interleaved": False})[0].sections == (2, 3, 3)


def test_settings_that_say_nothing_and_nulls_are_passed_over() -> None:
    nothing = {"finetuned": True, "max_position_embeddings": 9, "factor": None, "foo": None, "type": "default"}
    assert read({**nothing, "partial_rotary_factor": 1.0}) == read({})
    assert read({ORIGINAL: 4096}) == read({})
    nulls = dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"))
    assert read({**YARN, **nulls}) == read(YARN)


@pytest.mark.parametrize(
    ("settings", "max_position", "expected"),
    [
        ({**YARN}, 32768, 32768),
        ({**YARN}, 8192, 32768),
        ({**YARN, "factor": 3.3}, 8192, 27033),
        ({"rope_type": "yarn", "factor": 4.0}, 32768, 131072),  # the original length is all there is
        ({"rope_type": "yarn", ORIGINAL: 8192}, 32768, 32768),  # the factor is what lies between the two
        (DYNAMIC, 4096, 8192),
        ({**DYNAMIC, "factor": 0.5}, 4096, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 4096),
        (LONGROPE, 131072, 131072),
        (LLAMA3, 131072, 131072),
    ],
)
def test_yarn_and_dynamic_extend_the_positions(settings: dict[str, Any], max_position: int, expected: int) -> None:
    assert read(settings, max_position=max_position)[1] == expected


def test_yarn_defaults() -> None:
    rope, _ = read({"rope_type": "yarn", "factor": 4.0}, max_position=4096)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate, rope.original_max_position) == (32.0, 1.0, True, 4096)
    assert rope.attention_scaling == pytest.approx(0.1 * math.log(4) + 1, rel=1e-15)
    assert read({**YARN, "factor": 0.5})[0].attention_scaling == 1
    assert read({"rope_type": "yarn", ORIGINAL: 8192})[0].factor == 4


def test_longrope_scales_by_the_ratio_of_lengths_or_by_what_is_given() -> None:
    by_ratio = read(LONGROPE, max_position=131072)[0].attention_scaling
    assert by_ratio == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)), rel=1e-15)
    assert read({**LONGROPE, "factor": 32.0}, max_position=4096)[0].attention_scaling == by_ratio
    assert read(LONGROPE, max_position=4096)[0].attention_scaling == 1
    assert read({**LONGROPE, "attention_factor": 1.5})[0].attention_scaling == 1.5


def test_the_query_scale_needs_a_length() -> None:
    assert read({**YARN, "llama_4_scaling_beta": 0.1})[0].query_scale == (0.1, 8192)
    assert read({ORIGINAL: 4096, "llama_4_scaling_beta": 0.1})[0].query_scale == (0.1, 4096)
    assert read({**YARN, "llama_4_scaling_beta": 0})[0].query_scale is None
    for settings in ({}, DYNAMIC):
        message = refused({**settings, "llama_4_scaling_beta": 0.1})
        assert "'original_max_position_embeddings' is None, must be an integer from 2 to 16777216" in message
    assert "must be a number from 0 on" in refused({**YARN, "llama_4_scaling_beta": -0.1})
    both = {**YARN, "llama_4_scaling_beta": 0.1, "mrope_section": [2, 3, 3]}
    assert "'mrope_section' and 'llama_4_scaling_beta' do not go together" in refused(both)


@pytest.mark.parametrize("kind", ["foo", "axial", "Yarn", None, 3, ["linear"], {}])
def test_an_unknown_type_names_those_that_are_supported(kind: Any) -> None:
    supported = "default, linear, dynamic, llama3, yarn, longrope, proportional"
    for key in ("rope_type", "type"):
        assert f"rope type {kind!r} is not supported; supported: {supported}" in refused({key: kind})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"factor": 2.0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "mscale"),
        ({**DYNAMIC, ORIGINAL: 2048}, ORIGINAL),
        ({**DYNAMIC, "alpha": 1000}, "alpha"),
        ({**LLAMA3, "attention_factor": 1.0}, "attention_factor"),
        ({**YARN, "short_factor": [1.0] * 8}, "short_factor"),
        ({**LONGROPE, "long_mscale": 1.2}, "long_mscale"),
        ({"rope_type": "proportional", "beta_fast": 32}, "beta_fast"),
        ({"rope_type": "default", "interleaved": False}, "interleaved"),
    ],
)
def test_a_setting_that_the_type_does_not_have_is_refused(settings: dict[str, Any], key: str) -> None:
    kind = settings.get("rope_type", "default")
    value = repr(settings[key])
    assert f"rope setting {key!r} = {value} is not understood for rope type {kind!r}" in refused(settings)


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(refused({"foo": list(range(1000))})) < 200


@pytest.mark.parametrize("value", [None, 0, -1.0, "2", True, math.inf, math.nan, 10**400, [2.0]])
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "rope_theta"),
        ({"rope_type": "linear"}, "factor"),
        (DYNAMIC, "factor"),
        (LLAMA3, "factor"),
        (LLAMA3, "low_freq_factor"),
        (LLAMA3, "high_freq_factor"),
    ],
)
def test_a_number_that_is_missing_or_not_positive_is_refused(settings: dict[str, Any], key: str, value: Any) -> None:
    assert f"rope setting {key!r} is {repr(value)[:40]}" in (message := refused({**settings, key: value}))
    assert message.endswith("must be a positive number")


@pytest.mark.parametrize("value", [0, -1.0, "2", True, math.inf, math.nan])
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        *((YARN, key) for key in ("factor", "attention_factor", "beta_fast", "beta_slow")),
        *((LONGROPE, key) for key in ("factor", "attention_factor")),
        ({"rope_type": "proportional"}, "factor"),
    ],
)
def test_a_number_that_may_be_missing_must_be_positive(settings: dict[str, Any], key: str, value: Any) -> None:
    assert f"rope setting {key!r} is {value!r}, must be a positive number" in refused({**settings, key: value})


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim"])
@pytest.mark.parametrize("value", [-0.1, "1", math.nan])
def test_an_mscale_is_a_number_from_0_on(key: str, value: Any) -> None:
    assert f"rope setting {key!r} is {value!r}, must be a number from 0 on" in refused({**YARN, key: value})
    assert read({**YARN, "mscale": 1.0, "mscale_all_dim": 0})[0] == read(YARN)[0]


@pytest.mark.parametrize("value", [0, 1, -5, 2**24 + 1, 8192.5, "8192", True, math.nan, math.inf])
@pytest.mark.parametrize("settings", [LLAMA3, YARN, LONGROPE])
def test_an_original_length_is_an_integer_in_range(settings: dict[str, Any], value: Any) -> None:
    expected = f"{ORIGINAL!r} is {value!r}, must be an integer from 2 to 16777216"
    assert expected in refused({**settings, ORIGINAL: value})


@pytest.mark.parametrize("settings", [LLAMA3, LONGROPE, {**YARN, "factor": None}])
def test_an_original_length_must_be_there_where_nothing_else_gives_it(settings: dict[str, Any]) -> None:
    assert f"{ORIGINAL!r} is None, must be an integer from 2" in refused({**settings, ORIGINAL: None})


@pytest.mark.parametrize("value", [None, [1.0] * 7, [1.0] * 9, [], 1.0, "11111111", [1.0] * 7 + [0], [1.0] * 7 + ["1"]])
@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
def test_longrope_has_one_positive_factor_for_each_pair(key: str, value: Any) -> None:
    assert f"rope setting {key!r} is {value!r}, must be a list of 8 positive numbers" in refused(
        {**LONGROPE, key: value}
    )


@pytest.mark.parametrize("value", [[2, 3, 4], [4, 4], [8, 0, 0], [2, 3, 3.0], [True, 3, 4], "233", 8, [10, -1, -1]])
def test_sections_are_three_and_add_up_to_the_pairs(value: Any) -> None:
    expected = f"'mrope_section' is {value!r}, must be three positive integers with the sum 8"
    assert expected in refused({"mrope_section": value})


def test_sections_must_be_there_for_type_mrope_and_must_not_be_interleaved() -> None:
    assert "'mrope_section' is None, must be three positive integers" in refused({"type": "mrope"})
    interleaved = {"mrope_section": [2, 3, 3], "mrope_interleaved": True}
    assert "'mrope_interleaved' is True, must be false: interleaved sections are not supported" in refused(interleaved)
    assert "'mrope_interleaved' is 1, must be true or false" in refused({**interleaved, "mrope_interleaved": 1})


def test_truncate_is_a_boolean() -> None:
    assert "'truncate' is 'no', must be true or false" in refused({**YARN, "truncate": "no"})


def test_bounds_and_bases_that_would_divide_by_zero_are_refused() -> None:
    assert "'high_freq_factor' 1.0 must be above 'low_freq_factor' 1.0" in refused({**LLAMA3, "high_freq_factor": 1})
    assert "'rope_theta' is 1; rope type 'yarn' needs another" in refused({**YARN, "rope_theta": 1})
    message = refused(DYNAMIC, rotary_dim=2)
    assert "rotary dimension 2; rope type 'dynamic' needs more" in message


def test_more_positions_than_float32_counts_are_refused() -> None:
    message = refused({**DYNAMIC, "factor": 1e300})
    assert "'factor' 1e+300 times 32768 positions, allowed: up to 16777216" in message
    assert "'factor' 4096.0 times 8192 positions" in refused({**YARN, "factor": 4096})


@pytest.mark.parametrize("rotary_dim", [0, 5, 18, -2])
def test_a_rotary_dimension_is_even_and_within_the_head(rotary_dim: int) -> None:
    expected = f"rotary dimension {rotary_dim} must be even, from 2 to head_dim 16"
    assert expected in refused({}, rotary_dim=rotary_dim)


def test_the_part_that_turns_must_be_the_familys() -> None:
    message = refused({"partial_rotary_factor": 0.5})
    assert "'partial_rotary_factor' = 0.5 turns 8 dimensions of a head; this model turns 16 of 16" in message
    assert read({"partial_rotary_factor": 0.5}, rotary_dim=8)[0].rotary_dim == 8
    for value in (0, -0.5, 1.5, "half", math.nan):
        message = refused({"partial_rotary_factor": value})
        assert f"'partial_rotary_factor' is {value!r}, must be a number above 0, up to 1" in message


def test_proportional_turns_the_whole_head_and_counts_the_pairs_that_move() -> None:
    rope, _ = read({"rope_type": "proportional", "partial_rotary_factor": 0.3}, rotary_dim=4)
    assert (rope.rotary_dim, rope.rotated_pairs, rope.factor) == (16, 2, None)
    assert read({"rope_type": "proportional"})[0].rotated_pairs == 8


def test_both_forms_merge_to_the_same() -> None:
    inside = {**YARN, "rope_theta": 5000.0}
    assert merge_rope({"rope_parameters": inside}, theta_default=10000.0) == inside
    assert merge_rope({"rope_scaling": YARN, "rope_theta": 5000.0}, theta_default=10000.0) == inside
    assert merge_rope({"rope_scaling": inside, "rope_parameters": inside}, theta_default=1.0) == inside
    for nothing in ({}, {"rope_scaling": None, "rope_parameters": {}, "rope_theta": None}):
        assert merge_rope(nothing, theta_default=123.0) == {"rope_theta": 123.0}


def test_what_stands_inside_goes_before_what_stands_beside() -> None:
    raw = {"rope_parameters": {"rope_theta": 1.5, "partial_rotary_factor": 0.25}, "rope_theta": 2.5}
    assert merge_rope({**raw, "partial_rotary_factor": 0.5}, theta_default=9.0) == raw["rope_parameters"]
    beside = {"rope_theta": 2.5, "partial_rotary_factor": 0.5}
    assert merge_rope(beside, theta_default=9.0) == beside


def test_the_original_length_beside_goes_first_as_in_transformers() -> None:
    for kind in ("su", "yarn", "llama3"):
        raw = {"rope_scaling": {"type": kind, ORIGINAL: 1}, ORIGINAL: 4096}
        assert merge_rope(raw, theta_default=9.0)[ORIGINAL] == 4096
    assert ORIGINAL not in merge_rope({ORIGINAL: 4096}, theta_default=9.0)


def test_merging_reads_what_transformers_reads() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi3 = {"rope_scaling": scaling, "rope_theta": 5000.0, ORIGINAL: 4096, "max_position_embeddings": 131072}
    ours = read(merge_rope(phi3, theta_default=10000.0), max_position=131072)
    theirs = Phi3Config(hidden_size=32, num_attention_heads=2, pad_token_id=None, **phi3).rope_parameters
    assert ours == read(dict(theirs), max_position=131072)
    assert ours[0].original_max_position == 4096

    qwen = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6}
    ours = read(merge_rope(qwen, theta_default=10000.0))
    assert ours == read(dict(Qwen2VLTextConfig(hidden_size=32, num_attention_heads=2, **qwen).rope_parameters))

    plain = {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 32768}
    ours = read(merge_rope(plain, theta_default=10000.0))
    assert ours == read(dict(LlamaConfig(**plain).rope_parameters))


@pytest.mark.parametrize(
    ("family", "raw", "theta", "local"),
    [
        (Gemma3TextConfig, {"rope_theta": 5e5, "rope_local_base_freq": 7e3, "rope_scaling": LINEAR}, 1e6, 1e4),
        (Gemma3TextConfig, {"rope_theta": 5e5}, 1e6, 1e4),
        (Gemma3TextConfig, {}, 1e6, 1e4),
        (Olmo3Config, {"rope_theta": 5e5, "rope_scaling": {**YARN}, "pad_token_id": None}, 5e5, 5e5),
    ],
)
def test_layers_with_a_window_have_settings_of_their_own(
    family: Any, raw: dict[str, Any], theta: float, local: float
) -> None:
    theirs = family(**{key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()})
    nested = theirs.to_dict()
    for kind, default in (("full_attention", theta), ("sliding_attention", local)):
        flat = read(merge_rope(raw, theta_default=default, kind=kind))
        assert flat == read(dict(theirs.rope_parameters[kind]))
        assert flat == read(merge_rope(nested, theta_default=default, kind=kind))
    assert read(merge_rope(raw, theta_default=local, kind="sliding_attention"))[0].type == "default"


def test_forms_that_do_not_fit_are_refused() -> None:
    def message(raw: dict[str, Any], kind: str | None = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            merge_rope(raw, theta_default=1e4, kind=kind, where="a/config.json")
        return str(caught.value)

    assert message({"rope_scaling": "linear"}) == "a/config.json: rope_scaling is 'linear', must be an object or null"
    assert message({"rope_parameters": [1]}) == "a/config.json: rope_parameters is [1], must be an object or null"
    differ = message({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5.0}})
    assert differ == "a/config.json: rope_scaling and rope_parameters differ; allowed: one of them"
    nested = {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}}
    assert "rope_parameters differs by layer type; allowed for this model: one for all layers" in message(nested)
    assert "rope_parameters.sliding_attention is None, must be an object" in message(nested, "sliding_attention")
