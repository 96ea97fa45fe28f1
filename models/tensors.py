"""A tensor that lies in a checkpoint file, a parameter of the decoder that is made of some; and what is no such file.

Knows no file format; `checkpoint.py` and `gguf_file.py` implement it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollkv.models.config import CheckpointError


class StoredTensor(Protocol):
    """A tensor of a checkpoint, as the Hugging Face convention shapes it: a weight is (out, in).

    Nothing is read before `read` is called, and `read` needs memory for about the slice that it returns.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start .. stop - 1 along the first axis, as float32."""
        ...


class Parameter(Protocol):
    """One parameter of the decoder, and where its values come from."""

    @property
    def name(self) -> str:
        """Its name in decoder.Decoder."""
        ...

    @property
    def origin(self) -> str:
        """File or folder, and the names there, for messages."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the decoder."""
        ...

    def blocks(self) -> Iterator[tuple[tuple[slice, ...], NDArray[np.float32]]]:
        """The values, a block at a time, each with the place in an array of `shape` where it belongs."""
        ...

    def copy_to(self, target: NDArray[np.float32]) -> None:
        """Fill target, of this shape, block by block."""
        ...


def storage_type(tensor: StoredTensor) -> str:
    """The smallest type that holds every value of a tensor: "float16", "bfloat16" or "float32".

    It is what the file has, if the tensor says so; a computed or a quantised one is float32.
    """
    kind: str = getattr(tensor, "storage", "float32")
    return kind


def refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointError when the file is a Git LFS pointer in place of the weights."""
    with path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
