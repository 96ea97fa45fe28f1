"""A decoder's graph as ONNX without a single weight: each part is traced once, and the layers are strung together.

torch traces on the meta device, which has shapes and no memory. In the graph that comes out every parameter of the
decoder is an input under the parameter's own name; `write.py` binds the values later. The torch exporter's optimiser
stays off: it miscompiles grouped attention (see docs/export.md).

Knows no checkpoint and no file.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx
import torch
from onnx import TensorProto, helper

from rollkv.export.signature import ExportOptions, graph_inputs, graph_outputs
from rollkv.models.config import DecoderConfig
from rollkv.models.decoder import Decoder
from rollkv.runtime.bundle import ValueInfo

TRACED_OPSET = 18  # the lowest that torch's exporter writes; passes.lower_opset brings it to the one asked for
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


@dataclass(frozen=True)
class Part:
    """One traced module: its nodes, the names of its inputs and outputs, and of its parameters."""

    graph: onnx.GraphProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]


def trace_graph(config: DecoderConfig, options: ExportOptions, rows: int) -> onnx.ModelProto:
    """The graph of `rows` rows, at TRACED_OPSET, with the parameters as inputs after those of the signature."""
    with torch.device("meta"):
        decoder = Decoder(config, kv_layout=options.kv_layout, head=options.head).eval()
    inputs, outputs = graph_inputs(config, options, rows), graph_outputs(config, options, rows)
    by_name = {value.name: _meta(value) for value in inputs}
    hidden = torch.empty(1, rows, config.hidden_size, device="meta")
    # torch.export takes one tensor passed twice for one input: cos and sin must be two.
    cos, sin = (torch.empty(1, rows, 1, config.rope.rotary_dim, device="meta") for _ in range(2))

    graph = _Stitcher(decoder)
    embedding = _trace(decoder.embedding, {"input_ids": by_name["input_ids"]}, ("hidden",))
    hidden_name = graph.add(embedding, "embedding", {"input_ids": "input_ids"}, {})["hidden"]
    rope = _trace(decoder.rope, {"position_ids": by_name["position_ids"]}, ("rope_cos", "rope_sin"))
    rotation = graph.add(rope, "rope", {"position_ids": "position_ids"}, {})
    layers: dict[str, Part] = {}  # a layer differs from another in the mask it reads, and so in its slots
    for i, window in enumerate(config.windows):
        mask = "attention_mask" if window is None else "sliding_attention_mask"
        if mask not in layers:
            feeds = {
                "hidden": hidden,
                "cos": cos,
                "sin": sin,
                "mask": by_name[mask],
                "past_key": by_name[f"past_key_{i}"],
                "past_value": by_name[f"past_value_{i}"],
            }
            layers[mask] = _trace(decoder.layers[i], feeds, ("hidden_out", "new_key", "new_value"))
        bound = {"hidden": hidden_name, "cos": rotation["rope_cos"], "sin": rotation["rope_sin"], "mask": mask}
        bound |= {f"past_{part}": f"past_{part}_{i}" for part in ("key", "value")}
        fixed = {f"new_{part}": f"new_{part}_{i}" for part in ("key", "value")}
        hidden_name = graph.add(layers[mask], f"layers.{i}", bound, fixed)["hidden_out"]
    graph.add(
        _trace(decoder.head, {"hidden": hidden}, ("logits",)), "head", {"hidden": hidden_name}, {"logits": "logits"}
    )

    parameters = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(parameter.shape))
        for name, parameter in decoder.named_parameters()
    ]
    proto = helper.make_graph(graph.nodes, "rollkv", [*map(_value, inputs), *parameters], [*map(_value, outputs)])
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", TRACED_OPSET)], producer_name="rollkv")


class _Stitcher:
    """Collects the nodes of parts under names of their own."""

    def __init__(self, decoder: Decoder) -> None:
        self.nodes: list[onnx.NodeProto] = []
        # A shared parameter goes by the first of its names: head.weight of a tied head is embedding.weight.
        first: dict[int, str] = {}
        self._names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in decoder.named_parameters(remove_duplicate=False)
        }

    def add(self, part: Part, prefix: str, bound: Mapping[str, str], fixed: Mapping[str, str]) -> dict[str, str]:
        """Append a part's nodes.

        bound: what its inputs are called here. fixed: what some of its outputs must be called; the others get a name
        under `prefix`. Returns the names of all outputs.
        """
        names = dict(bound)
        names |= {name: self._names[f"{prefix}.{name}"] for name in part.parameters}
        names |= {name: fixed.get(name, f"{prefix}/{name}") for name in part.outputs}
        assert set(part.inputs) == set(bound), f"part {prefix} takes {part.inputs}"
        for node in part.graph.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.ClearField("metadata_props")
            copy.doc_string = ""
            copy.name = f"{prefix}/{node.name}"
            for field in (copy.input, copy.output):
                for k, name in enumerate(field):
                    field[k] = name and names.get(name, f"{prefix}/{name}")
            self.nodes.append(copy)
        return {name: names[name] for name in part.outputs}


def _trace(module: torch.nn.Module, feeds: Mapping[str, torch.Tensor], outputs: tuple[str, ...]) -> Part:
    """One module as ONNX nodes, its parameters left as names."""
    import onnx_ir

    with _quiet():
        program = torch.export.export(module, tuple(feeds.values()), strict=False)
        traced = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=TRACED_OPSET,
            input_names=list(feeds),
            output_names=list(outputs),
        )
    assert traced is not None
    model = traced.model
    assert [value.name for value in model.graph.inputs] == list(feeds), "an input was merged or renamed"
    parameters = tuple(name for name, _ in module.named_parameters())
    for name in parameters:
        value = model.graph.initializers.pop(name)
        value.const_value = None  # a tensor without memory
        model.graph.inputs.append(value)
    assert not model.graph.initializers, f"unexpected constants: {list(model.graph.initializers)}"
    graph = onnx_ir.to_proto(model).graph
    return Part(graph, tuple(feeds), outputs, parameters)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks (torchvision is not installed, the optimiser is off) from the user's terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _meta(value: ValueInfo) -> torch.Tensor:
    return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")


def _value(value: ValueInfo) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, ONNX_TYPES[value.dtype], value.shape)
