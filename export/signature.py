"""What each graph takes and gives - names, shapes, types - as data, from a config and the chosen lengths.

Knows no torch and no ONNX. L, c, C and Cs as in the contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollkv.export.targets import NATIVE_OPSET, NORM_OPS, ROPES, ROUTING_OPS, Target
from rollkv.models.config import FLOAT16_MAX, DecoderConfig
from rollkv.models.projections import DEFAULT_PROJECTIONS, can_be_joined, default_projections
from rollkv.runtime.bundle import (
    DECODE_ATTENTIONS,
    GQAS,
    KV_LAYOUTS,
    NORMS,
    PROJECTIONS,
    LayerInfo,
    Manifest,
    ValueInfo,
)

DEFAULT_LENGTH, DEFAULT_CHUNK, DEFAULT_ROOM = 1024, 128, 256
OPSETS = tuple(range(13, 24))
ADDING_EPS = ("plain", "rsqrt")  # norms of mean(x x) + eps
FLOAT16_SMALLEST = 2.0**-14  # normal number; a compiler may take less for zero
# Each field of a graph's form: what it may be.
FORMS: dict[str, tuple[Any, ...]] = {
    "kv_layout": KV_LAYOUTS,
    "ids": ("int32", "int64"),
    "head": ("last", "all", "none", "split"),
    "input": ("ids", "embeds"),
    "decode_attention": DECODE_ATTENTIONS,
    "opset": OPSETS,
    "norm": NORMS,
    "gqa": GQAS,
    "rope": ROPES,
    "dtype": ("float32", "float16"),
}
DEFAULT_FORM: dict[str, Any] = {
    **{name: allowed[0] for name, allowed in FORMS.items()},
    "decode_attention": "apart",
    "opset": 17,
    "mask_value": -32768.0,
}


class ExportError(ValueError):
    """A setting that no graph can be made for."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The chosen lengths and forms; `resolve` makes one out of what the user gave."""

    max_lm_input_len: int  # L
    chunk_sizes: tuple[int, ...]  # rows of the prefill graphs, ascending
    max_kvcache_len: int  # C
    context_buckets: tuple[int, ...] = ()  # visible lengths below C, ascending, each with graphs of its own
    speculate: int | None = None  # rows of the prefill graph with the logits of every row, one of the sizes or not
    kv_layout: str = "bskd"
    ids: str = "int32"
    head: str = "last"
    input: str = "ids"
    decode_attention: str = "apart"
    projections: str = DEFAULT_PROJECTIONS
    mask_value: float = -32768.0
    opset: int = 17
    norm: str = "plain"
    gqa: str = "fold"
    rope: str = "graph"
    dtype: str = "float32"
    target: str | None = None  # the profile whose form was the default
    simplify: bool = True

    @property
    def prefill_rows(self) -> tuple[int, ...]:
        """Rows of every prefill graph, ascending: the chunk sizes, and those of the graph for speculation."""
        return tuple(sorted({*self.chunk_sizes, *([] if self.speculate is None else [self.speculate])}))

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Visible lengths of the graphs, ascending; the last is C."""
        return (*self.context_buckets, self.max_kvcache_len)

    @property
    def chunk_size(self) -> int:
        """The most rows of a prefill graph: the c of Cs = min(C, W - 1 + c)."""
        return self.prefill_rows[-1]

    def head_of(self, rows: int) -> str:
        """Of which rows the graph of `rows` rows has logits: "last" or "all"; "none": it has hidden states."""
        if rows == self.speculate:
            return "all"
        return "none" if self.head == "split" else self.head


def resolve(
    config: DecoderConfig,
    *,
    max_lm_input_len: int | None = None,
    chunk_size: int | Sequence[int] | None = None,
    max_kvcache_len: int | None = None,
    context_buckets: Sequence[int] = (),
    speculate: int | None = None,
    allow_no_room: bool = False,
    target: Target | None = None,
    kv_layout: str | None = None,
    ids: str | None = None,
    head: str | None = None,
    input: str | None = None,
    decode_attention: str | None = None,
    mask_value: float | None = None,
    opset: int | None = None,
    norm: str | None = None,
    gqa: str | None = None,
    rope: str | None = None,
    dtype: str | None = None,
    projections: str | None = None,
    simplify: bool = True,
) -> ExportOptions:
    """Fill in the defaults (c = 128, L = 1024, C = L + 256, less where the model ends) and check everything.

    chunk_size: c, or several, in any order. context_buckets: visible lengths below C, in any order. speculate: rows of
    a prefill graph with the logits of every row. target: whose form stands where a form is None; without one it is
    that of `DEFAULT_FORM`. projections: by default the target's where the model has that form, without a target that
    of `default_projections`.
    Raises ExportError that names the flag, what was given and what is allowed.
    """
    given = {
        "kv_layout": kv_layout,
        "ids": ids,
        "head": head,
        "input": input,
        "decode_attention": decode_attention,
        "mask_value": mask_value,
        "opset": opset,
        "norm": norm,
        "gqa": gqa,
        "rope": rope,
        "dtype": dtype,
    }
    usual = DEFAULT_FORM if target is None else target.form()
    form: dict[str, Any] = {name: usual[name] if value is None else value for name, value in given.items()}
    _settle_forms(form, given)
    most = config.max_position
    if chunk_size is None and target is not None:
        chunk_size = tuple(size for size in target.chunk_sizes if size <= (max_kvcache_len or most)) or None
    length, slots = max_lm_input_len, max_kvcache_len
    if length is None:
        end = min(slots or most, most)
        length = min(DEFAULT_LENGTH, end - DEFAULT_ROOM) if end > 2 * DEFAULT_ROOM else max(1, end // 2)
    if slots is None:
        longest = most if allow_no_room else most - 1
        if length > longest:
            raise ExportError(f"-L is {length}, but the model has {most} positions; allowed: up to {longest}")
        slots = min(length + DEFAULT_ROOM, most)
    if chunk_size is None:
        chunk_size = min(DEFAULT_CHUNK, slots)
    chunks = sorted([chunk_size] if isinstance(chunk_size, int) else chunk_size)
    if not chunks:
        raise ExportError("-c names no size; give one or more, such as 128 or 32,128")
    for flag, value in (("-L", length), *(("-c", chunk) for chunk in chunks), ("-C", slots)):
        if value < 1:
            raise ExportError(f"{flag} is {value}, must be at least 1")
    if slots > most:
        raise ExportError(f"-C is {slots}, above the model's {most} positions; allowed: up to {most}")
    for i, chunk in enumerate(chunks):
        if chunk > slots:
            raise ExportError(f"-c is {chunk}, more than -C {slots}; allowed: 1 .. {slots}")
        if chunk in chunks[:i]:
            raise ExportError(f"-c names {chunk} twice; give each size once")
    buckets = sorted(context_buckets)
    for i, bucket in enumerate(buckets):
        if not 2 <= bucket < slots:
            raise ExportError(f"--context-buckets names {bucket}, allowed: 2 .. {slots - 1}, less than -C")
        if bucket in buckets[:i]:
            raise ExportError(f"--context-buckets names {bucket} twice; give each length once")
    if speculate is not None and not 2 <= speculate <= slots:
        raise ExportError(f"--speculate is {speculate}, allowed: 2 .. {slots}, which is -C")
    if length > slots:
        raise ExportError(f"-C is {slots}, less than -L {length}; allowed: from {length + 1} on")
    if length == slots and not allow_no_room:
        raise ExportError(
            f"-C {slots} equals -L: the longest prompt has room for one token only; raise -C, or pass --allow-no-room"
        )
    for name, allowed in FORMS.items():
        if form[name] not in allowed:
            flag = f"--{name.replace('_', '-')}"
            raise ExportError(f"{flag} is {form[name]!r}, allowed: {', '.join(map(str, allowed))}")
    if not -FLOAT16_MAX <= form["mask_value"] <= -1:
        raise ExportError(f"--mask-value is {form['mask_value']}, allowed: -65504 .. -1")
    form["mask_value"] = float(form["mask_value"])
    if form["norm"] == "native" and form["opset"] < NATIVE_OPSET:
        raise ExportError(
            f"--opset is {form['opset']}, but --norm native needs RMSNormalization: allowed from {NATIVE_OPSET}"
        )
    if projections is None:
        projections = default_projections(config, None if target is None else target.projections)
    if projections not in PROJECTIONS:
        raise ExportError(f"--projections is {projections!r}, allowed: {', '.join(PROJECTIONS)}")
    if projections == "joined" and not can_be_joined(config):
        raise ExportError("--projections is 'joined', allowed: separate; a Gemma 4 layer has a form of its own")
    if target is not None:
        _check_target(config, target, form)

    if form["dtype"] == "float16" and form["norm"] in ADDING_EPS and config.norm_eps < FLOAT16_SMALLEST:
        raise ExportError(
            f"--norm is {form['norm']}, but with --dtype float16 its eps of {config.norm_eps:.6g} is less than the "
            f"smallest normal float16, {FLOAT16_SMALLEST:.3g}; allowed: rowmax, or native from --opset {NATIVE_OPSET}"
        )
    if form["head"] in ("none", "split") and speculate is not None:
        raise ExportError(
            f"--speculate is {speculate}, but --head {form['head']} gives the hidden state of the last row alone; "
            "allowed: either"
        )
    if config.experts is not None and config.experts.count == 1:
        simplify = False  # softmax over one expert is 1 whatever the router: onnxsim would take its weight away
    options = ExportOptions(
        max_lm_input_len=length,
        chunk_sizes=tuple(chunks),
        max_kvcache_len=slots,
        context_buckets=tuple(buckets),
        speculate=speculate,
        projections=projections,
        target=None if target is None else target.name,
        simplify=simplify,
        **form,
    )
    if any(layer.kv_len == 1 for layer in layer_infos(config, options)):
        # Softmax over one slot is 1 whatever its mask: onnxsim would take the mask's input away.
        options = replace(options, simplify=False)
    return options


def options_of(m: Manifest) -> ExportOptions:
    """The options that a bundle was exported with, as far as the manifest shows them.

    It does not show whether the rows of the graph for speculation were among the chunk sizes: here they are.
    """
    prefills = [graph for graph in m.graphs if graph.role == "prefill"]
    prefill, rows = prefills[0], next(graph.head for graph in m.graphs if graph.role == "decode")
    return ExportOptions(
        max_lm_input_len=m.max_lm_input_len,
        chunk_sizes=tuple(m.prefill_rows),
        max_kvcache_len=m.max_kvcache_len,
        context_buckets=tuple(m.kv_lens[:-1]),
        speculate=next((graph.rows for graph in prefills if graph.head != rows), None),
        kv_layout=m.kv_layout,
        decode_attention=m.decode_attention,
        projections=m.projections,
        ids=next((v.dtype for v in prefill.inputs if v.role in ("ids", "position_ids")), "int32"),
        input=next(v.role for v in prefill.inputs if v.role in ("ids", "embeds")),
        head="split" if m.head_graph is not None else rows,
        mask_value=m.mask_value,
        opset=prefill.opset,
        norm=m.norm,
        gqa=m.gqa,
        rope="feed" if any(v.role == "rope_cos" for v in prefill.inputs) else "graph",
        dtype=m.dtype,
        target=m.target,
    )


def _check_target(config: DecoderConfig, target: Target, form: Mapping[str, Any]) -> None:
    """Raise ExportError that names the first limit of a target which the graph would break."""
    low, high = target.opsets
    if not low <= form["opset"] <= high:
        raise ExportError(f"--opset is {form['opset']}, --target {target.name} takes {low} .. {high}")
    for name, value in target.refused:
        if form[name] == value:
            raise ExportError(
                f"--{name.replace('_', '-')} is {value}, which --target {target.name} does not take; its own form is "
                f"{getattr(target, name)}"
            )
    refused = NORM_OPS[form["norm"]] - target.ops
    if refused:
        raise ExportError(
            f"--norm {form['norm']} needs {', '.join(sorted(refused))}, which --target {target.name} does not take; "
            f"its own form is --norm {target.norm}"
        )
    if config.experts is not None and ROUTING_OPS - target.ops:
        raise ExportError(
            f"--target {target.name} cannot hold a mixture of experts: its routing needs "
            f"{', '.join(sorted(ROUTING_OPS - target.ops))}, which {target.name} does not take"
        )


def _settle_forms(form: dict[str, Any], given: dict[str, Any]) -> None:
    """Make forms fit each other where the user asked for one of two that do not; what was asked for stays.

    Repeated heads are for one fused attention, and a step that takes past and new keys apart is there to copy no key:
    together they make no sense. float16 needs a norm that neither squares large numbers nor adds eps.
    """
    if (form["gqa"], form["decode_attention"]) == ("repeat", "apart"):
        if given["gqa"] is not None and given["decode_attention"] is not None:
            raise ExportError(
                "--decode-attention is 'apart', but --gqa repeat copies every key of a step; allowed: joined, or "
                "--gqa fold"
            )
        if given["decode_attention"] is None:
            form["decode_attention"] = "joined"
        else:
            form["gqa"] = "fold"
    if form["dtype"] == "float16" and given["norm"] is None and form["norm"] in ADDING_EPS:
        form["norm"] = "rowmax"


def layer_infos(config: DecoderConfig, options: ExportOptions) -> list[LayerInfo]:
    """The cache of each layer: C slots, or Cs = min(C, W - 1 + c) with a window W and the largest c."""
    slots = options.max_kvcache_len
    return [
        LayerInfo(
            kv_len=slots if layer.window is None else min(slots, layer.window - 1 + options.chunk_size),
            window=layer.window,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            rope=layer.rope,
            kv_from=layer.kv_from,
        )
        for layer in config.layers
    ]


def visible(layers: list[LayerInfo], kv_len: int) -> list[LayerInfo]:
    """The slots of each layer that a graph of the visible length `kv_len` takes: the last min(C', Cs)."""
    return [replace(layer, kv_len=min(layer.kv_len, kv_len)) for layer in layers]


def graph_inputs(
    config: DecoderConfig, options: ExportOptions, rows: int, kv_len: int | None = None
) -> list[ValueInfo]:
    """Inputs of the graph of `rows` rows, in order. kv_len: its visible length C', by default C."""
    layers = visible(layer_infos(config, options), kv_len or options.max_kvcache_len)
    if options.input == "ids":
        values = [ValueInfo(name="input_ids", shape=[1, rows], dtype=options.ids, role="ids")]
    else:
        shape = [1, rows, config.hidden_size]
        values = [ValueInfo(name="inputs_embeds", shape=shape, dtype=options.dtype, role="embeds")]
    if config.per_layer_width:
        shape = [1, rows, config.num_layers * config.per_layer_width]
        values.append(ValueInfo(name="per_layer_inputs", shape=shape, dtype=options.dtype, role="per_layer_inputs"))
    for name, slots in (
        ("attention_mask", {layer.kv_len for layer in layers if layer.window is None}),
        ("sliding_attention_mask", {layer.kv_len for layer in layers if layer.window is not None}),
    ):
        for kv_len in sorted(slots):
            values.append(ValueInfo(name=name, shape=[1, 1, rows, kv_len], dtype=options.dtype, role=name))
    if options.rope == "feed":
        for rope in config.ropes:
            for part, name in config.fed_rotations[rope.name].items():
                shape = [1, rows, 1 if part == "query_scale" else rope.rotary_dim]
                values.append(
                    ValueInfo(name=name, shape=shape, dtype=options.dtype, role=f"rope_{part}", rope=rope.name)
                )
    if (config.ropes and options.rope == "graph") or config.learned_positions:
        three = any(rope.sections for rope in config.ropes)
        shape = [3, 1, rows] if three else [1, rows]
        values.append(ValueInfo(name="position_ids", shape=shape, dtype=options.ids, role="position_ids"))
    return values + _cache_values("past", layers, options, None)


def graph_outputs(config: DecoderConfig, options: ExportOptions, rows: int) -> list[ValueInfo]:
    """Outputs of the graph of `rows` rows, in order."""
    head = options.head_of(rows)
    role, width = ("hidden_states", config.hidden_size) if head == "none" else ("logits", config.vocab_size)
    shape = [1, rows if head == "all" else 1, width]
    values = [ValueInfo(name=role, shape=shape, dtype=options.dtype, role=role)]
    return values + _cache_values("new", layer_infos(config, options), options, rows)


def kv_pairs(config: DecoderConfig) -> list[list[str]]:
    """Past input and new output that share one cache."""
    own = [i for i, layer in enumerate(config.layers) if layer.kv_from is None]
    return [[f"past_{part}_{i}", f"new_{part}_{i}"] for i in own for part in ("key", "value")]


def _cache_values(prefix: str, layers: list[LayerInfo], options: ExportOptions, rows: int | None) -> list[ValueInfo]:
    values, layout, dtype = [], options.kv_layout, options.dtype
    for i, layer in enumerate(layers):
        if layer.kv_from is not None:
            continue
        slots = rows or layer.kv_len
        for part in ("key", "value"):
            if layout == "bskd":
                shape = [1, slots, layer.kv_heads, layer.head_dim]
            elif layout == "bksd-kt" and part == "key":
                shape = [1, layer.kv_heads, layer.head_dim, slots]
            else:
                shape = [1, layer.kv_heads, slots, layer.head_dim]
            name = f"{prefix}_{part}_{i}"
            values.append(ValueInfo(name=name, shape=shape, dtype=dtype, role=f"{prefix}_{part}", layer=i))
    return values
