import numpy as np
import pytest

from rollkv.runtime.align import (
    PromptError,
    aligned_length,
    pad_left,
    run_positions,
    three_part_positions,
    truncate,
)
from rollkv.runtime.cover import Run, plan_runs


def test_five_tokens_in_chunks_of_four_written_out():
    padded, real = pad_left([11, 12, 13, 14, 15], 4)
    assert padded.tolist() == [0, 0, 0, 11, 12, 13, 14, 15]
    assert real.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    first, second = plan_runs(5, 0, 4, 10)
    assert (first, second) == (Run(4, 3), Run(4, 0))
    assert run_positions(0, first.pads, first.rows).tolist() == [0, 0, 0, 0]
    assert run_positions(1, second.pads, second.rows).tolist() == [1, 2, 3, 4]


def test_six_tokens_after_three_others_written_out():
    assert plan_runs(6, 3, 4, 10) == [Run(4, 2), Run(4, 0)]
    assert run_positions(3, 2, 4).tolist() == [0, 0, 3, 4]
    assert run_positions(5, 0, 4).tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(("n", "c", "length"), [(1, 1, 1), (1, 4, 4), (3, 4, 4), (4, 4, 4), (5, 4, 8), (9, 3, 9)])
def test_the_length_is_the_next_multiple_of_the_chunk(n, c, length):
    assert aligned_length(n, c) == length
    assert len(pad_left(range(n), c)[0]) == length


def test_a_prompt_that_fits_gets_no_pad_and_pads_take_the_id_asked_for():
    assert pad_left([7, 8], 2)[0].tolist() == [7, 8]
    assert pad_left([7], 3, pad_id=5)[0].tolist() == [5, 5, 7]


def test_an_empty_prompt_is_refused():
    with pytest.raises(PromptError, match="empty prompt: there is no token to run"):
        pad_left([], 4)


@pytest.mark.parametrize("c", [1, 2, 3, 4, 7])
def test_runs_take_every_token_once_and_only_the_first_has_pads(c):
    kv_len = 14
    for past in range(kv_len + 6):
        for n in range(1, 20):
            runs = plan_runs(n, past, c, kv_len)
            assert sum(run.rows - run.pads for run in runs) == n
            assert all(run.rows in (1, c) for run in runs)
            assert all(run.pads == 0 for run in runs[1:])
            assert 0 <= runs[0].pads < runs[0].rows
            if runs[0].pads:
                assert past + c <= kv_len  # else it would drop tokens for its pads
            assert runs[len(runs) - n // c :] == [Run(c, 0)] * (n // c)


def test_on_a_nearly_full_cache_the_remainder_goes_one_by_one():
    assert plan_runs(3, 6, 4, 10) == [Run(4, 1)]
    assert plan_runs(3, 7, 4, 10) == [Run(1, 0)] * 3
    assert plan_runs(6, 7, 4, 10) == [Run(1, 0)] * 2 + [Run(4, 0)]


@pytest.mark.parametrize(
    ("how", "keep_head", "kept"),
    [
        ("left", None, [6, 7, 8, 9, 10, 11, 12, 13]),
        ("left", 3, [6, 7, 8, 9, 10, 11, 12, 13]),
        ("middle", None, [0, 1, 8, 9, 10, 11, 12, 13]),  # 8 // 4 from the head
        ("middle", 0, [6, 7, 8, 9, 10, 11, 12, 13]),
        ("middle", 5, [0, 1, 2, 3, 4, 11, 12, 13]),
        ("middle", 7, [0, 1, 2, 3, 4, 5, 6, 13]),
    ],
)
def test_truncation_keeps_exactly_these_of_fourteen_for_eight(how, keep_head, kept):
    assert truncate(range(14), 8, how, keep_head) == (kept, 6)


@pytest.mark.parametrize("how", ["none", "left", "middle"])
def test_what_fits_is_not_cut(how):
    assert truncate([4, 5, 6], 3, how) == ([4, 5, 6], 0)


def test_one_token_is_left_of_a_limit_of_one():
    assert truncate([4, 5, 6], 1, "left") == ([6], 2)
    assert truncate([4, 5, 6], 1, "middle") == ([6], 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((range(5), 4, "none"), "the prompt has 5 tokens, allowed are 4"),
        ((range(5), 4, "right"), "truncation 'right' is unknown; allowed: none, left, middle"),
        ((range(2), 4, "right"), "truncation 'right' is unknown"),
        ((range(5), 4, "middle", 4), r"keep_head is 4, allowed: 0 \.\. 3"),
        ((range(5), 4, "middle", -1), r"keep_head is -1, allowed: 0 \.\. 3"),
    ],
)
def test_a_truncation_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(PromptError, match=message):
        truncate(*arguments)


# Three-part positions


def test_the_positions_of_text_an_image_and_text_written_out():
    want = [
        [3, 4, 5, 5, 5, 5, 5, 5, 8, 9],
        [3, 4, 5, 5, 5, 6, 6, 6, 8, 9],
        [3, 4, 5, 6, 7, 5, 6, 7, 8, 9],
    ]
    assert three_part_positions(10, [(2, 2, 3)], start=3).tolist() == want
    assert three_part_positions(3, [], start=7).tolist() == [[7, 8, 9]] * 3
    assert three_part_positions(0, []).shape == (3, 0)


@pytest.mark.parametrize(
    ("n", "images"),
    [
        (20, [(3, 2, 3), (11, 4, 2)]),  # text around two images
        (14, [(0, 3, 2), (7, 1, 6)]),  # an image at the very start, a low and wide one later
        (9, [(3, 3, 2)]),  # an image at the very end
        (30, [(1, 5, 1), (8, 1, 1), (12, 4, 4)]),
    ],
)
def test_three_part_positions_equal_those_of_transformers(n, images):
    """`get_rope_index` of Qwen2-VL; its grids count patches, of which a token merges 2 x 2."""
    torch = pytest.importorskip("torch")
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    class Config:
        class vision_config:
            spatial_merge_size = 2

    model = Qwen2VLModel.__new__(Qwen2VLModel)
    torch.nn.Module.__init__(model)
    model.config = Config
    kinds = torch.zeros(1, n, dtype=torch.int32)
    for index, h, w in images:
        kinds[0, index : index + h * w] = 1
    grids = torch.tensor([[1, 2 * h, 2 * w] for _, h, w in images])
    want, delta = model.get_rope_index(torch.zeros(1, n, dtype=torch.int64), kinds, image_grid_thw=grids)
    got = three_part_positions(n, images)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, want[:, 0].numpy())
    assert got.max() + 1 == n + int(delta)  # where decoding goes on


@pytest.mark.parametrize("image", [(-1, 2, 2), (7, 2, 2), (1, 0, 2), (4, 2, 2)])
def test_an_image_outside_of_the_tokens_or_in_another_is_refused(image):
    with pytest.raises(PromptError, match=rf"image of {image[1]} x 2 tokens at index {image[0]}: allowed are sizes"):
        three_part_positions(10, [(2, 1, 3), image])
