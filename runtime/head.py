"""The head, for graphs that give hidden states: what a session asks of it, and the one on the host.

On the host: logits = softcap((h @ table.T + bias) scale). `graph_head.py` has the one in a graph. Knows no graph and no
session. H hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollkv.runtime.embedding import EmbeddingTable
from rollkv.runtime.manifest import Manifest

_BLOCK = 1 << 18  # numbers of the table that are widened at a time: 1 MiB of float32


class OuterHead(Protocol):
    """Makes logits of hidden states."""

    def scratch(self) -> Any:
        """Memory for `logits`, for one thread at a time."""
        ...

    def logits(self, hidden: NDArray[Any], out: NDArray[np.float32], scratch: Any) -> None:
        """Write the logits (V,) of one hidden row (H,), of any floating type, to `out`."""
        ...


class HostHead:
    """The head of a bundle: its table stays mapped as it is stored, and is widened block by block, in float32."""

    def __init__(self, folder: Path, m: Manifest) -> None:
        """Raises BundleError when a file is missing or cannot be mapped."""
        assert m.head_table is not None
        self._table = EmbeddingTable(folder / m.head_table.file, m.head_table)
        self._bias: NDArray[np.float32] | None = None
        if m.head_bias is not None:
            self._bias = EmbeddingTable(folder / m.head_bias.file, m.head_bias).rows([0])[0]  # (V,)
        self._scale = np.float32(m.logit_scale)
        self._softcap = None if m.logit_softcap is None else np.float32(m.logit_softcap)
        self.vocab, self.hidden = m.head_table.shape
        self._step = max(1, _BLOCK // self.hidden)

    def scratch(self) -> NDArray[np.float32]:
        """Memory for `logits`, for one thread at a time."""
        return np.empty((min(self._step, self.vocab), self.hidden), np.float32)

    def logits(self, hidden: NDArray[Any], out: NDArray[np.float32], scratch: NDArray[np.float32]) -> None:
        """Write the logits (V,) of one hidden row (H,), of any floating type, to `out`."""
        row = hidden.astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at what is not finite
            for start in range(0, self.vocab, self._step):
                stop = min(start + self._step, self.vocab)
                np.matmul(self._table.block(start, stop, scratch), row, out=out[start:stop])
            if self._bias is not None:
                out += self._bias
            if self._scale != 1:
                out *= self._scale
            if self._softcap is not None:
                out /= self._softcap
                np.tanh(out, out=out)
                out *= self._softcap
