from __future__ import annotations

import copy
import dataclasses
import pickle
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation import logits_process as hf

from rollkv.runtime import sampling
from rollkv.runtime.sampling import NonFiniteLogits, Sampler, SamplingError, SamplingOptions

V = 300


def random_logits(seed: int, scale: float = 4.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, scale, V).astype(np.float32)


def reference(processor: object, logits: NDArray[np.float32], seen: list[int] | None = None) -> NDArray[np.float32]:
    ids = torch.tensor([seen or [0]])
    return processor(ids, torch.tensor(logits)[None].clone())[0].numpy()  # type: ignore[operator]


def same(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_the_repetition_penalty_equals_transformers_also_when_ids_repeat(penalty: float) -> None:
    for seed in range(5):
        logits, seen = random_logits(seed), [3, 3, 3, V - 1, 0, 17]
        want = reference(hf.RepetitionPenaltyLogitsProcessor(penalty), logits, seen)
        same(sampling.penalize_repetition(logits, seen, penalty), want)


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 3.0])
def test_temperature_equals_transformers(temperature: float) -> None:
    logits = random_logits(1)
    same(sampling.apply_temperature(logits, temperature), reference(hf.TemperatureLogitsWarper(temperature), logits))


@pytest.mark.parametrize("k", [1, 2, 40, V - 1, V, V + 5])
def test_top_k_equals_transformers_also_at_ties(k: int) -> None:
    for logits in (random_logits(2), np.round(random_logits(3))):
        same(sampling.keep_top_k(logits, k), reference(hf.TopKLogitsWarper(k), logits))


@pytest.mark.parametrize("p", [1e-20, 1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_equals_transformers(p: float) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        same(sampling.keep_top_p(logits, p), reference(hf.TopPLogitsWarper(p), logits))


@pytest.mark.parametrize("p", [0.0, 0.01, 0.3, 1.0])
def test_min_p_equals_transformers(p: float) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        same(sampling.keep_min_p(logits, p), reference(hf.MinPLogitsWarper(p), logits))


def test_the_whole_chain_has_the_probabilities_of_the_processor_list_of_generate() -> None:
    seen = [1, 5, 9]
    chain = hf.LogitsProcessorList(
        [
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.TemperatureLogitsWarper(0.8),
            hf.TopKLogitsWarper(50),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.02),
        ]
    )
    options = SamplingOptions(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.4)
    for seed in range(10):
        logits = random_logits(seed, 2.0)
        want = torch.softmax(chain(torch.tensor([seen]), torch.tensor(logits)[None])[0].double(), -1).numpy()  # type: ignore[arg-type]
        got = sampling.softmax(sampling.warp(logits, seen, options))
        np.testing.assert_array_equal(got == 0, want == 0)
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_no_function_writes_into_the_callers_logits() -> None:
    logits = random_logits(4)
    before = logits.copy()
    logits.flags.writeable = False
    outputs = [
        sampling.penalize_repetition(logits, [1], 2.0),
        sampling.penalize_repetition(logits, [], 2.0),
        sampling.apply_temperature(logits, 1.0),
        sampling.keep_top_k(logits, 0),
        sampling.keep_top_p(logits, 1.0),
        sampling.keep_min_p(logits, 0.0),
        sampling.add_bias(logits, {1: 2.0}),
        sampling.add_bias(logits, {}),
        sampling.ban(logits, [1]),
        sampling.score(logits, [1], SamplingOptions()),
        sampling.warp(logits, [], SamplingOptions(temperature=1.0)),
    ]
    Sampler(SamplingOptions(temperature=1.0, repetition_penalty=1.1, top_k=5, top_p=0.5, min_p=0.1)).pick(logits, [1])
    np.testing.assert_array_equal(logits, before)
    assert not any(np.shares_memory(out, logits) for out in outputs)


def test_temperature_zero_is_argmax_and_a_tie_goes_to_the_lowest_id() -> None:
    sampler = Sampler(SamplingOptions(top_k=1, top_p=0.1, min_p=0.5))
    for seed in range(5):
        logits = random_logits(seed)
        assert sampler.pick(logits, []) == int(torch.tensor(logits).argmax())
    assert sampler.pick(np.array([1, 7, 7, 2, 7], np.float32), []) == 1


def test_greedy_honours_the_repetition_penalty() -> None:
    logits = np.array([4.0, 5.0, -1.0], np.float32)
    assert Sampler(SamplingOptions(repetition_penalty=2.0)).pick(logits, [1]) == 0


def test_the_smallest_top_p_keeps_one_token() -> None:
    sampler = Sampler(SamplingOptions(temperature=1.0, top_p=1e-9, seed=0))
    logits = random_logits(5, 0.1)
    assert {sampler.pick(logits, []) for _ in range(50)} == {int(logits.argmax())}
    assert np.isfinite(sampling.keep_top_p(np.zeros(8, np.float32), 1e-9)).tolist() == [True] + [False] * 7


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-30, 1.0, 1e300])
def test_large_logits_and_extreme_options_give_no_numpy_warning(dtype: type, temperature: float) -> None:
    logits = np.array([-1e4, 0, 1e4, 9.9e3], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for penalty in (1e-300, 1.0, 1e300):
            options = SamplingOptions(
                temperature=temperature, top_k=3, top_p=0.9, min_p=0.01, repetition_penalty=penalty, seed=0
            )
            assert 0 <= Sampler(options).pick(logits, [0, 1]) < 4
        assert 0 <= Sampler(SamplingOptions(temperature=temperature)).pick(np.float32([-3e38, 3e38]), []) < 2


def test_float16_logits_are_computed_in_float32() -> None:
    logits = random_logits(6, 8.0).astype(np.float16)
    options = SamplingOptions(temperature=0.7, top_p=0.95, seed=11)
    wide = Sampler(options)
    narrow = Sampler(options)
    assert [narrow.pick(logits, []) for _ in range(50)] == [wide.pick(logits.astype(np.float32), []) for _ in range(50)]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = random_logits(7, 0.5)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingOptions(temperature=1.0, seed=seed))
        return [sampler.pick(logits, []) for _ in range(40)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    probabilities = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    sampler = Sampler(SamplingOptions(temperature=1.0, seed=2))
    draws = 20_000
    logits = np.log(probabilities).astype(np.float32)
    counts = np.bincount([sampler.pick(logits, []) for _ in range(draws)], minlength=5)
    chi_square = float(((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in 1,000 seeds


def test_a_token_outside_the_kept_ones_is_never_drawn() -> None:
    logits = random_logits(8, 0.1)
    allowed = set(np.argsort(-logits)[:3].tolist())
    sampler = Sampler(SamplingOptions(temperature=5.0, top_k=3, seed=0))
    assert {sampler.pick(logits, []) for _ in range(300)} == allowed


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", float("nan"), "a finite number >= 0"),
        ("temperature", float("inf"), "a finite number >= 0"),
        ("temperature", "warm", "a finite number >= 0"),
        ("temperature", True, "a finite number >= 0"),
        ("top_k", -1, "an integer >= 0"),
        ("top_k", 1.5, "an integer >= 0"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", float("nan"), "above 0 and at most 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("repetition_penalty", 0.0, "a finite number > 0"),
        ("repetition_penalty", -1.0, "a finite number > 0"),
        ("repetition_penalty", float("inf"), "a finite number > 0"),
        ("seed", -1, "an integer >= 0, or None"),
        ("seed", 0.5, "an integer >= 0, or None"),
    ],
)
def test_an_option_outside_its_range_is_refused_with_the_value_and_the_range(
    option: str, value: object, allowed: str
) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingOptions(**{option: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{option} is {value!r}; allowed: ")
    assert allowed in str(caught.value)


def test_numpy_numbers_are_accepted_as_options() -> None:
    options = SamplingOptions(temperature=np.float32(0.5), top_k=np.int64(4), seed=np.int32(1))  # type: ignore[arg-type]
    assert 0 <= Sampler(options).pick(random_logits(0), []) < V


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_stop_with_a_cause_and_a_cure(bad: float, temperature: float) -> None:
    logits = random_logits(9)
    logits[[7, 20]] = bad
    with pytest.raises(
        NonFiniteLogits, match=rf"2 of {V} logits are not finite \(the first: {bad} for token id 7\)"
    ) as e:
        Sampler(SamplingOptions(temperature=temperature)).pick(logits, [])
    assert "float16" in str(e.value)
    assert "`rollkv verify`" in str(e.value)


@pytest.mark.parametrize("logits", [np.zeros((1, 4), np.float32), np.zeros(0, np.float32), np.zeros(4, np.int32)])
def test_logits_of_a_wrong_shape_or_type_are_refused(logits: NDArray[np.float32]) -> None:
    with pytest.raises(SamplingError, match=r"logits have shape \(.*\) and type .*; allowed: \(V,\)"):
        Sampler(SamplingOptions()).pick(logits, [])


def test_a_token_without_an_id_is_not_penalised() -> None:
    logits = random_logits(1)
    options = SamplingOptions(repetition_penalty=1.4)
    np.testing.assert_array_equal(
        sampling.penalize_repetition(logits, [-1, 2, -1], 1.4), sampling.penalize_repetition(logits, [2], 1.4)
    )
    np.testing.assert_array_equal(sampling.penalize_repetition(logits, [-1], 1.4), logits)
    assert Sampler(options).pick(logits, [-1, 2]) == Sampler(options).pick(logits, [2])


@pytest.mark.parametrize("seen", [[2, -2], [2, V]])
def test_a_seen_id_without_a_logit_is_refused(seen: list[int]) -> None:
    with pytest.raises(SamplingError, match=rf"seen holds token id {seen[1]}; allowed: 0 .. {V - 1}"):
        Sampler(SamplingOptions(repetition_penalty=1.1)).pick(random_logits(0), seen)


# Bias and banned ids


@pytest.mark.parametrize("bias", [{3: 5.0}, {0: -1e9, V - 1: 2.5, 17: 0.0}])
def test_a_logit_bias_equals_transformers(bias: dict[int, float]) -> None:
    processor = hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    for seed in range(5):
        logits = random_logits(seed)
        same(sampling.add_bias(logits, bias), reference(processor, logits))


def test_bias_penalty_and_banned_ids_come_in_the_order_of_generate() -> None:
    seen = [1, 5, 9, 40, 41]
    bias = {5: 9.0, 40: -9.0, 77: 3.0, 2: 50.0}
    chain = hf.LogitsProcessorList(
        [
            hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.MinNewTokensLengthLogitsProcessor(len(seen), 3, [2, 11], device="cpu"),
            hf.TemperatureLogitsWarper(0.8),
            hf.TopKLogitsWarper(50),
        ]
    )
    options = SamplingOptions(temperature=0.8, top_k=50, repetition_penalty=1.4, logit_bias=bias)
    greedy = SamplingOptions(repetition_penalty=1.4, logit_bias=bias)
    for seed in range(10):
        logits = random_logits(seed, 2.0)
        want = torch.softmax(chain(torch.tensor([seen]), torch.tensor(logits)[None])[0].double(), -1).numpy()  # type: ignore[arg-type]
        got = sampling.softmax(sampling.warp(logits, seen, options, banned=[2, 11]))
        np.testing.assert_array_equal(got == 0, want == 0)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert Sampler(greedy).pick(logits, seen, banned=[2, 11]) == int(want.argmax())
        assert Sampler(greedy).pick(logits, seen) == 2


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_banned_id_is_never_chosen(temperature: float) -> None:
    logits = np.array([1.0, 9.0, 8.0, -4.0], np.float32)
    sampler = Sampler(SamplingOptions(temperature=temperature, seed=0, repetition_penalty=2.0))
    picked = {sampler.pick(logits, [1], banned={1, 3, 700, -2}) for _ in range(200)}
    assert picked == ({2} if temperature == 0 else {0, 2})
    assert sampler.pick(logits, [], banned=[0, 1, 2]) == 3
    with pytest.raises(SamplingError, match="each of the 4 tokens is banned; allowed: at least one"):
        sampler.pick(logits, [], banned=range(4))


def test_a_huge_bias_stays_finite() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for temperature in (0.0, 1.0):
            options = SamplingOptions(logit_bias={1: 1e300, 2: -1e300}, temperature=temperature, seed=0)
            assert Sampler(options).pick(random_logits(0), []) == 1


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        ({-1: 1.0}, "a token id of logit_bias is -1; allowed: an integer >= 0"),
        ({1.5: 1.0}, "a token id of logit_bias is 1.5; allowed: an integer >= 0"),
        ({True: 1.0}, "a token id of logit_bias is True; allowed: an integer >= 0"),
        ({3: float("inf")}, "logit_bias of token id 3 is inf; allowed: a finite number"),
        ({3: float("nan")}, "logit_bias of token id 3 is nan; allowed: a finite number"),
        ({3: "much"}, "logit_bias of token id 3 is 'much'; allowed: a finite number"),
        ([3], "logit_bias is [3]; allowed: a mapping of token ids to numbers"),
        (None, "logit_bias is None; allowed: a mapping of token ids to numbers"),
    ],
)
def test_a_bias_that_is_none_is_refused(bias: Any, said: str) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingOptions(logit_bias=bias)
    assert str(caught.value) == said


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_an_id_without_a_logit_is_refused(temperature: float) -> None:
    options = SamplingOptions(logit_bias={2: 1.0, V: 1.0}, temperature=temperature)
    with pytest.raises(SamplingError, match=rf"logit_bias holds token id {V}; allowed: 0 .. {V - 1}, the vocabulary"):
        Sampler(options).pick(random_logits(0), [])


def test_options_keep_a_bias_of_their_own_which_nobody_changes() -> None:
    given: dict[int, float] = {np.int64(3): np.float32(0.5)}  # type: ignore[dict-item]
    options = SamplingOptions(logit_bias=given)
    given[4] = 1.0
    assert options.logit_bias == {3: 0.5}
    with pytest.raises(TypeError):
        options.logit_bias[5] = 1.0  # type: ignore[index]
    assert options == SamplingOptions(logit_bias={3: 0.5})
    assert hash(options) == hash(SamplingOptions(logit_bias={3: 0.5}))
    assert options != SamplingOptions()
    for same_again in (copy.deepcopy(options), pickle.loads(pickle.dumps(options)), dataclasses.replace(options)):
        assert same_again == options


def test_a_greedy_step_copies_nothing_as_large_as_the_logits() -> None:
    logits, sampler = np.random.default_rng(0).normal(size=49152).astype(np.float32), Sampler(SamplingOptions())
    sampler.pick(logits, [])
    tracemalloc.start()
    sampler.pick(logits, [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < logits.nbytes / 8
