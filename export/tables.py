"""Tables that stay on the host, of embeddings and of the head: in the storage type of the checkpoint, row after row.

Knows no graph. `runtime/embedding.py` and `runtime/head.py` read them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollkv.export.signature import ExportOptions
from rollkv.models.checkpoint import Checkpoint, Weight
from rollkv.models.config import CheckpointError
from rollkv.models.joined import joined_weights
from rollkv.models.names import PER_LAYER_TABLE
from rollkv.models.tensors import Parameter, storage_type
from rollkv.runtime.bundle import TABLE_BYTES, TableInfo

EMBEDDING, HEAD, HEAD_BIAS = "embedding.weight", "head.weight", "head.bias"  # by their names in the decoder


@dataclass(frozen=True)
class Table:
    """A table and what the manifest says of it."""

    weight: Weight
    info: TableInfo


def host_tables(checkpoint: Checkpoint, options: ExportOptions) -> dict[str, Table]:
    """The tables of a bundle, by their field in the manifest.

    The embedding when the graphs take its rows; that of per-layer embeddings whenever the model has them; the head's
    when the graphs give hidden states. A tied head shares the file of the embedding where there is one.
    """
    config, tables = checkpoint.config, {}
    for weight in checkpoint.weights:
        if weight.name == EMBEDDING and options.input == "embeds":
            tables["embedding"] = _table(weight, "embedding.bin", config.embedding_scale)
        if weight.name == PER_LAYER_TABLE:
            assert config.gemma4 is not None
            tables["per_layer_embedding"] = _table(weight, "per_layer_embedding.bin", config.gemma4.per_layer_scale)
        if weight.name == (EMBEDDING if config.tied_head else HEAD) and options.head == "none":
            rows = replace(weight, transposed=False)  # (V, H), as the checkpoint has them
            file = "embedding.bin" if config.tied_head and options.input == "embeds" else "head.bin"
            tables["head_table"] = _table(rows, file, 1.0)
        if weight.name == HEAD_BIAS and options.head == "none":
            info = TableInfo(
                file="head_bias.bin", shape=[1, *weight.shape], dtype=storage_type(weight.stored), scale=1.0
            )
            tables["head_bias"] = Table(weight, info)
    return tables


def table_files(tables: Mapping[str, Table]) -> dict[str, Table]:
    """The files that hold `host_tables`, each once, by their names."""
    return {table.info.file: table for table in tables.values()}


def table_bytes(tables: Mapping[str, Table]) -> int:
    """Bytes of these files."""
    infos = [table.info for table in table_files(tables).values()]
    return sum(math.prod(info.shape) * TABLE_BYTES[info.dtype] for info in infos)


def graph_weights(checkpoint: Checkpoint, options: ExportOptions) -> list[Parameter]:
    """The weights that the graphs read, in the form that they have there.

    What the host has stays outside, unless the graphs need it as well.
    """
    outside = {PER_LAYER_TABLE}
    if options.head == "none":
        outside |= {HEAD, HEAD_BIAS}
    if options.input == "embeds" and (options.head == "none" or not checkpoint.config.tied_head):
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
