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
from typing import TYPE_CHECKING, Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from rollkv.export.signature import ExportOptions, graph_inputs, graph_outputs
from rollkv.models.config import DecoderConfig
from rollkv.models.decoder import Decoder
from rollkv.runtime.bundle import ValueInfo

if TYPE_CHECKING:
    import onnx_ir

TRACED_OPSET = 18  # the lowest that torch's exporter writes; passes.lower_opset brings it to the one asked for
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


class TraceError(RuntimeError):
    """torch's exporter failed, or gave a graph with other inputs, outputs or constants than asked for."""

    exit_code = 1


@dataclass(frozen=True)
class Part:
    """The nodes between a module's inputs and its outputs, under the names that they have in the kit's graph."""

    module: str  # its name in the kit, to which its parameters' names are relative
    nodes: tuple[onnx.NodeProto, ...]
    outputs: tuple[str, ...]


class Kit(torch.nn.Module):
    """One of each kind of part, side by side and not connected, so that one pass of the exporter traces them all."""

    def __init__(self, decoder: Decoder, kinds: Mapping[str, int]) -> None:
        """kinds: mask input -> index of the first layer that reads it; layers differ in nothing else."""
        super().__init__()
        self.embedding, self.rope, self.head = decoder.embedding, decoder.rope, decoder.head
        self.kinds = torch.nn.ModuleList(decoder.layers[i] for i in kinds.values())

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, *layers: Tensor
    ) -> Any:
        """layers: mask, past key and past value for each kind."""
        outputs = [self.embedding(input_ids), *self.rope(position_ids)]
        for k, layer in enumerate(self.kinds):
            outputs += layer(hidden, cos, sin, *layers[3 * k : 3 * k + 3])
        return (*outputs, self.head(hidden))


def trace_graph(config: DecoderConfig, options: ExportOptions, rows: int) -> onnx.ModelProto:
    """The graph of `rows` rows, at TRACED_OPSET, with the parameters as inputs after those of the signature."""
    with torch.device("meta"):
        decoder = Decoder(config, kv_layout=options.kv_layout, head=options.head).eval()
    inputs, outputs = graph_inputs(config, options, rows), graph_outputs(config, options, rows)
    masks = ["attention_mask" if window is None else "sliding_attention_mask" for window in config.windows]
    kinds = {mask: masks.index(mask) for mask in masks}
    parts = _trace_parts(decoder, kinds, {value.name: value for value in inputs}, rows)

    graph = _Stitcher(decoder)
    hidden = graph.add(parts["embedding"], "embedding", {"input_ids": "input_ids"}, {})["hidden_in"]
    rotation = graph.add(parts["rope"], "rope", {"position_ids": "position_ids"}, {})
    for i, mask in enumerate(masks):
        bound = {"hidden": hidden, "cos": rotation["rope_cos"], "sin": rotation["rope_sin"], mask: mask}
        bound |= {f"{mask}.past_{part}": f"past_{part}_{i}" for part in ("key", "value")}
        fixed = {f"{mask}.new_{part}": f"new_{part}_{i}" for part in ("key", "value")}
        hidden = graph.add(parts[mask], f"layers.{i}", bound, fixed)[f"{mask}.hidden"]
    graph.add(parts["head"], "head", {"hidden": hidden}, {"logits": "logits"})

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
        self._parameters = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in decoder.named_parameters(remove_duplicate=False)
        }

    def add(self, part: Part, place: str, bound: Mapping[str, str], fixed: Mapping[str, str]) -> dict[str, str]:
        """Append a part's nodes as the module `place` of the decoder.

        bound: what its inputs are called here. fixed: what some of its outputs must be called; the others get a name
        under `place`. Returns the names of all outputs.
        """
        names = {name: fixed.get(name, f"{place}/{name}") for name in part.outputs} | dict(bound)

        def rename(name: str) -> str:
            if name in names or not name:
                return names.get(name, name)
            parameter = place + name.removeprefix(part.module) if name.startswith(f"{part.module}.") else name
            return self._parameters.get(parameter, f"{place}/{name}")

        for node in part.nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.ClearField("metadata_props")
            copy.doc_string = ""
            copy.name = f"{place}/{node.name}"
            for field in (copy.input, copy.output):
                for k, name in enumerate(field):
                    field[k] = rename(name)
            self.nodes.append(copy)
        return {name: names[name] for name in part.outputs}


def _trace_parts(
    decoder: Decoder, kinds: Mapping[str, int], inputs: Mapping[str, ValueInfo], rows: int
) -> dict[str, Part]:
    """Every kind of part by name; a layer's name is that of the mask it reads."""
    config = decoder.config
    feeds = {name: _meta(inputs[name]) for name in ("input_ids", "position_ids")}
    feeds["hidden"] = torch.empty(1, rows, config.hidden_size, device="meta")
    for name in ("cos", "sin"):  # two tensors: torch.export takes one that is passed twice for one input
        feeds[name] = torch.empty(1, rows, 1, config.rope.rotary_dim, device="meta")
    outputs = {"embedding": ("hidden_in",), "rope": ("rope_cos", "rope_sin")}
    for mask, i in kinds.items():
        feeds[mask] = _meta(inputs[mask])
        feeds |= {f"{mask}.past_{part}": _meta(inputs[f"past_{part}_{i}"]) for part in ("key", "value")}
        outputs[mask] = (f"{mask}.hidden", f"{mask}.new_key", f"{mask}.new_value")
    outputs["head"] = ("logits",)
    names = [name for part in outputs.values() for name in part]
    graph = _export(Kit(decoder, kinds).eval(), feeds, names)
    modules = {mask: f"kinds.{k}" for k, mask in enumerate(kinds)}
    return {name: Part(modules.get(name, name), _nodes_behind(graph, made), made) for name, made in outputs.items()}


def _export(module: torch.nn.Module, feeds: Mapping[str, Tensor], outputs: list[str]) -> onnx.GraphProto:
    """A module as ONNX nodes, its parameters left as names."""
    import onnx_ir

    try:
        with _quiet():
            program = torch.export.export(module, tuple(feeds.values()), strict=False)
            traced = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=TRACED_OPSET,
                input_names=list(feeds),
                output_names=outputs,
            )
    except ModuleNotFoundError:
        raise  # an extra that is not installed
    except Exception as error:  # torch raises many kinds
        raise TraceError(
            f"torch {torch.__version__} cannot export the decoder: {type(error).__name__}: {error}"
        ) from error
    assert traced is not None
    graph = traced.model.graph
    check_trace(graph, list(feeds), outputs, [name for name, _ in module.named_parameters(remove_duplicate=False)])
    graph.initializers.clear()  # parameters of the meta device: names and shapes, no values
    return onnx_ir.to_proto(traced.model).graph


def check_trace(graph: onnx_ir.Graph, inputs: list[str], outputs: list[str], parameters: list[str]) -> None:
    """Raise TraceError when torch merged or renamed an input or output, or put a constant of its own into the graph."""
    for what, asked, values in (("inputs", inputs, graph.inputs), ("outputs", outputs, graph.outputs)):
        got = [value.name for value in values]
        if got != asked:
            raise TraceError(f"torch's exporter gave the {what} {got}, asked for {asked}")
    unknown = sorted(set(graph.initializers) - set(parameters))
    if unknown:
        raise TraceError(f"torch's exporter put constants into the graph: {', '.join(unknown)}")


def _nodes_behind(graph: onnx.GraphProto, outputs: tuple[str, ...]) -> tuple[onnx.NodeProto, ...]:
    """The nodes that the outputs depend on, in order."""
    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            nodes.append(node)
    return tuple(nodes[::-1])


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


def _meta(value: ValueInfo) -> Tensor:
    return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")


def _value(value: ValueInfo) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, ONNX_TYPES[value.dtype], value.shape)
