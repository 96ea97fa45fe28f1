"""Embedding tables that stay on the host: written in the storage type of the checkpoint, row after row.

Knows no graph. `runtime/embedding.py` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollkv.export.signature import ExportOptions
from rollkv.models.checkpoint import Checkpoint, Weight
from rollkv.models.config import CheckpointError
from rollkv.models.joined import joined_weights
from rollkv.models.names import PER_LAYER_TABLE
from rollkv.models.tensors import Parameter, storage_type
from rollkv.runtime.bundle import TableInfo

EMBEDDING = "embedding.weight"  # by its name in the decoder


@dataclass(frozen=True)
class Table:
    """A table and what the manifest says of it."""

    weight: Weight
    info: TableInfo


def host_tables(checkpoint: Checkpoint, options: ExportOptions) -> dict[str, Table]:
    """The tables of a bundle, by their field in the manifest.

    The embedding when the graphs take its rows; that of per-layer embeddings whenever the model has them.
    """
    config, tables = checkpoint.config, {}
    for weight in checkpoint.weights:
        if weight.name == EMBEDDING and options.input == "embeds":
            tables["embedding"] = _table(weight, "embedding.bin", config.embedding_scale)
        if weight.name == PER_LAYER_TABLE:
            assert config.gemma4 is not None
            tables["per_layer_embedding"] = _table(weight, "per_layer_embedding.bin", config.gemma4.per_layer_scale)
    return tables


def graph_weights(checkpoint: Checkpoint, options: ExportOptions) -> list[Parameter]:
    """The weights that the graphs read, in the form that they have there.

    A table that the host looks up stays outside, unless a tied head shares it.
    """
    outside = {PER_LAYER_TABLE}
    if options.input == "embeds" and not checkpoint.config.tied_head:
        outside.add(EMBEDDING)
    weights: Sequence[Parameter] = checkpoint.weights
    if options.projections == "joined":
        weights = joined_weights(checkpoint.config, weights)
    return [weight for weight in weights if weight.name not in outside]


def write_table(path: Path, table: Table, progress: Callable[[int], None]) -> None:
    """Write a table, block by block. progress: is told of the bytes done.

    Raises CheckpointError when a value is not finite; OSError when the disk is full.
    """
    with path.open("xb") as file:
        for _, block in table.weight.blocks():
            if not np.isfinite(block).all():
                raise CheckpointError(f"{table.weight.origin} is not finite; the file is damaged")
            data = pack(block, table.info.dtype)
            file.write(data)
            progress(len(data))
        file.flush()
        os.fsync(file.fileno())


def table_fault(path: Path, table: Table) -> str | None:
    """Where a written table differs from the checkpoint, to the last bit; None when it does not."""
    with path.open("rb") as file:
        for _, block in table.weight.blocks():
            data = pack(block, table.info.dtype)
            if file.read(len(data)) != data:
                return f"{path.name}: differs from the checkpoint"
        return f"{path.name}: longer than the table" if file.read(1) else None


def pack(block: NDArray[np.float32], dtype: str) -> bytes:
    """Values in the type that they were read from, so that nothing is rounded."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.ascontiguousarray(block).view(np.uint32) >> 16).astype("<u2").tobytes()
    return block.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes()


def _table(weight: Weight, file: str, scale: float) -> Table:
    info = TableInfo(file=file, shape=list(weight.shape), dtype=storage_type(weight.stored), scale=scale)
    return Table(weight, info)
