import random

import numpy as np
import pytest

from rollkv.runtime.cache import RollingBuffer, roll

C, C_ROWS, K, D = 11, 4, 3, 2
# layout -> shape of a cached tensor, its slot axis
LAYOUTS = {
    "bskd": ((1, C, K, D), 1),
    "bksd": ((1, K, C, D), 2),
    "bksd-kt": ((1, K, D, C), 3),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def numbered(shape, axis, rows, first, dtype):
    """New slots whose values are all different and never zero; exact in float16 while they stay below 2048."""
    shape = (*shape[:axis], rows, *shape[axis + 1 :])
    count = int(np.prod(shape))
    return (first + np.arange(count)).reshape(shape).astype(dtype)


def last(array, axis):
    return np.take(array, range(array.shape[axis] - C, array.shape[axis]), axis)


@every_layout
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("slack", [C_ROWS, C_ROWS + 1, 7, C, 5 * C])
def test_it_equals_a_concatenation_cut_to_the_last_slots(layout, dtype, slack):
    shape, axis = LAYOUTS[layout]
    rng, random_numbers = random.Random(slack), np.random.default_rng(slack)
    buffer = RollingBuffer(shape, axis, dtype, slack)
    expected = np.zeros(shape, dtype)
    for _ in range(300):
        rows = rng.randint(1, C_ROWS)
        skip = rng.choice([0, 0, rng.randint(0, rows)])
        new = random_numbers.standard_normal((*shape[:axis], rows, *shape[axis + 1 :])).astype(dtype)
        buffer.roll(new, skip)
        kept = np.take(new, range(skip, rows), axis)
        np.testing.assert_array_equal(
            roll(expected, new, axis, skip), last(np.concatenate((expected, kept), axis), axis)
        )
        expected = last(np.concatenate((expected, kept), axis), axis)
        window = buffer.window()
        assert window.shape == shape
        assert window.dtype == dtype
        assert window.flags.c_contiguous
        np.testing.assert_array_equal(window, expected)


@every_layout
def test_new_slots_may_come_as_a_view_that_is_not_contiguous(layout):
    shape, axis = LAYOUTS[layout]
    buffer = RollingBuffer(shape, axis, np.float32, C_ROWS)
    wide = numbered(shape, axis, 2 * C_ROWS, 1, np.float32)
    new = wide[tuple(slice(None, None, 2) if i == axis else slice(None) for i in range(4))]
    assert not new.flags.c_contiguous
    buffer.roll(new)
    np.testing.assert_array_equal(buffer.window(), last(np.concatenate((np.zeros(shape), new), axis), axis))


@every_layout
def test_a_run_as_long_as_the_cache_replaces_it(layout):
    shape, axis = LAYOUTS[layout]
    buffer = RollingBuffer(shape, axis, np.float32, C)
    buffer.roll(numbered(shape, axis, 3, 900, np.float32))
    new = numbered(shape, axis, C, 1, np.float32)
    buffer.roll(new)
    np.testing.assert_array_equal(buffer.window(), new)


@every_layout
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_a_roll_writes_the_new_tokens_and_not_one_byte_more(layout, skip):
    shape, axis = LAYOUTS[layout]
    buffer = RollingBuffer(shape, axis, np.float32, 40)
    buffer.roll(numbered(shape, axis, C_ROWS, 500, np.float32))
    memory = buffer.window().base
    before = memory.copy()
    buffer.roll(numbered(shape, axis, C_ROWS, 1, np.float32), skip)
    assert buffer.window().base is memory
    changed = before.view(np.uint32) != memory.view(np.uint32)
    assert changed.sum() * 4 == (C_ROWS - skip) * K * D * 4
    assert buffer.copied_bytes == 0


def test_no_roll_moves_to_other_memory():
    shape, axis = LAYOUTS["bskd"]
    buffer = RollingBuffer(shape, axis, np.float32, 5)
    memory = buffer.window().base
    for _ in range(40):
        buffer.roll(np.ones((1, 1, K, D), np.float32))
        assert buffer.window().base is memory


@every_layout
@pytest.mark.parametrize(("slack", "moves"), [(1, 59), (4, 14), (20, 2), (59, 1), (60, 0)])
def test_the_window_is_copied_once_for_each_slack_of_tokens(layout, slack, moves):
    """The first `slack` tokens cost nothing, and every `slack` after them one copy of the window."""
    shape, axis = LAYOUTS[layout]
    buffer = RollingBuffer(shape, axis, np.float32, slack)
    for step in range(60):
        buffer.roll(numbered(shape, axis, 1, 1 + step * K * D, np.float32))
    assert buffer.copied_bytes == moves * C * K * D * 4


@every_layout
def test_reset_leaves_zeros_everywhere(layout):
    shape, axis = LAYOUTS[layout]
    buffer = RollingBuffer(shape, axis, np.float32, 5)
    for _ in range(9):
        buffer.roll(np.full((*shape[:axis], C_ROWS, *shape[axis + 1 :]), np.nan, np.float32))
    assert buffer.copied_bytes > 0
    buffer.reset()
    assert not buffer.window().base.any()
    assert buffer.copied_bytes == 0
    buffer.roll(numbered(shape, axis, 1, 7, np.float32))
    np.testing.assert_array_equal(np.take(buffer.window(), range(C - 1), axis), 0)


def test_two_buffers_share_no_memory():
    shape, axis = LAYOUTS["bskd"]
    one, other = (RollingBuffer(shape, axis, np.float32, 5) for _ in range(2))
    one.roll(np.ones((1, 2, K, D), np.float32))
    assert not np.shares_memory(one.window().base, other.window().base)
    assert not other.window().any()


def test_a_roll_keeps_no_reference_to_what_it_was_given():
    buffer = RollingBuffer((1, C, K, D), 1, np.float32, 5)
    new = np.ones((1, 1, K, D), np.float32)
    buffer.roll(new)
    new[:] = 9
    assert buffer.window().max() == 1


# Rewinds, and windows that stay where they are


@every_layout
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("slack", [C_ROWS, C])
def test_a_rewind_brings_back_what_the_last_slots_held_before(layout, slack, fixed):
    """As long as the window has dropped no token: what comes back at the left was never written."""
    shape, axis = LAYOUTS[layout]
    rng = random.Random(slack)
    for _ in range(40):
        buffer = RollingBuffer(shape, axis, np.float32, slack, fixed)
        held = np.zeros((*shape[:axis], 0, *shape[axis + 1 :]), np.float32)
        for step in range(8):
            rows = min(rng.randint(1, C_ROWS), C - held.shape[axis])
            new = numbered(shape, axis, rows, 1 + 100 * step, np.float32)
            buffer.roll(new)
            held = np.concatenate((held, new), axis)
            count = rng.randint(0, min(3, held.shape[axis]))
            buffer.rewind(count)
            held = np.take(held, range(held.shape[axis] - count), axis)
            there = np.take(buffer.window(), range(C - held.shape[axis], C), axis)
            np.testing.assert_array_equal(there, held)


@every_layout
def test_with_fixed_addresses_every_roll_is_the_concatenation_and_nothing_moves(layout):
    shape, axis = LAYOUTS[layout]
    buffer, expected = RollingBuffer(shape, axis, np.float32, 5, fixed=True), np.zeros(shape, np.float32)
    address = buffer.window().__array_interface__["data"]
    for step in range(30):
        new = numbered(shape, axis, 1 + step % C_ROWS, 1 + 100 * step, np.float32)
        buffer.roll(new)
        expected = roll(expected, new, axis)
        np.testing.assert_array_equal(buffer.window(), expected)
        assert buffer.window().__array_interface__["data"] == address
    assert buffer.slack == 0


@every_layout
def test_a_rewind_within_what_was_rolled_since_the_last_copy_copies_nothing(layout):
    shape, axis = LAYOUTS[layout]
    buffer = RollingBuffer(shape, axis, np.float32, C)
    for _ in range(C):
        buffer.roll(numbered(shape, axis, 1, 1, np.float32))
        buffer.rewind(1)
        buffer.roll(numbered(shape, axis, 1, 1, np.float32))
    buffer.rewind(C)
    assert buffer.copied_bytes == 0


@every_layout
def test_several_tensors_in_one_buffer_roll_as_each_would_alone(layout):
    shape, axis = LAYOUTS[layout]
    together = RollingBuffer((3, *shape), axis + 1, np.float32, C_ROWS)
    alone = [RollingBuffer(shape, axis, np.float32, C_ROWS) for _ in range(3)]
    for step in range(20):
        new = np.stack([numbered(shape, axis, C_ROWS, 1 + 1000 * i + 50 * step, np.float32) for i in range(3)])
        together.roll(new, step % 3, 3 + step % 2)
        for buffer, part in zip(alone, new, strict=True):
            buffer.roll(part, step % 3, 3 + step % 2)
        for window, buffer in zip(together.window(), alone, strict=True):
            assert window.flags.c_contiguous
            np.testing.assert_array_equal(window, buffer.window())
