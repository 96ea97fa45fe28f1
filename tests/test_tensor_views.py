"""Views of stored tensors give what NumPy's own indexing gives, and read no more than they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rollkv.models.tensor_views import Flattened, Joined, LowRank, Picked, Plus, Stacked, Swapped, grouped, half_order
from rollkv.models.tensors import StoredTensor

RNG = np.random.default_rng(5)


class Held:
    """A tensor in memory that notes which rows are read."""

    def __init__(self, *shape: int) -> None:
        self.array = RNG.normal(size=shape).astype(np.float32)
        self.shape = self.array.shape
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.shape[0]
        self.reads.append((start, stop))
        return self.array[start:stop].copy()


def ranges(count: int) -> Iterator[tuple[int, int]]:
    """The whole, nothing, and random ranges of `count` rows."""
    yield 0, count
    yield count, count
    for _ in range(12):
        start, stop = sorted(RNG.integers(0, count + 1, 2))
        yield int(start), int(stop)


def assert_is(view: StoredTensor, wanted: np.ndarray) -> None:
    """Shape, type and every range bit for bit."""
    assert view.shape == wanted.shape
    for start, stop in ranges(view.shape[0]):
        block = view.read(start, stop)
        assert block.dtype == np.float32
        np.testing.assert_array_equal(block, wanted[start:stop])


@pytest.mark.parametrize(
    "index",
    [
        np.arange(7, 19),
        np.arange(29, -1, -1),
        np.array([4]),
        RNG.permutation(30),
        RNG.integers(0, 30, 50),
        np.array([], int),
    ],
)
def test_picked_rows_are_those_of_numpy(index: np.ndarray) -> None:
    for stored in (Held(30, 5), Held(30)):
        assert_is(Picked(stored, index), stored.array[index])


def test_picked_columns_are_those_of_numpy() -> None:
    stored, index = Held(9, 30), RNG.permutation(30)[:11]
    assert_is(Picked(stored, index, axis=1), stored.array[:, index])


def test_neighbouring_rows_are_one_read_and_scattered_ones_are_runs() -> None:
    stored = Held(10_000, 2)
    Picked(stored, np.arange(300, 900)).read(100, 200)
    assert stored.reads == [(400, 500)]
    stored.reads.clear()
    index = np.array([9000, 5, 6, 7, 4000, 6])
    np.testing.assert_array_equal(Picked(stored, index).read(0, 6), stored.array[index])
    assert stored.reads == [(5, 8), (4000, 4001), (9000, 9001)]
    stored.reads.clear()
    Picked(stored, half_order(2, 8, 8)).read(0, 4)  # rows 0, 2, 4, 6: close enough for one read
    assert stored.reads == [(0, 7)]


def test_parts_are_joined_along_either_axis() -> None:
    parts = (Held(3, 4), Held(1, 4), Held(7, 4))
    assert_is(Joined(parts, 0), np.concatenate([part.array for part in parts]))
    parts = (Held(5, 4), Held(5, 1), Held(5, 6))
    assert_is(Joined(parts, 1), np.concatenate([part.array for part in parts], axis=1))
    vectors = (Held(3), Held(5))
    assert_is(Joined(vectors), np.concatenate([part.array for part in vectors]))


def test_vectors_are_the_rows_of_a_matrix() -> None:
    vectors = (Held(5), Held(5), Held(5))
    view, wanted = Stacked(vectors), np.stack([vector.array for vector in vectors])
    assert view.shape == (3, 5)
    for start, stop in ((0, 3), (1, 2), (2, 3)):
        np.testing.assert_array_equal(view.read(start, stop), wanted[start:stop])


def test_only_the_parts_that_a_range_touches_are_read() -> None:
    parts = (Held(3, 4), Held(5, 4), Held(7, 4))
    Joined(parts).read(4, 8)
    assert [part.reads for part in parts] == [[], [(1, 5)], []]


def test_an_offset_is_float32() -> None:
    stored = Held(8, 3)
    assert_is(Plus(stored, 0.1), stored.array + np.float32(0.1))


def test_a_stack_is_read_as_rows_one_item_after_the_other() -> None:
    stored = Held(6, 5, 3)
    assert_is(Flattened(stored), stored.array.reshape(30, 3))
    stored.reads.clear()
    Flattened(stored).read(7, 16)
    assert stored.reads == [(1, 2), (2, 3), (3, 4)]
    matrix = Held(4, 6)
    assert_is(Flattened(matrix), matrix.array.reshape(24))


def test_the_items_of_a_stack_are_read_transposed() -> None:
    stored = Held(6, 5, 3)
    assert_is(Swapped(stored), stored.array.transpose(0, 2, 1))
    assert_is(Flattened(Swapped(stored)), stored.array.transpose(0, 2, 1).reshape(18, 5))


def test_a_low_rank_update_is_added_in_either_orientation() -> None:
    a, b = Held(3, 8), Held(20, 3)
    update = 0.7 * (b.array.astype(np.float64) @ a.array.astype(np.float64))
    for stored, turned in ((Held(20, 8), False), (Held(8, 20), True)):
        view, wanted = LowRank(stored, a, b, 0.7, turned), stored.array + (update.T if turned else update)
        assert view.shape == stored.shape
        for start, stop in ranges(view.shape[0]):
            block = view.read(start, stop)
            assert block.dtype == np.float32
            np.testing.assert_allclose(block, wanted[start:stop], rtol=1e-6, atol=1e-7)


def test_views_stand_on_views() -> None:
    experts = Held(4, 6, 5)
    columns = Picked(Flattened(experts), np.array([4, 0, 2]), axis=1)
    assert_is(Plus(columns, 1.0), experts.array.reshape(24, 5)[:, [4, 0, 2]] + np.float32(1))


@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(3, 8, 8), (2, 10, 4), (1, 6, 0)])
def test_half_order_puts_the_even_rows_of_a_head_before_the_odd_ones(
    heads: int, head_dim: int, rotary_dim: int
) -> None:
    weight = RNG.normal(size=(heads, head_dim, 5))
    wanted = weight.copy()
    for i in range(rotary_dim // 2):
        wanted[:, i], wanted[:, i + rotary_dim // 2] = weight[:, 2 * i], weight[:, 2 * i + 1]
    index = half_order(heads, head_dim, rotary_dim)
    np.testing.assert_array_equal(weight.reshape(-1, 5)[index], wanted.reshape(-1, 5))


def test_grouped_takes_one_part_of_each_head() -> None:
    fused = RNG.normal(size=(4, 3, 6, 5))  # heads, parts, rows, in
    for which in range(3):
        index = grouped(4, 3, which, 6)
        np.testing.assert_array_equal(fused.reshape(-1, 5)[index], fused[:, which].reshape(-1, 5))


@pytest.mark.parametrize(
    "view",
    [
        lambda: Picked(Held(4, 3), np.array([0, 4])),
        lambda: Picked(Held(4), np.array([-1, 2])),
        lambda: Picked(Held(4), np.array([0]), axis=1),
        lambda: Picked(Held(4, 2, 2), np.array([0])),
        lambda: Picked(Held(4, 2), np.array([2]), axis=1),
        lambda: Joined((Held(4, 3), Held(4, 2))),
        lambda: Joined((Held(4, 3), Held(5, 3)), axis=1),
        lambda: LowRank(Held(4, 4), Held(2, 4), Held(4, 3), 1.0),
        lambda: LowRank(Held(4, 5), Held(2, 4), Held(5, 2), 1.0),
    ],
)
def test_shapes_that_do_not_fit_are_no_view(view: Callable[[], StoredTensor]) -> None:
    with pytest.raises(AssertionError):
        view()
