"""Bundles with prefill graphs of several chunk sizes, and with one that gives the logits of every row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import Run
from conftest import export
from proof import MODELS
from test_verify import _resign, climb

from rollkv.export import verify
from rollkv.export.artefact import manifest_fault
from rollkv.export.pipeline import describe
from rollkv.export.reference import LiteralHost, Reference
from rollkv.export.reference_backends import TorchBackend
from rollkv.export.signature import options_of, resolve
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle, open_bundle

BOUND = 1e-4  # of the largest logit, for tiny models
SEVERAL = {"chunk_size": (4, 8, 40), "speculate": 6}  # L = 40, so 40 rows take any prompt at once; C = 48
FORMS = [("llama", "bskd"), ("mistral-window", "bksd"), ("gemma3", "bskd"), ("gemma3", "bksd-kt")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Bundle, Path]]:
    """made(name, layout): the bundle of a tiny model with the graphs of SEVERAL, and its checkpoint, made once."""
    sources: dict[str, Path] = {}
    bundles: dict[tuple[str, str], Bundle] = {}

    def get(name: str, layout: str) -> tuple[Bundle, Path]:
        if name not in sources:
            sources[name] = MODELS[name].save(tmp_path_factory.mktemp("source") / name)
        if (name, layout) not in bundles:
            output = tmp_path_factory.mktemp("bundle") / f"{name}-{layout}"
            bundles[name, layout] = export(sources[name], output, kv_layout=layout, **SEVERAL)
        return bundles[name, layout], sources[name]

    return get


def some_ids(bundle: Bundle, n: int) -> list[int]:
    ids: list[int] = np.random.default_rng(n).integers(3, bundle.manifest.vocab_size, n).tolist()
    return ids


def off(wanted: Any, got: Any) -> float:
    return float(np.abs(np.asarray(wanted) - np.asarray(got)).max() / np.abs(np.asarray(wanted)).max())


# What is written


def test_a_graph_for_each_size_reads_the_one_weight_file(made: Callable[..., tuple[Bundle, Path]]) -> None:
    bundle, source = made("gemma3", "bskd")
    m = bundle.manifest
    assert [(graph.file, graph.role, graph.rows, graph.head) for graph in m.graphs] == [
        ("prefill_c4_k48.onnx", "prefill", 4, "last"),
        ("prefill_c6_k48.onnx", "prefill", 6, "all"),
        ("prefill_c8_k48.onnx", "prefill", 8, "last"),
        ("prefill_c40_k48.onnx", "prefill", 40, "last"),
        ("decode_k48.onnx", "decode", 1, "last"),
    ]
    assert (m.chunk_size, m.chunk_sizes) == (40, [4, 6, 8, 40])
    assert {graph.file for graph in m.graphs} | {"weights.bin"} <= m.files.keys()
    # The cache is the same for every graph: slots for the window of 6 and the largest run.
    assert {layer.kv_len for layer in m.layers if layer.window} == {6 - 1 + 40}
    pasts = [[(v.name, v.shape) for v in graph.inputs if v.role.startswith("past")] for graph in m.graphs]
    assert all(past == pasts[0] for past in pasts)
    for graph in m.graphs:
        shape = next(value.shape for value in graph.outputs if value.role == "logits")
        assert shape == [1, 6 if graph.rows == 6 else 1, m.vocab_size]
        model = onnx.load(bundle.path / graph.file, load_external_data=False)
        assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == shape
        assert {
            entry.value
            for tensor in model.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        } == {"weights.bin"}
    assert manifest_fault(bundle, open_checkpoint(str(source))) is None
    bundle.check()


def test_the_weights_are_the_same_bytes_whatever_the_sizes(
    bundle: Callable[..., Bundle], made: Callable[..., tuple[Bundle, Path]]
) -> None:
    one, many = bundle("llama"), made("llama", "bskd")[0]
    assert (one.path / "weights.bin").read_bytes() == (many.path / "weights.bin").read_bytes()
    assert one.manifest.weights == many.manifest.weights


def test_a_list_of_one_size_is_that_size(
    checkpoint: Callable[[str], Path], bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    listed = export(checkpoint("llama"), tmp_path / "bundle", chunk_size=[8])
    for item in bundle("llama").path.iterdir():
        assert (listed.path / item.name).read_bytes() == item.read_bytes(), item.name


def test_a_graph_for_speculation_may_take_the_place_of_a_chunk_size(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    m = export(checkpoint("llama"), tmp_path / "bundle", chunk_size=8, speculate=8).manifest
    assert [(graph.file, graph.rows, graph.head) for graph in m.graphs] == [
        ("prefill.onnx", 8, "all"),
        ("decode.onnx", 1, "last"),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_size": 8},
        {"chunk_size": 1},
        {"chunk_size": (1, 8)},
        {"chunk_size": 8, "head": "all"},
        {"chunk_size": (8, 16)},
        {"chunk_size": (8, 16), "head": "all", "speculate": 4},
        {"chunk_size": 8, "speculate": 4},
        {"chunk_size": 8, "speculate": 8},
        {"chunk_size": (4, 8), "speculate": 48, "input": "embeds", "ids": "int64", "opset": 15},
    ],
    ids=str,
)
def test_the_options_that_a_manifest_shows_make_the_same_manifest(
    settings: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    opened = open_checkpoint(str(checkpoint("qwen2-window")))
    lengths = {"max_lm_input_len": 40, "max_kvcache_len": 48}
    options = resolve(opened.config, **lengths, **settings)
    manifest = describe(opened, options, "")
    shown = options_of(manifest)
    assert describe(opened, shown, "") == manifest
    assert shown.prefill_rows == options.prefill_rows
    assert [shown.head_of(rows) for rows in (1, *shown.prefill_rows)] == [
        options.head_of(rows) for rows in (1, *options.prefill_rows)
    ]


# What the graphs compute


@pytest.mark.parametrize(("name", "layout"), FORMS)
def test_every_prefill_graph_gives_what_one_unchunked_pass_gives(
    name: str, layout: str, made: Callable[..., tuple[Bundle, Path]]
) -> None:
    bundle, source = made(name, layout)
    checkpoint = open_checkpoint(str(source))
    reference = Reference(checkpoint, 48)
    backends = (OrtBackend(bundle), TorchBackend(checkpoint, options_of(bundle.manifest)))
    for n in (1, 5, 8, 13, 40):
        ids = some_ids(bundle, n)
        wanted, tokens = reference.greedy(ids, 5)
        for c in (4, 6, 8, 40):  # 40: the whole prompt at once
            for backend in backends:
                got = LiteralHost(bundle, backend, c).follow(ids, tokens)
                assert verify.compare(f"c={c}", n, wanted, got, BOUND).fault is None


@pytest.mark.parametrize(("name", "layout"), FORMS)
def test_the_graph_for_speculation_gives_the_logits_of_every_row(
    name: str, layout: str, made: Callable[..., tuple[Bundle, Path]]
) -> None:
    bundle, source = made(name, layout)
    reference = Reference(open_checkpoint(str(source)), 48)
    host = LiteralHost(bundle, OrtBackend(bundle), 6)
    for n in (1, 5, 6, 7, 23):
        ids = some_ids(bundle, n)
        wanted, got = reference.rows(ids), host.rows(ids)
        assert len(got) == n
        assert off(wanted, got) < BOUND


# The ladder


@pytest.mark.parametrize(("name", "layout"), FORMS)
def test_the_ladder_climbs_every_prefill_graph_and_all_together(
    name: str, layout: str, made: Callable[..., tuple[Bundle, Path]]
) -> None:
    bundle, source = made(name, layout)
    report = climb(bundle, source)
    assert report.fault is None
    rungs: dict[str, set[int]] = {}
    for row in report.rows:
        rungs.setdefault(row.rung, set()).add(row.n)
    sizes = (4, 6, 8, 40)
    assert rungs.keys() == {
        "files",
        *(f"{rung} c={c}" for rung in ("torch", "traced", "graph", "runtime", "roll", "feeds") for c in sizes),
        "rows c=6",
        "runtime",
        "feeds",
    }
    for c in sizes:
        assert {1, c - 1, c, 40} <= rungs[f"graph c={c}"] == rungs[f"runtime c={c}"] <= rungs["runtime"]
    assert {5, 6, 7, 13} <= rungs["rows c=6"]


def test_one_size_has_the_rungs_without_a_number(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    report = climb(export(checkpoint("llama"), tmp_path / "b", speculate=8), checkpoint("llama"))
    assert report.fault is None
    assert {row.rung for row in report.rows} == {
        "files", "torch", "traced", "graph", "rows", "runtime", "roll", "feeds",
    }  # fmt: skip


def change_graph(bundle: Bundle, file: str, change: Callable[[onnx.GraphProto], None]) -> Bundle:
    model = onnx.load(bundle.path / file, load_external_data=False)
    change(model.graph)
    (bundle.path / file).write_bytes(model.SerializeToString())
    return _resign(bundle)


def swap_weights(graph: onnx.GraphProto) -> None:
    """The key weights of the two layers change places."""
    first, second = (
        next(tensor for tensor in graph.initializer if tensor.name == f"layers__{i}__attention__k__weight")
        for i in (0, 1)
    )
    first.name, second.name = second.name, first.name


def repeat_row(graph: onnx.GraphProto) -> None:
    """Every row of logits is that of the last row."""
    size = graph.output[0].type.tensor_type.shape.dim[1].dim_value
    node = next(node for node in graph.node if "logits" in node.output)
    node.output[0] = "all_rows"
    graph.initializer.append(onnx.numpy_helper.from_array(np.full(size, size - 1, np.int64), "the_last"))
    graph.node.append(onnx.helper.make_node("Gather", ["all_rows", "the_last"], ["logits"], axis=1))
    value = onnx.ValueInfoProto()
    value.CopyFrom(graph.output[0])
    value.name = "all_rows"
    graph.value_info.append(value)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("prefill_c4_k48.onnx", swap_weights, "rung graph c=4, prompt of 1: new keys or values of layer 0 are off by "),
        ("prefill_c40_k48.onnx", swap_weights, "rung graph c=40, prompt of 1: new keys or values of layer 0 are off"),
        ("prefill_c6_k48.onnx", repeat_row, "rung rows c=6, prompt of 5: logits are off by "),
    ],
    ids=["smallest", "largest", "rows"],
)
def test_a_fault_in_the_graph_of_one_size_is_found_there(
    file: str, change: Any, said: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = change_graph(export(checkpoint("llama"), tmp_path / "b", **SEVERAL), file, change)
    report = climb(bundle, checkpoint("llama"))
    assert report.fault is not None
    assert report.fault.startswith(said), report.fault
    size = file.partition("_k")[0].removeprefix("prefill_c")
    broken = {row.rung for row in report.rows if not row.holds} - {"runtime", "feeds"}
    assert all(rung.endswith(f" c={size}") for rung in broken)


def test_graphs_that_changed_places_are_found_by_their_shapes(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = export(checkpoint("llama"), tmp_path / "b", **SEVERAL)
    one, other = (bundle.path / f"prefill_c{c}_k48.onnx" for c in (4, 8))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    fault = climb(_resign(bundle), checkpoint("llama")).fault
    assert fault is not None
    assert fault.startswith("rung files, prefill_c4_k48.onnx: inputs differ from the manifest: input_ids int32 [1, 8]")


def test_a_head_that_no_export_gives_is_found_in_the_manifest(
    made: Callable[..., tuple[Bundle, Path]],
) -> None:
    bundle, source = made("llama", "bskd")
    graphs = list(bundle.manifest.graphs)
    graphs[2] = dataclasses.replace(graphs[2], head="all")
    false = Bundle(bundle.path, dataclasses.replace(bundle.manifest, graphs=graphs))
    fault = manifest_fault(false, open_checkpoint(str(source)))
    assert fault == "manifest: graphs[2].head is all, must be last"


# The command


def test_the_command_takes_several_sizes_in_any_order_and_says_them(run: Run, source: Path, tmp_path: Path) -> None:
    lengths = ["-L", 120, "-c", "64,8", "-C", 160, "--speculate", 5]
    code, out, err = run("export", source, "-o", tmp_path / "b", *lengths, "--json")
    assert code == 0
    summary = json.loads(out)
    assert (summary["chunk_size"], summary["chunk_sizes"], summary["speculate"]) == (64, [5, 8, 64], 5)
    assert summary["mask_operand_bytes"] == 2 * 6 * 64 * 160  # of the largest run
    names = ("prefill_c5_k160", "prefill_c8_k160", "prefill_c64_k160", "decode_k160")
    assert err.splitlines() == [
        f"rollkv export: {step}" for step in ("trace", *(f"passes {name}" for name in names), "hashes")
    ]
    assert [graph.rows for graph in open_bundle(tmp_path / "b").manifest.graphs] == [5, 8, 64, 1]
    code, out, err = run("info", tmp_path / "b")
    assert (code, err) == (0, "")
    for words in (
        "L = 120 prompt tokens, c = 5, 8, 64 rows a run, C = 160 slots",
        "ids, (1, c) int32",
        "prefill_c5_k160.onnx: prefill, 5 rows, 160 slots, logits of all, opset 17",
        "prefill_c64_k160.onnx: prefill, 64 rows, 160 slots, logits of last, opset 17",
    ):
        assert words in out
    code, out, _ = run("export", source, "-o", tmp_path / "b", *lengths)
    assert code == 0
    assert out.startswith(f"{tmp_path / 'b'}: L = 120, c = 5/8/64, C = 160, ")
    assert sorted(item.name for item in (tmp_path / "b").glob("*.onnx")) == sorted(f"{name}.onnx" for name in names)
