import random

import numpy as np
import pytest

from rollkv.runtime.align import pad_left
from rollkv.runtime.cover import plan_runs
from rollkv.runtime.mask import _causal_block, causal_mask, chunk_mask, run_mask

M = -32768.0


def drawn(mask):
    """The mask as text, # where a slot is visible."""
    return ["".join("#" if value == 0 else "." for value in row) for row in mask.reshape(-1, mask.shape[-1])]


def slot_by_slot(past, pads, rows, kv_len, window):
    """CONTRACT.md, section 2, "One run", word by word: (rows, kv_len), True where the row sees the slot."""
    position = {}  # slot -> position of the token in it
    for slot in range(kv_len - rows):
        k = past - (kv_len - rows) + slot
        if k >= 0:
            position[slot] = k
    for i in range(rows - pads):
        position[kv_len - rows + pads + i] = past + i
    seen = np.zeros((rows, kv_len), bool)
    for i in range(rows - pads):
        q = past + i
        for slot, k in position.items():
            if k <= q and (window is None or q - k < window):
                seen[pads + i, slot] = True
    return seen


def test_five_tokens_in_chunks_of_four_with_ten_slots_written_out():
    assert drawn(run_mask(0, 3, 4, 10, M)) == [
        "..........",
        "..........",
        "..........",
        ".........#",
    ]
    assert drawn(run_mask(1, 0, 4, 10, M)) == [
        ".....##...",
        ".....###..",
        ".....####.",
        ".....#####",
    ]
    assert drawn(run_mask(5, 0, 1, 10, M)) == ["....######"]


def test_a_second_turn_of_three_after_five_written_out():
    """Cached tokens, then the pad, then the run."""
    assert drawn(run_mask(5, 1, 4, 10, M)) == [
        "..........",
        ".#####.#..",
        ".#####.##.",
        ".#####.###",
    ]


def test_a_window_of_three_with_six_slots_written_out():
    """Cs = W - 1 + c = 6."""
    assert drawn(run_mask(0, 2, 4, 6, M, window=3)) == ["......", "......", "....#.", "....##"]
    assert drawn(run_mask(2, 0, 4, 6, M, window=3)) == ["###...", ".###..", "..###.", "...###"]
    assert drawn(run_mask(6, 2, 4, 6, M, window=3)) == ["......", "......", "##..#.", ".#..##"]
    assert drawn(run_mask(8, 0, 1, 6, M, window=3)) == ["...###"]


def test_a_full_run_on_a_full_cache_sees_what_is_not_dropped():
    assert drawn(run_mask(10, 0, 4, 10, M)) == ["#######...", "########..", "#########.", "##########"]
    assert drawn(run_mask(99, 0, 1, 10, M)) == ["##########"]
    assert drawn(run_mask(99, 0, 4, 4, M)) == ["#...", "##..", "###.", "####"]


def test_the_full_mask_of_three_tokens_after_a_pad_written_out():
    assert drawn(causal_mask(np.array([0, 1, 1, 1]), M)) == ["....", ".#..", ".##.", ".###"]
    assert drawn(causal_mask(np.array([0, 1, 1, 1]), M, window=2)) == ["....", ".#..", ".##.", "..##"]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 100])
def test_a_first_prompt_gets_the_chunks_of_the_full_causal_mask(window):
    for c in (1, 2, 3, 4, 6):
        for most in (6, 10, 13):
            kv_len = most if window is None else min(most, window - 1 + c)
            for n in range(1, most + 1):
                full = causal_mask(pad_left(range(1, n + 1), c)[1], M, window)
                past = start = 0
                for run in plan_runs(n, 0, c, most):
                    got = run_mask(past, run.pads, run.rows, kv_len, M, window=window)
                    np.testing.assert_array_equal(got[0, 0], chunk_mask(full, start, c, kv_len, M))
                    past, start = past + run.rows - run.pads, start + c
                assert past == n


def test_any_run_at_any_time_equals_the_contract_slot_by_slot():
    rng = random.Random(5)
    for _ in range(3000):
        kv_len = rng.randint(1, 24)
        rows = rng.randint(1, kv_len)
        pads = rng.randint(0, rows - 1) if rng.random() < 0.7 else 0
        past = rng.randint(0, 2 * kv_len)
        window = rng.choice([None, 1, 2, rng.randint(1, 30)])
        seen = slot_by_slot(past, pads, rows, kv_len, window)
        mask = run_mask(past, pads, rows, kv_len, M, window=window)
        assert mask.shape == (1, 1, rows, kv_len)
        np.testing.assert_array_equal(mask[0, 0], np.where(seen, 0.0, M), err_msg=f"{past, pads, rows, kv_len, window}")


def test_visible_slots_are_one_stretch_up_to_the_rows_own_but_for_the_pads_between():
    """Cached tokens end where the run begins; only pads may lie between them and the run's tokens."""
    for past in range(13):
        for pads in range(4):
            for row, line in enumerate(drawn(run_mask(past, pads, 4, 10, M))):
                if row < pads:
                    assert line == "." * 10
                    continue
                own = 10 - 4 + row
                assert line[own] == "#"
                assert "#" not in line[own + 1 :]
                real = (line[:6] + line[6 + pads :]).strip(".")  # without the pads' slots
                assert real == "#" * len(real)
                assert line[6 : 6 + pads] == "." * pads
                assert line.count("#") == min(past, 6) + row - pads + 1


@pytest.mark.parametrize("mask_value", [M, -10000.0, -255.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_only_zero_and_the_mask_value_occur_in_the_type_asked_for(mask_value, dtype):
    mask = run_mask(3, 2, 4, 10, mask_value, window=4, dtype=dtype)
    assert mask.dtype == dtype
    assert mask.flags.c_contiguous
    assert sorted(set(mask.ravel().tolist())) == [mask_value, 0.0]


def test_float16_and_float32_masks_show_the_same():
    for past in (0, 3, 20):
        half, single = (run_mask(past, 1, 4, 10, M, dtype=kind) for kind in (np.float16, np.float32))
        np.testing.assert_array_equal(half, single)


def test_what_is_kept_between_masks_does_not_grow_with_the_lengths_of_prompts():
    before = _causal_block.cache_info().currsize
    for pads in range(37):
        run_mask(0, pads, 37, 64, -32768.0)
    assert _causal_block.cache_info().currsize <= before + 1
