"""The stitched graph is the decoder's graph: signature, numbers, and nothing baked in from the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from rollkv.export.signature import ExportOptions, graph_inputs, graph_outputs
from rollkv.export.trace import TraceError, check_trace, make_decoder, trace_graphs
from rollkv.models.config import DecoderConfig, ExpertsConfig, LayerConfig, RopeConfig
from rollkv.models.decoder import Decoder

ROPE = RopeConfig(type="default", theta=10000.0, rotary_dim=6)


def layers(*windows: int | None, **more: Any) -> tuple[LayerConfig, ...]:
    """A layer for each window, otherwise alike."""
    fields: dict[str, Any] = {"kv_heads": 2, "head_dim": 6, "intermediate_size": 24, **more}
    return tuple(LayerConfig(**fields, window=window) for window in windows)


def config(windows: Sequence[int | None] = (None, 5, None), **more: Any) -> DecoderConfig:
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 61,
        "hidden_size": 20,
        "num_heads": 4,
        "norm_eps": 1e-5,
        "max_position": 64,
        "layers": layers(*windows),
        "ropes": (ROPE,),
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    return DecoderConfig(**{**fields, **more})


def options(**more: Any) -> ExportOptions:
    return ExportOptions(**{"max_lm_input_len": 20, "chunk_sizes": (4,), "max_kvcache_len": 24, **more})


def random_decoder(cfg: DecoderConfig, opts: ExportOptions) -> Decoder:
    torch.manual_seed(3)
    decoder = make_decoder(cfg, opts, opts.chunk_size).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.4)
    return decoder


def random_feeds(cfg: DecoderConfig, opts: ExportOptions, rows: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for value in graph_inputs(cfg, opts, rows):
        if value.role in ("ids", "position_ids"):
            feeds[value.name] = draw.integers(0, 60, value.shape).astype(value.dtype)  # V = 61, 64 positions
        elif value.role.endswith("mask"):
            feeds[value.name] = np.where(draw.random(value.shape) < 0.6, 0.0, -32768.0).astype(np.float32)
        else:
            feeds[value.name] = draw.standard_normal(value.shape).astype(np.float32)
    return feeds


def run_torch(decoder: Decoder, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with torch.no_grad():
        values = decoder({name: torch.from_numpy(array) for name, array in feeds.items()})
    return {name: value.numpy() for name, value in values.items() if name == "logits" or name.startswith("new_")}


def plain_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Without optimisations and packed weights, so that the same nodes give the same bits."""
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("session.disable_prepacking", "1")
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def run_onnx(model: onnx.ModelProto, decoder: Decoder, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    model.ir_version = 9
    session = plain_session(model)
    weights = {name: parameter.detach().numpy() for name, parameter in decoder.named_parameters()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {**weights, **feeds}), strict=True))


SLIDING = replace(ROPE, name="sliding", theta=77.0, rotary_dim=4)
EXPERTS = ExpertsConfig(count=3, top_k=2, width=10, normalise=True, shared_width=6)
MIXED = (*layers(5, rope="sliding"), *layers(None), *layers(None, rope=None), *layers(5, rope="sliding"))


FORMS = {
    "mixed": (config(), options()),
    "tied-qknorm-bksd": (config(tied_head=True, qk_norm="rms-head"), options(kv_layout="bksd", ids="int64")),
    "bias-bksd-kt-all": (
        config(biases=frozenset({"qkv", "out", "mlp", "head"})),
        options(kv_layout="bksd-kt", head="all"),
    ),
    "square": (config(num_heads=9, layers=layers(None, kv_heads=3)), options()),  # kv heads == heads / kv heads
    "sliding-only": (config((7, 7)), options(max_kvcache_len=24, max_lm_input_len=4)),  # no full mask at all
    "two-ropes": (config(ropes=(ROPE, SLIDING), layers=MIXED), options()),
    "no-positions": (config(layers=layers(None, rope=None), ropes=()), options()),
    "experts": (config(layers=(*layers(None), *layers(None, sparse=True)), experts=EXPERTS), options()),
    "joined": (
        config(biases=frozenset({"qkv", "mlp"}), ropes=(ROPE, SLIDING), layers=MIXED),
        options(projections="joined"),
    ),
    "joined-late-norm": (config(qk_norm="rms-head-late"), options(projections="joined", kv_layout="bksd")),
    "joined-parallel-experts": (
        config(order="parallel", layers=(*layers(None), *layers(None, sparse=True)), experts=EXPERTS),
        options(projections="joined", kv_layout="bksd-kt", decode_attention="joined"),
    ),
    "three-part": (config(ropes=(replace(ROPE, sections=(1, 1, 1)),), tied_head=True), options(input="embeds")),
}


def trace_graph(cfg: DecoderConfig, opts: ExportOptions, rows: int) -> onnx.ModelProto:
    """One graph alone."""
    (model,) = trace_graphs(cfg, opts, [rows])
    return model


@pytest.mark.parametrize("name", FORMS)
def test_the_traced_graph_gives_what_torch_gives_on_inputs_unlike_the_trace(name: str) -> None:
    cfg, opts = FORMS[name]
    decoder = random_decoder(cfg, opts)
    graphs = dict(zip((4, 1), trace_graphs(cfg, opts, (4, 1)), strict=True))
    for rows, seed in ((4, 0), (4, 1), (1, 2), (1, 3)):
        model = graphs[rows]
        feeds = random_feeds(cfg, opts, rows, seed)
        wanted, got = run_torch(decoder, feeds), run_onnx(model, decoder, feeds)
        assert list(got) == [value.name for value in graph_outputs(cfg, opts, rows)]
        for output, array in wanted.items():
            np.testing.assert_allclose(got[output], array, rtol=0, atol=1e-5 * np.abs(array).max(), err_msg=output)


def test_stringing_layers_together_equals_tracing_the_whole_decoder() -> None:
    kinds = (*MIXED, *layers(None, sparse=True), *layers(5, rope="sliding"))
    cfg, opts = config(layers=kinds, ropes=(ROPE, SLIDING), experts=EXPERTS), options()
    decoder = random_decoder(cfg, opts)
    feeds = random_feeds(cfg, opts, 4, 0)

    names = [value.name for value in graph_inputs(cfg, opts, 4)]
    outputs = [value.name for value in graph_outputs(cfg, opts, 4)]

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder

        def forward(self, *tensors: Any) -> Any:
            values = self.decoder(dict(zip(names, tensors, strict=True)))
            return tuple(values[name] for name in outputs)

    example = tuple(torch.from_numpy(feeds[name]) for name in names)
    whole = torch.onnx.export(
        Whole().eval(), example, dynamo=True, optimize=False, verbose=False, input_names=names, output_names=outputs
    )
    assert whole is not None
    session = plain_session(whole.model_proto)
    wanted = dict(zip(outputs, session.run(outputs, feeds), strict=True))
    got = run_onnx(trace_graph(cfg, opts, 4), decoder, feeds)
    for name in outputs:
        np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)


def test_a_graph_carries_no_weight_and_takes_every_parameter_as_an_input() -> None:
    cfg, opts = config(), options()
    model = trace_graph(cfg, opts, 4)
    parameters = {name for name, _ in Decoder(cfg).named_parameters()}
    assert {value.name for value in model.graph.input} == parameters | {v.name for v in graph_inputs(cfg, opts, 4)}
    assert not model.graph.initializer
    assert model.ByteSize() < 200_000


def test_a_tied_head_reads_the_embedding_and_has_no_weight_of_its_own() -> None:
    model = trace_graph(config(tied_head=True), options(), 1)
    names = {value.name for value in model.graph.input}
    assert "embedding.weight" in names
    assert "head.weight" not in names
    assert "head.norm.weight" in names


def test_a_run_as_long_as_the_cache_still_takes_its_past() -> None:
    cfg, opts = config((None,)), options(chunk_sizes=(24,))
    decoder = random_decoder(cfg, opts)
    feeds = random_feeds(cfg, opts, 24, 0)
    model = trace_graph(cfg, opts, 24)
    wanted, got = run_torch(decoder, feeds), run_onnx(model, decoder, feeds)
    np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=0, atol=1e-5)
    read = {name for node in model.graph.node for name in node.input}
    assert {"past_key_0", "past_value_0"} <= read


def test_what_torch_merges_renames_or_adds_is_refused() -> None:
    import onnx_ir

    def graph(inputs: list[str], outputs: list[str], constants: list[str]) -> onnx_ir.Graph:
        made = [[onnx_ir.val(name) for name in names] for names in (inputs, outputs)]
        values = [onnx_ir.val(name, const_value=onnx_ir.tensor([1.0], name=name)) for name in constants]
        return onnx_ir.Graph(*made, nodes=[], initializers=values)

    check_trace(graph(["cos", "sin"], ["y"], ["w"]), ["cos", "sin"], ["y"], ["w"])
    with pytest.raises(TraceError, match=r"gave the inputs \['cos'\], asked for \['cos', 'sin'\]"):
        check_trace(graph(["cos"], ["y"], []), ["cos", "sin"], ["y"], [])
    with pytest.raises(TraceError, match=r"gave the outputs \['z'\], asked for \['y'\]"):
        check_trace(graph(["x"], ["z"], []), ["x"], ["y"], [])
    with pytest.raises(TraceError, match="put constants into the graph: lifted"):
        check_trace(graph(["x"], ["y"], ["w", "lifted"]), ["x"], ["y"], ["w"])


def traced_kinds(cfg: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Classes of the parts that one trace of this config hands to torch's exporter."""
    seen: list[str] = []
    export = torch.export.export

    def watched(module: Any, *arguments: Any, **more: Any) -> Any:
        seen.extend(type(part).__name__ for part in module.parts)
        return export(module, *arguments, **more)

    monkeypatch.setattr(torch.export, "export", watched)
    trace_graph(cfg, options(), 1)
    return seen


def test_layers_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced_kinds(config((None,) * 7), monkeypatch) == ["Embedding", "Rope", "PreNorm", "Head"]


@pytest.mark.parametrize(
    "other",
    [
        {"window": 5},
        {"kv_heads": 1},
        {"head_dim": 8},
        {"intermediate_size": 10},
        {"rope": None},
        {"rope": "sliding"},
        {"sparse": True},
    ],
)
def test_layers_that_differ_get_parts_of_their_own(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = layers(None)[0]
    cfg = config(layers=(first, replace(first, **other), first), ropes=(ROPE, SLIDING), experts=EXPERTS)
    assert traced_kinds(cfg, monkeypatch) == ["Embedding", "Rope", "Rope", "PreNorm", "PreNorm", "Head"]


def test_each_layer_turns_by_its_own_rope() -> None:
    cfg, opts = config(ropes=(ROPE, SLIDING), layers=MIXED), options()
    inputs = {value.name for value in trace_graph(cfg, opts, 4).graph.input}
    tables = {name for name in inputs if name.startswith("rope.")}
    assert tables == {f"rope.{name}.{table}" for name in ("full", "sliding") for table in ("cos", "sin")}
    decoder, feeds = random_decoder(cfg, opts), random_feeds(cfg, opts, 4, 0)
    before = run_torch(decoder, feeds)
    with torch.no_grad():
        decoder.get_parameter("rope.full.cos").mul_(2)
    after = run_torch(decoder, feeds)
    got = run_onnx(trace_graph(cfg, opts, 4), decoder, feeds)
    changed = [i for i in range(4) if not np.allclose(before[f"new_value_{i}"], after[f"new_value_{i}"])]
    assert changed == [2, 3]  # values do not turn: those behind layer 1, the only one with rope.full
    assert not np.allclose(before["new_key_1"], after["new_key_1"])
    assert np.array_equal(before["new_key_0"], after["new_key_0"])
    for name, array in after.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-5 * np.abs(array).max(), err_msg=name)


def test_a_failure_of_the_exporter_is_one_error_of_this_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.onnx, "export", broken)
    with pytest.raises(TraceError, match=r"torch .* cannot export the decoder: RuntimeError: no such operator"):
        trace_graph(config(), options(), 1)
