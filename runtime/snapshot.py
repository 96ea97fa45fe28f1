"""What a session knows after some tokens, as a value.

Knows no graph, no session and no file: a session makes a `Snapshot` of its cache, and takes one over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

_TOKEN_BYTES = 40  # of an id in a tuple: a pointer and a Python integer


@dataclass(frozen=True, eq=False)
class CachePart:
    """Cached tensors of one shape: what `tensors` keys or values hold of the last `count` tokens, oldest first.

    A tensor's slots lie along the third axis, its numbers of one slot are spread over `blocks` runs of `unit`.
    """

    first: int  # position of the oldest token that it holds
    window: int | None  # W of its layers; None: they see every token
    data: NDArray[Any]  # (tensors, blocks, count, unit), float32 or float16


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A session after `tokens`. It owns its arrays: nobody writes into them."""

    bundle: str  # sha256 (hex) of the manifest's JSON
    tokens: tuple[int, ...]  # ids; -1: came as an embedding
    known: int  # leading tokens that came by id alone: only these can be matched by id
    offsets: tuple[tuple[int, int], ...]  # (token count, rotary position - token count) wherever that changes
    parts: tuple[CachePart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes: the data's, and about those of the tokens."""
        return sum(part.data.nbytes for part in self.parts) + _TOKEN_BYTES * len(self.tokens)

    def usable(self, position: int) -> bool:
        """Whether a session that takes it over can be rewound to `position` tokens.

        The next query, at `position`, sees every token in a layer without a window, and in one with a window W the
        W - 1 tokens before it: all of them must be there.
        """
        if not 0 < position <= len(self.tokens):
            return False
        return all(
            part.first <= (0 if part.window is None else max(0, position - (part.window - 1))) for part in self.parts
        )
