"""The files of a bundle, against what its checkpoint and its own options say they must be.

The manifest field by field, the audit of the graph files, every tensor of the weight file to the last bit: what no
comparison of logits would reach, such as a position table beyond the longest prompt. Runs no graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

from rollkv.export.audit import audit_graph
from rollkv.export.names import parameter_name
from rollkv.export.pipeline import describe
from rollkv.export.signature import options_of
from rollkv.export.tables import graph_weights, host_tables, table_fault, table_files
from rollkv.export.write import Placed, map_tensor
from rollkv.models.checkpoint import Checkpoint
from rollkv.models.decoder import position_tables
from rollkv.runtime.backend import Array
from rollkv.runtime.bundle import Bundle

# The reference may be called otherwise than at export (its hash is compared), the version may be another, and files
# are compared with their hashes.
NOT_COMPARED = ("rollkv", "source", "files")


def manifest_fault(bundle: Bundle, checkpoint: Checkpoint) -> str | None:
    """The first field of the manifest that an export of this checkpoint with these options would not have written."""
    says = dataclasses.asdict(bundle.manifest)
    wanted = dataclasses.asdict(describe(checkpoint, options_of(bundle.manifest), bundle.manifest.source.sha256))
    for name in NOT_COMPARED:
        del says[name], wanted[name]
    difference = next(_differences(says, wanted, ""), None)
    return None if difference is None else f"manifest: {difference}"


def graph_fault(bundle: Bundle) -> str | None:
    """The first finding of the audit in a graph file of the bundle."""
    m = bundle.manifest
    for info in m.graphs:
        for finding in audit_graph(onnx.load(bundle.path / info.file, load_external_data=False), info, m.norm):
            return f"{info.file}: {finding}"
    return None


def weight_fault(bundle: Bundle, checkpoint: Checkpoint) -> str | None:
    """The first tensor in the weight file that is missing there, or not what the checkpoint holds.

    In a float16 bundle that is what the checkpoint holds rounded to nearest, ties to even, to the last bit.
    """
    stored = stored_weights(bundle)
    options = options_of(bundle.manifest)
    dtype = np.dtype(options.dtype)
    for name, array in stored.items():
        if array.dtype != dtype:
            return f"weights: {name} is {array.dtype.name}, must be {dtype.name}, the manifest's dtype"
    for weight in graph_weights(checkpoint, options):
        tensor = stored.pop(weight.name, None)
        if tensor is None or tensor.shape != weight.shape:
            return f"weights: {weight.name} is missing, or has another shape than the checkpoint's"
        if not all(np.array_equal(tensor[index], block.astype(dtype)) for index, block in weight.blocks()):
            return f"weights: {weight.name} differs from the checkpoint"
    fed = options.rope == "feed"
    for name, table in ({} if fed else position_tables(checkpoint.config, options.max_kvcache_len)).items():
        if name not in stored or not np.array_equal(stored.pop(name), table.numpy().astype(dtype)):
            return f"weights: {name} is missing, or not the table of the model's positions"
    for hosted in table_files(host_tables(checkpoint, options)).values():
        if fault := table_fault(bundle.path / hosted.info.file, hosted):
            return fault
    return f"weights: {next(iter(stored))} belongs to no part of the decoder" if stored else None


def stored_weights(bundle: Bundle) -> dict[str, Array]:
    """Every tensor that the graphs take from the weight file, mapped, by its name in the decoder."""
    weights: dict[str, Array] = {}
    for info in bundle.manifest.graphs:
        for tensor in onnx.load(bundle.path / info.file, load_external_data=False).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                where = {entry.key: entry.value for entry in tensor.external_data}
                dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).name
                place = Placed(int(where["offset"]), int(where["length"]), tuple(tensor.dims), dtype)
                weights[parameter_name(tensor.name)] = map_tensor(bundle.path / where["location"], place)
    return weights


def _differences(says: Any, wanted: Any, where: str) -> Iterator[str]:
    if isinstance(says, dict) and isinstance(wanted, dict) and says.keys() == wanted.keys():
        for key in says:
            yield from _differences(says[key], wanted[key], f"{where}.{key}" if where else key)
    elif isinstance(says, list) and isinstance(wanted, list) and len(says) == len(wanted):
        for i, (a, b) in enumerate(zip(says, wanted, strict=True)):
            yield from _differences(a, b, f"{where}[{i}]")
    elif says != wanted:
        yield f"{where} is {str(says)[:80]}, must be {str(wanted)[:80]}"
