from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from rollkv.runtime.stop import StopText, check_stop
from rollkv.runtime.template import TextError


def first(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and which that is, looking at the whole text."""
    for at in range(len(text)):
        found = [s for s in stop if text.startswith(s, at)]
        if found:
            return text[:at], min(found, key=len)
    return text, None


def streamed(pieces: Sequence[str], stop: Sequence[str]) -> tuple[list[str], str | None]:
    scan = StopText(stop)
    given = []
    for piece in pieces:
        given.append(scan.push(piece))
        if scan.found is not None:
            return given, scan.found
    return [*given, scan.flush()], scan.found


def test_random_texts_in_random_pieces_end_where_the_whole_text_would() -> None:
    rng = random.Random(0)
    stopped = 0
    for _ in range(4000):
        text = "".join(rng.choices("abc🙂", k=rng.randrange(14)))
        stop = ["".join(rng.choices("abc🙂", k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        pieces, at = [], 0
        while at < len(text):
            size = rng.randrange(4)
            pieces.append(text[at : at + size])
            at += size
        given, found = streamed(pieces, stop)
        assert ("".join(given), found) == first(text, stop)
        stopped += found is not None
    assert 1000 < stopped < 3500


def test_only_what_may_begin_a_stop_string_waits() -> None:
    assert streamed(["one ", "EN", "E", "N", "D two"], ["END"]) == (["one ", "", "EN", "", ""], "END")
    assert streamed(["one E", "N"], ["END"]) == (["one ", "", "EN"], None)
    assert streamed(["one E", "N "], ["END"]) == (["one ", "EN ", ""], None)


def test_a_stop_string_within_one_that_may_yet_begin_earlier_waits_for_it() -> None:
    assert streamed(["ab", "c"], ["b", "abc"]) == (["", ""], "abc")
    assert streamed(["ab", "d"], ["b", "abc"]) == (["", "a"], "b")
    assert streamed(["ab"], ["b", "abc"]) == (["", "a"], "b")


def test_without_stop_strings_nothing_waits() -> None:
    assert streamed(["a", "", "bc"], []) == (["a", "", "bc", ""], None)


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("abc", "stop is 'abc'; allowed: a sequence of strings"),
        (b"abc", "stop is b'abc'; allowed: a sequence of strings"),
        (7, "stop is 7; allowed: a sequence of strings"),
        (["a", 7], r"stop is \['a', 7\]; allowed: a sequence of strings"),
        (["a", ""], "a stop string is empty; allowed: at least one character"),
        (["a\udcff"], "a stop string holds byte 0xff at position 1; allowed: valid UTF-8"),
    ],
)
def test_what_are_no_stop_strings_is_refused(stop: Any, said: str) -> None:
    with pytest.raises(TextError, match=said):
        check_stop(stop)
