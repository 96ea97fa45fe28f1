"""The head as a graph of its own, for graphs that give hidden states: run by the engine that runs those.

Knows no session. H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.backend import Array, Binding
from rollkv.runtime.manifest import GraphInfo

Bind = Callable[[GraphInfo, Mapping[str, Array]], Binding]


@dataclass(frozen=True)
class BoundHead:
    """The graph with the arrays of one caller."""

    hidden: Array  # (1, 1, H)
    logits: Array  # (1, 1, V)
    binding: Binding


class GraphHead:
    """The head of a bundle that has a graph of the role head."""

    def __init__(self, graph: GraphInfo, bind: Bind) -> None:
        """bind: a graph with arrays of a caller, see `LoadedBundle.bind`."""
        self._graph, self._bind = graph, bind

    def scratch(self) -> BoundHead:
        """See OuterHead. The engine loads the graph, if it has not yet. Raises what the engine raises."""
        (taken,), (given,) = self._graph.inputs, self._graph.outputs
        hidden, logits = (np.zeros(value.shape, value.dtype) for value in (taken, given))
        return BoundHead(hidden, logits, self._bind(self._graph, {taken.name: hidden, given.name: logits}))

    def logits(self, hidden: NDArray[Any], out: NDArray[np.float32], scratch: BoundHead) -> None:
        """See OuterHead. Raises what the engine raises."""
        scratch.hidden[0, 0] = hidden
        scratch.binding.run()
        out[...] = scratch.logits[0, 0]
