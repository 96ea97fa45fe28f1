"""Sessions of bundles whose tokens have three rotary positions."""

import numpy as np
import pytest
from conftest import Recorder
from toy_embeds import embeds_manifest, save_bundle
from toy_model import Failing, some_ids, toy

from rollkv.runtime.align import LimitError, PromptError, three_part_positions
from rollkv.runtime.session import Session

# Two tokens of text, an image of 2 x 3 tokens, two of text: its positions end at 6, its tokens at 9.
POSITIONS = three_part_positions(10, [(2, 2, 3)])


@pytest.fixture
def session(tmp_path):
    return open_session(tmp_path)[0]


def open_session(tmp_path, backend=None, **settings):
    manifest = embeds_manifest(**{"c": 4, "C": 24, "tokens": "ids", "three_part": True, **settings})
    bundle = save_bundle(tmp_path / "b", manifest)
    recorder = Recorder(backend(bundle) if backend else None)
    return Session(bundle, backend=recorder), recorder


def fed(session):
    """The positions of each run."""
    return [feeds["position_ids"][:, 0].tolist() for _, feeds in session.backend.runs]


def test_without_positions_all_three_are_the_next_ones(session):
    session.prefill([3] * 5)
    session.decode(4)
    session.prefill([5] * 2)
    rows = [[0, 0, 0, 0], [1, 2, 3, 4], [5], [0, 0, 6, 7]]
    assert fed(session) == [[row] * 3 for row in rows]


def test_positions_over_chunk_borders_and_decode_written_out(session):
    session.prefill(some_ids(10), positions=POSITIONS)
    session.decode(3)
    session.prefill([4, 5])
    assert fed(session) == [
        [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1]],
        [[2, 2, 2, 2], [2, 2, 2, 3], [2, 3, 4, 2]],
        [[2, 2, 5, 6], [3, 3, 5, 6], [3, 4, 5, 6]],
        [[7]] * 3,
        [[0, 0, 8, 9]] * 3,
    ]
    assert session.position == 13


def test_masks_count_tokens_whatever_the_positions(tmp_path):
    session, recorder = open_session(tmp_path / "1", window=5)
    plain, other = open_session(tmp_path / "2", window=5)
    session.prefill(some_ids(10), positions=POSITIONS)
    plain.prefill(some_ids(10))
    for one in (session, plain):
        one.decode(3)
    for (_, got), (_, want) in zip(recorder.runs, other.runs, strict=True):
        for name in ("attention_mask", "sliding_attention_mask", "input_ids"):
            np.testing.assert_array_equal(got[name], want[name])


def test_decoding_goes_on_after_the_largest_position_even_if_the_image_comes_last(session):
    session.prefill([3] * 8, positions=three_part_positions(8, [(2, 1, 6)]))
    session.prefill([3] * 4, positions=three_part_positions(4, [(0, 4, 1)], start=20))
    assert fed(session)[-1] == [[20] * 4, [20, 21, 22, 23], [20] * 4]
    list(session.generate([5], max_new_tokens=3))
    assert fed(session)[-3:] == [[[0, 0, 0, 24]] * 3, [[25]] * 3, [[26]] * 3]


def test_reset_starts_at_position_zero_again(session):
    session.prefill([3] * 10, positions=POSITIONS)
    session.reset()
    session.decode(3)
    assert fed(session)[-1] == [[0]] * 3


def test_positions_are_cut_as_ids_are(tmp_path):
    session, _ = open_session(tmp_path, L=8)
    with pytest.warns(UserWarning, match="cut from 10 to 8"):
        session.prefill([3] * 10, positions=POSITIONS, truncate="middle", keep_head=5)
    wanted = POSITIONS[:, [0, 1, 2, 3, 4, 7, 8, 9]]
    assert np.concatenate(fed(session), axis=1).tolist() == wanted.tolist()
    session.decode(3)
    assert fed(session)[-1] == [[7]] * 3


def test_generate_takes_positions(session):
    list(session.generate(some_ids(10), positions=POSITIONS, max_new_tokens=2))
    assert np.concatenate(fed(session)[:3], axis=1)[:, 2:].tolist() == POSITIONS.tolist()
    assert fed(session)[3:] == [[[7]] * 3]


def test_after_a_failure_positions_go_on_after_what_went_through(tmp_path):
    class Second(Failing):
        def __init__(self, bundle):
            super().__init__(bundle, 2)

    session, _ = open_session(tmp_path, Second)
    with pytest.raises(RuntimeError, match="the board is gone"):
        session.prefill([3] * 10, positions=POSITIONS + 4)
    session.decode(3)
    assert fed(session)[-1] == [[6]] * 3  # two went through, at 4 and 5


def test_the_models_last_position_ends_it_though_the_cache_has_room(tmp_path):
    session, _ = open_session(tmp_path, most=30)
    session.prefill([3] * 2, positions=[[27, 27]] * 3)
    assert (session.room(), session.room("roll")) == (2, 2)
    with pytest.raises(
        LimitError, match=r"3 tokens after 2 others \(rotary position 28\) pass the model's positions = 30"
    ):
        session.prefill([3] * 3)
    generation = session.generate([3], max_new_tokens=9)
    assert len(list(generation)) == 2
    assert generation.finish_reason == "length"


@pytest.mark.parametrize(
    ("positions", "kind", "message"),
    [
        ([[0, 1]] * 2, PromptError, r"positions have shape \(2, 2\), allowed: \(3, 2\)"),
        ([[0]] * 3, PromptError, r"positions have shape \(3, 1\), allowed: \(3, 2\)"),
        ([0, 1], PromptError, r"positions have shape \(2,\), allowed"),
        ([[0.0, 1.0]] * 3, PromptError, r"positions have type float64; allowed: \(3, 2\) whole numbers"),
        ([[0], [0, 1], [0]], PromptError, "positions are no array"),
        ([[0, -1]] * 3, PromptError, r"positions hold -1, allowed: 0 \.\. 511"),
        ([[0, 512]] * 3, LimitError, r"positions hold 512, allowed: 0 \.\. 511, the model's positions"),
    ],
)
def test_positions_that_cannot_be_are_refused_and_nothing_runs(session, positions, kind, message):
    with pytest.raises(kind, match=message) as caught:
        session.prefill([1, 2], positions=positions)
    assert caught.value.exit_code == 2
    assert not session.backend.runs


def test_a_bundle_of_one_position_refuses_three():
    session, recorder = toy(c=4)
    with pytest.raises(PromptError, match="the rotary positions of this bundle have one part and count tokens"):
        session.prefill([1, 2], positions=[[0, 1]] * 3)
    assert not recorder.runs
