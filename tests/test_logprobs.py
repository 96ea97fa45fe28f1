from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rollkv.runtime.sampling import NonFiniteLogits, SamplingError, token_logprobs

V = 300


def random_logits(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 4, V).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_logprobs_are_those_of_torch_and_the_top_is_ordered(dtype: type) -> None:
    for seed in range(5):
        logits = random_logits(seed).astype(dtype)
        logits.flags.writeable = False
        want = torch.log_softmax(torch.tensor(logits.astype(np.float32)).double(), -1)
        got = token_logprobs(logits, 7, 10)
        assert got.token == 7
        assert got.logprob == pytest.approx(float(want[7]), rel=1e-12)
        order = np.argsort(-want.numpy(), kind="stable")[:10]
        assert [token for token, _ in got.top] == order.tolist()
        np.testing.assert_allclose([value for _, value in got.top], want.numpy()[order], rtol=1e-12)


def test_the_top_at_ties_goes_to_the_lower_ids() -> None:
    logits = np.array([2, 1, 3, 2, 2, 3, 0], np.float32)
    order = sorted(range(7), key=lambda token: (-logits[token], token))
    for count in range(10):
        got = token_logprobs(logits, 0, count).top
        assert [token for token, _ in got] == order[:count]
    assert len(token_logprobs(logits, 0, 10**6).top) == 7
    assert token_logprobs(logits, 6, 0).top == ()


def test_logprobs_of_huge_logits_are_exact_and_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = token_logprobs(np.array([3e38, -3e38, 3e38], np.float32), 0, 3)
    assert got.logprob == pytest.approx(-np.log(2))
    assert [token for token, _ in got.top] == [0, 2, 1]


def test_logprobs_of_what_is_not_there_are_refused() -> None:
    logits = random_logits(0)
    for token in (-1, V):
        with pytest.raises(SamplingError, match=rf"token id {token} has no logit; allowed: 0 .. {V - 1}"):
            token_logprobs(logits, token, 1)
    for count in (-1, 1.5, True):
        with pytest.raises(SamplingError, match=rf"the number of logprobs is {count}; allowed: an integer >= 0"):
            token_logprobs(logits, 0, count)  # type: ignore[arg-type]
    with pytest.raises(SamplingError, match=r"logits have shape \(1, 300\)"):
        token_logprobs(logits[None], 0, 1)
    logits[3] = np.nan
    with pytest.raises(NonFiniteLogits, match="1 of 300 logits are not finite"):
        token_logprobs(logits, 0, 1)
