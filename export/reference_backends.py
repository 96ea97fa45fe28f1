"""What the lower rungs of the ladder run in place of a bundle's graphs.

Behind the runtime's protocol: this project's decoder in torch, and its graphs before the passes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import torch

from rollkv.export.signature import ExportOptions
from rollkv.export.trace import make_decoder
from rollkv.models.checkpoint import Checkpoint, load_decoder
from rollkv.runtime.backend import Array, import_onnxruntime
from rollkv.runtime.bundle import GraphInfo


class TorchBackend:
    """The torch decoder with the checkpoint's weights, behind the runtime's protocol."""

    def __init__(self, checkpoint: Checkpoint, options: ExportOptions) -> None:
        self._decoder = make_decoder(checkpoint.config, options, options.chunk_size).eval()
        load_decoder(self._decoder, checkpoint, options.max_kvcache_len)

    @torch.no_grad()
    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run."""
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
        if graph.role == "head":
            return {graph.outputs[0].name: self._decoder.head.logits(tensors[graph.inputs[0].name]).numpy()}
        self._decoder.head.rows = graph.head  # its weights are the same for both
        values = self._decoder(tensors)
        return {value.name: values[value.name].numpy() for value in graph.outputs}


class WeightlessBackend:
    """Graphs whose weights are inputs, as they were traced, in ONNX Runtime without its optimisations."""

    def __init__(self, graphs: Mapping[str, onnx.ModelProto], weights: Mapping[str, Array], threads: int) -> None:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._sessions = {
            file: onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            for file, model in graphs.items()
        }
        self._weights = weights

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run."""
        session = self._sessions[graph.file]
        taken = {value.name for value in session.get_inputs()}
        weights = {name: array for name, array in self._weights.items() if name in taken}
        names = [value.name for value in graph.outputs]
        return dict(zip(names, session.run(names, {**weights, **feeds}), strict=True))
