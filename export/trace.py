"""A decoder's graph as ONNX without a single weight: each kind of part is traced once, and all are strung together.

torch traces on the meta device, which has shapes and no memory. In the graph that comes out every parameter of the
decoder is an input under the parameter's own name; `write.py` binds the values later. The torch exporter's optimiser
stays off: it miscompiles grouped attention (see docs/export.md).

Knows no checkpoint and no file.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from rollkv.export.head_graph import head_values
from rollkv.export.signature import ExportOptions, graph_inputs, graph_outputs
from rollkv.models.attention import CacheForm
from rollkv.models.config import DecoderConfig
from rollkv.models.decoder import Call, Decoder, HeadAlone
from rollkv.runtime.bundle import ValueInfo

if TYPE_CHECKING:
    import onnx_ir

TRACED_OPSET = 18  # the lowest that torch's exporter writes; passes.opset_conversion brings it to the one asked for
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
    inputs: Mapping[str, str]  # argument -> name in the kit's graph
    outputs: tuple[str, ...]


class Kit(torch.nn.Module):
    """Parts side by side and not connected, so that one pass of the exporter traces them all."""

    def __init__(self, parts: Sequence[tuple[torch.nn.Module, Call]]) -> None:
        """parts: a module of each kind, and the first call of that kind."""
        super().__init__()
        self.parts = torch.nn.ModuleList(module for module, _ in parts)
        self._arguments = [tuple(call.inputs) for _, call in parts]

    def forward(self, *tensors: Tensor) -> Any:
        """tensors: the arguments of each part, one part after the other."""
        rest, outputs = list(tensors), []  # type: list[Tensor], list[Tensor]
        for part, names in zip(self.parts, self._arguments, strict=True):
            made = part(**dict(zip(names, rest, strict=False)))
            del rest[: len(names)]
            outputs += made if isinstance(made, tuple) else (made,)
        return tuple(outputs)


def trace_graphs(
    config: DecoderConfig, options: ExportOptions, rows: Sequence[int], kv_lens: Sequence[int] | None = None
) -> list[onnx.ModelProto]:
    """A graph for each number of rows, at TRACED_OPSET, with the parameters as inputs after those of the signature.

    It is a float32 graph with plain norms, whatever the options say: other forms of both are passes. kv_lens: the
    visible length of each, by default C. With `--head split` the graph of the head is one more, the last. One pass of
    the exporter traces the parts of all graphs: a third of its time is setting up.
    """
    with _uncollected():
        return _trace_graphs(config, replace(options, dtype="float32"), rows, kv_lens)


def _trace_graphs(
    config: DecoderConfig, options: ExportOptions, rows: Sequence[int], kv_lens: Sequence[int] | None
) -> list[onnx.ModelProto]:
    with torch.device("meta"):
        decoders: list[Decoder | HeadAlone] = [make_decoder(config, options, count).eval() for count in rows]
        if options.head == "split":
            decoders.append(HeadAlone(config).eval())
    lengths = [options.max_kvcache_len] * len(rows) if kv_lens is None else kv_lens
    signatures = [
        (graph_inputs(config, options, count, kv_len), graph_outputs(config, options, count))
        for count, kv_len in zip(rows, lengths, strict=True)
    ]
    if options.head == "split":
        signatures.append(head_values(config, options))
    with torch.no_grad():
        values = [
            _shapes(decoder, {value.name: _meta(value) for value in inputs})
            for decoder, (inputs, _) in zip(decoders, signatures, strict=True)
        ]
    parts = _trace_parts(decoders, values)
    return [_string(*each) for each in zip(decoders, parts, signatures, strict=True)]


def _shapes(decoder: Decoder | HeadAlone, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`Decoder.forward` on the meta device, where one part of each kind has to run."""
    values, made = dict(feeds), {}  # type: dict[str, Tensor], dict[str, tuple[Tensor, ...]]
    for call in decoder.calls():
        if call.kind not in made:
            outputs = decoder.get_submodule(call.module)(**{arg: values[name] for arg, name in call.inputs.items()})
            made[call.kind] = outputs if isinstance(outputs, tuple) else (outputs,)
        values.update(zip(call.outputs, made[call.kind], strict=True))
    return values


def _string(
    decoder: Decoder | HeadAlone, parts: Mapping[str, Part], signature: tuple[list[ValueInfo], list[ValueInfo]]
) -> onnx.ModelProto:
    """The whole graph of a decoder out of its parts."""
    graph = _Stitcher(decoder)
    for call in decoder.calls():
        graph.add(parts[call.kind], call)
    read = {name for node in graph.nodes for name in node.input}
    parameters = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(parameter.shape))
        for name, parameter in decoder.named_parameters()
        if name in read
    ]
    inputs, outputs = (list(map(_value, values)) for values in signature)
    proto = helper.make_graph(graph.nodes, "rollkv", [*inputs, *parameters], outputs)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", TRACED_OPSET)], producer_name="rollkv")


def make_decoder(config: DecoderConfig, options: ExportOptions, rows: int) -> Decoder:
    """The decoder that the graph of `rows` rows is traced from."""
    apart, repeated = options.decode_attention == "apart", options.gqa == "repeat"
    cache = CacheForm(options.kv_layout, apart, options.mask_value, repeated)
    joined = options.projections == "joined"
    head = options.head_of(rows)
    return Decoder(config, cache=cache, head=head, source=options.input, rope=options.rope, joined=joined)


class _Stitcher:
    """Collects the nodes of parts under names of their own."""

    def __init__(self, decoder: Decoder | HeadAlone) -> None:
        self.nodes: list[onnx.NodeProto] = []
        # A shared parameter goes by the first of its names: head.weight of a tied head is embedding.weight.
        first: dict[int, str] = {}
        self._parameters = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in decoder.named_parameters(remove_duplicate=False)
        }

    def add(self, part: Part, call: Call) -> None:
        """Append a part's nodes as the call's module, between the call's inputs and outputs."""
        place = call.module
        names = {part.inputs[argument]: name for argument, name in call.inputs.items()}
        names |= dict(zip(part.outputs, call.outputs, strict=True))

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


def _trace_parts(
    decoders: Sequence[Decoder | HeadAlone], values: Sequence[Mapping[str, Tensor]]
) -> list[dict[str, Part]]:
    """For each decoder a part of every kind. values: every value of it by name, on the meta device."""
    traced: list[tuple[torch.nn.Module, Call]] = []
    feeds, outputs = {}, []  # type: dict[str, Tensor], list[str]
    parts: list[dict[str, Part]] = []
    for decoder, shapes in zip(decoders, values, strict=True):
        parts.append({})
        for call in decoder.calls():
            if call.kind in parts[-1]:
                continue
            k = len(traced)
            traced.append((decoder.get_submodule(call.module), call))
            # Every part has tensors of its own: torch.export takes one that is passed twice for one input.
            inputs = {argument: f"{k}.{argument}" for argument in call.inputs}
            feeds |= {inputs[argument]: torch.empty_like(shapes[name]) for argument, name in call.inputs.items()}
            made = tuple(f"{k}.out.{j}" for j in range(len(call.outputs)))
            parts[-1][call.kind] = Part(f"parts.{k}", (), inputs, made)
            outputs += made
    kit = Kit(traced).eval()
    # A tied head reads the embedding's table, under whichever of its two names the exporter took.
    tables = [decoder.embedding.weight for decoder in decoders]
    named = kit.named_parameters(remove_duplicate=False)
    tied = {name for name, parameter in named if any(parameter is table for table in tables)}
    graph = _export(kit, feeds, outputs)
    for node in graph.node:
        for k, name in enumerate(node.input):
            node.input[k] = "embedding.weight" if name in tied else name
    return [
        {kind: replace(part, nodes=_nodes_behind(graph, part.outputs)) for kind, part in kinds.items()}
        for kinds in parts
    ]


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
def _uncollected() -> Iterator[None]:
    """Without the search for cycles: tracing makes objects by the million that stay, and each search looks at all."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


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
