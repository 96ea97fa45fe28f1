"""Which runs take n tokens: the cheapest of all that the contract allows."""

import itertools
import math
import random

import pytest

from rollkv.runtime.cover import RUN_OVERHEAD, Run, plan_runs


def every_cover(n, past, sizes, kv_len):
    """All lists of runs that the contract allows: perhaps one with pads first, then full ones, falling in size."""
    sizes = sorted({*sizes, 1}, reverse=True)

    def full(rest, most):
        if rest == 0:
            yield []
        for size in sizes:
            if size <= min(rest, most):
                for more in full(rest - size, size):
                    yield [Run(size, 0), *more]

    yield from full(n, max(sizes))
    for size in sizes:
        for real in range(1, min(size - 1, n) + 1):
            if past + size <= kv_len:
                for more in full(n - real, max(sizes)):
                    yield [Run(size, size - real), *more]


def price(runs, costs):
    return sum(costs[run.rows] for run in runs)


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_cheapest_of_all_that_are_allowed(seed):
    draw = random.Random(seed)
    for _ in range(12):
        kv_len = draw.randint(4, 20)
        sizes = sorted(draw.sample(range(1, min(9, kv_len) + 1), draw.randint(1, min(3, kv_len - 1))))
        n, past = draw.randint(1, 14), draw.randint(0, kv_len)
        costs = {size: draw.uniform(0.5, 3) + size * draw.uniform(0.01, 1) for size in {1, *sizes}}
        runs = plan_runs(n, past, sizes, kv_len, costs)
        allowed = list(every_cover(n, past, sizes, kv_len))
        assert runs in allowed
        assert price(runs, costs) == pytest.approx(min(price(each, costs) for each in allowed))


def test_without_costs_a_run_counts_its_rows_and_an_overhead():
    costs = {size: size + RUN_OVERHEAD for size in (1, 4, 8)}
    for n, past in itertools.product(range(1, 20), (0, 9, 15, 19)):
        runs = plan_runs(n, past, (4, 8), 20)
        assert runs in list(every_cover(n, past, (4, 8), 20))
        assert price(runs, costs) == min(price(each, costs) for each in every_cover(n, past, (4, 8), 20))


def test_three_sizes_written_out():
    assert plan_runs(700, 0, (32, 128, 512), 1280) == [Run(32, 4), *[Run(512, 0)], Run(128, 0), Run(32, 0)]
    assert plan_runs(512, 0, (32, 128, 512), 1280) == [Run(512, 0)]
    assert plan_runs(1, 0, (32, 128, 512), 1280) == [Run(1, 0)]
    assert plan_runs(33, 1270, (32, 128, 512), 1280) == [Run(32, 0), Run(1, 0)]


def test_one_size_alone_takes_a_remainder_in_a_padded_run_unless_costs_say_otherwise():
    assert plan_runs(1, 0, 8, 40) == [Run(8, 7)]
    assert plan_runs(1, 0, 8, 40, {1: 1.0, 8: 5.0}) == [Run(1, 0)]
    assert plan_runs(7, 0, 8, 40, {1: 1.0, 8: 5.0}) == [Run(8, 1)]


@pytest.mark.parametrize("sizes", [8, (4, 8), (3, 5, 8)])
def test_every_token_is_in_one_run_and_none_is_padded_where_that_would_forget(sizes):
    for n, past in itertools.product(range(1, 30), range(30)):
        runs = plan_runs(n, past, sizes, 24)
        assert sum(run.rows - run.pads for run in runs) == n
        assert all(run.pads == 0 for run in runs[1:])
        assert runs[0].pads == 0 or past + runs[0].rows <= 24
        assert math.prod(run.rows - run.pads for run in runs) > 0
