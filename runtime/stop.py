"""Where an answer ends because of its text: stop strings, also those that are spread over several pieces.

Knows neither tokens nor the model: pieces of text go in, the text that is certain to belong to the answer comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollkv.runtime.template import TextError, check_text


def check_stop(stop: Any) -> tuple[str, ...]:
    """Stop strings, checked. Raises `TextError` for what is no sequence of strings, and for an empty string."""
    if isinstance(stop, str | bytes) or not isinstance(stop, Sequence) or not all(isinstance(s, str) for s in stop):
        raise TextError(f"stop is {stop!r}; allowed: a sequence of strings")
    for text in stop:
        if not text:
            raise TextError("a stop string is empty; allowed: at least one character")
        check_text(text, "a stop string")
    return tuple(stop)


class StopText:
    """Finds the first occurrence of any stop string in text that comes piece by piece.

    The first is the one that begins first, and of several that begin there the shortest; how the text is cut into
    pieces makes no difference. So the end of the text waits here while it may be the beginning of a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.found: str | None = None  # the stop string that ended the text
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""  # shorter than the longest stop string

    def push(self, piece: str) -> str:
        """The text that this piece makes certain. When `found` is set it is the last: nothing follows."""
        return self._take(piece, last=False)

    def flush(self) -> str:
        """What was held back, up to a stop string in it: no piece follows."""
        return self._take("", last=True)

    def _take(self, piece: str, last: bool) -> str:
        text = self._held + piece
        matches = [(at, len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        open_at = len(text) if last else self._open(text)
        if matches and min(matches)[0] <= open_at:
            open_at, _, self.found = min(matches)
            self._held = ""
        else:
            self._held = text[open_at:]
        return text[:open_at]

    def _open(self, text: str) -> int:
        """Where the first stop string begins that the text ends within; its length where there is none."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[at:]
            if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stop):
                return at
        return len(text)
