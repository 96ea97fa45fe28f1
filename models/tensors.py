"""A tensor that lies in a checkpoint file: its shape, and its values in slices.

Knows no file format; `checkpoint.py` and `gguf_file.py` implement it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class StoredTensor(Protocol):
    """A tensor of a checkpoint, as the Hugging Face convention shapes it: a weight is (out, in).

    Nothing is read before `read` is called, and `read` holds no more memory than the slice that it returns.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start .. stop - 1 along the first axis, as float32."""
        ...
