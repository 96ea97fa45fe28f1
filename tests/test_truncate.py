import numpy as np
import pytest

from rollkv.runtime.align import PromptError, kept_ranges, truncate


def kept(*arguments, **settings):
    return [i for start, stop in kept_ranges(*arguments, **settings) for i in range(start, stop)]


@pytest.mark.parametrize(
    ("how", "keep_head", "ranges"),
    [
        ("left", None, [(6, 14)]),
        ("middle", None, [(0, 2), (8, 14)]),
        ("middle", 0, [(6, 14)]),
        ("middle", 5, [(0, 5), (11, 14)]),
    ],
)
def test_the_ranges_that_are_kept_of_fourteen_for_eight(how, keep_head, ranges):
    assert kept_ranges(14, 8, how, keep_head) == ranges
    assert kept_ranges(8, 8, how, keep_head) == [(0, 8)]


@pytest.mark.parametrize(
    ("how", "keep_head", "protect", "want"),
    [
        ("left", None, (6, 9), [(6, 14)]),  # in what is kept anyhow
        ("middle", None, (0, 2), [(0, 2), (8, 14)]),
        ("middle", None, (8, 14), [(0, 2), (8, 14)]),
        ("middle", None, (1, 5), [(0, 5), (11, 14)]),  # the head grows to its end
        ("middle", None, (0, 7), [(0, 7), (13, 14)]),
        ("middle", None, (7, 12), [(0, 1), (7, 14)]),  # the head shrinks until the tail holds it
        ("middle", None, (7, 14), [(0, 1), (7, 14)]),
        ("middle", None, (6, 7), [(6, 14)]),  # to nothing, rather than that it grows
        ("middle", 6, (2, 5), [(0, 6), (12, 14)]),
        ("middle", 0, (6, 7), [(6, 14)]),
    ],
)
def test_a_protected_span_is_kept_whole(how, keep_head, protect, want):
    assert kept_ranges(14, 8, how, keep_head, protect) == want
    ids, cut = truncate(range(100, 114), 8, how, keep_head, protect)
    assert cut == 6
    assert {100 + i for i in range(*protect)} <= set(ids)


@pytest.mark.parametrize(
    ("how", "keep_head", "protect", "said"),
    [
        ("left", None, (5, 7), "keeps the last 8; choose truncation middle with keep_head of at least 7, or a larger"),
        ("left", None, (0, 8), "keeps the last 8; choose a larger -L"),
        ("middle", None, (0, 8), "keeps the first 2 and the last 6; choose a larger -L"),
        ("middle", 3, (1, 4), "first 3 and the last 5; choose truncation middle with keep_head of at least 4, or a"),
        ("middle", 5, (7, 12), "first 5 and the last 3; choose truncation middle with keep_head of at most 1, or a"),
        ("middle", None, (5, 9), "first 2 and the last 6; choose a larger -L"),
    ],
)
def test_a_span_that_would_be_cut_is_refused_with_its_numbers_and_the_cure(how, keep_head, protect, said):
    with pytest.raises(PromptError) as caught:
        kept_ranges(14, 8, how, keep_head, protect)
    message = str(caught.value)
    assert message.startswith(
        f"the protected tokens {protect[0]}:{protect[1]} cannot be kept whole: the prompt has 14 tokens, L = 8, and "
        f"truncation {how} keeps "
    )
    assert said in message
    assert message.endswith("a larger -L")
    assert caught.value.exit_code == 2


def test_no_span_is_ever_cut_and_none_that_the_rule_can_keep_is_refused():
    """Against the rule by sets of tokens, for every length, limit, span and head."""
    for n in range(1, 10):
        for limit in range(1, 9):
            for start in range(n):
                for stop in range(start + 1, n + 1):
                    span = set(range(start, stop))
                    for how, head in [("left", None), ("middle", None), *(("middle", h) for h in range(limit))]:
                        heads = [0 if how == "left" else limit // 4 if head is None else head]
                        if (how, head) == ("middle", None):  # down to 0, then up
                            heads = [*range(limit // 4, -1, -1), *range(limit // 4 + 1, limit)]
                        cuts = [[*range(h), *range(n - (limit - h), n)] if n > limit else [*range(n)] for h in heads]
                        want = next((cut for cut in cuts if span <= set(cut)), None)
                        if want is None:
                            with pytest.raises(PromptError, match="cannot be kept whole"):
                                kept_ranges(n, limit, how, head, (start, stop))
                        else:
                            assert kept(n, limit, how, head, (start, stop)) == want


@pytest.mark.parametrize("protect", [(-1, 3), (3, 3), (4, 2)])
def test_what_is_no_span_is_refused(protect):
    with pytest.raises(
        PromptError, match=rf"protect is {protect[0]}:{protect[1]}, allowed: start:stop with 0 <= start"
    ):
        kept_ranges(14, 8, "left", None, protect)


@pytest.mark.parametrize("how", ["none", "left", "middle"])
@pytest.mark.parametrize("n", [8, 14])
def test_a_span_beyond_the_prompt_is_refused_whether_anything_is_cut_or_not(how, n):
    with pytest.raises(PromptError, match=f"protect is 7:{n + 1}, the prompt has {n} tokens"):
        kept_ranges(n, 8, how, None, (7, n + 1))


@pytest.mark.parametrize("how", ["none", "left", "middle"])
def test_where_nothing_is_cut_a_span_of_the_prompt_is_kept(how):
    assert kept_ranges(8, 8, how, None, (5, 8)) == [(0, 8)]


@pytest.mark.parametrize(
    "protect", [(1,), (1, 2, 3), (), "1:5", "15", b"15", 7, (None, 3), (0.5, 3), ("1", 3), (False, 3), (0, 3.0)]
)
@pytest.mark.parametrize("n", [8, 14])
def test_what_are_no_two_whole_numbers_is_no_span(protect, n):
    with pytest.raises(PromptError) as caught:
        kept_ranges(n, 8, "left", None, protect)
    assert str(caught.value) == f"protect is {protect!r}, allowed: two whole numbers, start and stop"


@pytest.mark.parametrize("keep_head", [2.5, "3", True, (3,), np.float64(3.0)])
@pytest.mark.parametrize("n", [8, 14])
def test_a_head_is_a_whole_number(keep_head, n):
    with pytest.raises(PromptError) as caught:
        kept_ranges(n, 8, "middle", keep_head)
    assert str(caught.value) == f"keep_head is {keep_head!r}, allowed: a whole number"


def test_integers_and_arrays_of_numpy_serve_as_well():
    assert kept_ranges(14, 8, "middle", np.int64(5), np.array([1, 3])) == [(0, 5), (11, 14)]
    assert kept_ranges(14, 8, "middle", None, [1, np.int32(5)]) == [(0, 5), (11, 14)]


def test_a_long_value_of_several_lines_becomes_a_short_line():
    with pytest.raises(PromptError) as caught:
        kept_ranges(14, 8, "left", None, np.zeros((9, 9)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 130
