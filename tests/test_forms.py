"""Bundles of every form of the graph pass the proof: norms, repeated heads, opsets, float16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import SHAPES, export, make_checkpoint
from family_shapes import make_family

from rollkv.export import verify, verify_float16
from rollkv.export.artefact import stored_weights
from rollkv.export.signature import ExportError, resolve
from rollkv.export.targets import NORM_OPS, TARGETS
from rollkv.export.verify import verify_bundle
from rollkv.models.checkpoint import open_checkpoint
from rollkv.models.config import DecoderConfig
from rollkv.models.settings import read_config
from rollkv.runtime.bundle import Bundle

NAMES = ("llama", "qwen3", "gemma2", "stablelm", "qwen2_moe")
SMALL = {"max_lm_input_len": 19, "chunk_size": 8, "max_kvcache_len": 24}
# Norms, both ways with heads in every layout, and opsets, several at a time.
FORMS: dict[str, dict[str, Any]] = {
    "rowmax": {"norm": "rowmax", "opset": 13, "gqa": "repeat"},
    "rsqrt": {"norm": "rsqrt", "opset": 18, "gqa": "repeat", "kv_layout": "bksd"},
    "native": {"norm": "native", "opset": 23, "gqa": "repeat", "kv_layout": "bksd-kt"},
    "plain": {"opset": 21, "kv_layout": "bksd", "decode_attention": "joined"},
    "fold": {"opset": 23, "kv_layout": "bksd-kt"},
    "float16": {"dtype": "float16"},
    "float16-native": {"dtype": "float16", "norm": "native", "opset": 23, "gqa": "repeat"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def get(name: str) -> Path:
        make = make_checkpoint if name in SHAPES else make_family
        return make(tmp_path_factory.mktemp("source") / name, name)

    return get


def prove(made: Bundle, source: Path) -> verify.Report:
    return verify_bundle(made, open_checkpoint(str(source)), lambda line: None)


def ops(made: Bundle) -> set[str]:
    loaded = [onnx.load(made.path / graph.file, load_external_data=False) for graph in made.manifest.graphs]
    return {node.op_type for model in loaded for node in model.graph.node}


@pytest.mark.filterwarnings("ignore:this bundle is float16")
@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, form) for name in NAMES for form in FORMS), ("cohere", "native")],  # whose heads have a weight each
)
def test_a_bundle_of_each_form_passes_the_proof(
    name: str, form: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    made = export(source(name), tmp_path / "bundle", **SMALL, **FORMS[form])
    report = prove(made, source(name))
    assert report.fault is None, report.fault
    m = made.manifest
    assert NORM_OPS[m.norm] <= ops(made)
    assert {graph.opset for graph in m.graphs} == {FORMS[form].get("opset", 17)}
    half = m.dtype == "float16"
    assert m.norm == ("rowmax" if form == "float16" else FORMS[form].get("norm", "plain"))
    texts = [row for row in report.rows if row.rung.endswith("text")]
    assert [row.rung for row in texts] == (["graph text", "runtime text"] if half else [])
    assert all(row.steps >= 200 and row.kl is not None and row.kl < 1e-3 for row in texts)
    if half:
        assert {array.dtype for array in stored_weights(made).values()} == {np.dtype(np.float16)}
        for graph in m.graphs:
            model = onnx.load(made.path / graph.file, load_external_data=False)
            values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
            kinds = {value.type.tensor_type.elem_type for value in values}
            kinds |= {tensor.data_type for tensor in model.graph.initializer}
            assert onnx.TensorProto.FLOAT not in kinds


def config(**settings: Any) -> DecoderConfig:
    raw = {
        "model_type": "llama",
        "vocab_size": 307,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return read_config({**raw, **settings}, "config.json")


@pytest.mark.parametrize(
    ("given", "target", "wanted"),
    [
        ({"gqa": "repeat"}, None, ("repeat", "joined")),
        ({"decode_attention": "apart"}, None, ("fold", "apart")),
        ({"gqa": "repeat", "decode_attention": "joined"}, None, ("repeat", "joined")),
        ({}, "rk3588", ("repeat", "joined")),
        ({"decode_attention": "apart"}, "rk3588", ("fold", "apart")),
        ({"gqa": "fold"}, "rk3588", ("fold", "joined")),
    ],
)
def test_repeated_heads_go_with_joined_keys_and_the_one_that_was_asked_for_stays(
    given: dict[str, str], target: str | None, wanted: tuple[str, str]
) -> None:
    options = resolve(config(), target=None if target is None else TARGETS[target], **given)
    assert (options.gqa, options.decode_attention) == wanted


def test_repeated_heads_in_a_step_apart_are_refused_when_both_were_asked_for() -> None:
    with pytest.raises(ExportError) as caught:
        resolve(config(), gqa="repeat", decode_attention="apart")
    assert str(caught.value) == (
        "--decode-attention is 'apart', but --gqa repeat copies every key of a step; allowed: joined, or --gqa fold"
    )


@pytest.mark.parametrize(
    ("target", "wanted"), [(None, "rowmax"), ("rk3588", "rowmax"), ("universal", "rowmax"), ("qualcomm-htp", "native")]
)
def test_a_float16_graph_has_a_norm_that_does_not_overflow_unless_told_otherwise(
    target: str | None, wanted: str
) -> None:
    profile = None if target is None else TARGETS[target]
    assert resolve(config(), target=profile, dtype="float16").norm == wanted
    assert resolve(config(rms_norm_eps=1e-3), target=profile, dtype="float16", norm="plain").norm == "plain"


@pytest.mark.parametrize("norm", ["plain", "rsqrt"])
def test_a_norm_whose_eps_float16_does_not_hold_is_refused(norm: str) -> None:
    with pytest.raises(ExportError) as caught:
        resolve(config(rms_norm_eps=1e-6), dtype="float16", norm=norm)
    assert str(caught.value) == (
        f"--norm is {norm}, but with --dtype float16 its eps of 1e-06 is less than the smallest normal float16, "
        "6.1e-05; allowed: rowmax, or native from --opset 23"
    )


# The law of a float16 bundle


def logits(*rows: list[float]) -> list[np.ndarray]:
    return [np.array(row, np.float32) for row in rows]


def test_the_divergence_is_that_of_torch() -> None:
    import torch
    from torch.nn import functional

    draw = np.random.default_rng(0)
    wanted = draw.standard_normal((9, 50)).astype(np.float32)
    got = wanted + draw.standard_normal((9, 50)).astype(np.float32) * 0.1
    p, q = (functional.log_softmax(torch.from_numpy(x).double(), -1) for x in (wanted, got))
    exact = float(functional.kl_div(q, p, reduction="batchmean", log_target=True))
    assert verify_float16.diverge(list(wanted), list(got)).kl == pytest.approx(exact, rel=1e-6)


def test_the_best_token_must_be_the_references_in_99_of_100_positions() -> None:
    # Both logits move by too little for the divergence, and more than float16's rounding.
    wanted, same = logits([1.0, 0.98, -9.0]), logits([1.0, 0.98, -9.0])
    wrong = logits([0.985, 0.995, -9.0])
    good = verify_float16.diverge(wanted * 100, same * 99 + wrong)
    assert (good.top1, good.near_ties, good.fault) == (99, 0, None)
    bad = verify_float16.diverge(wanted * 100, same * 98 + wrong * 2)
    said = (
        "the argmax is neither the reference's nor within float16 as large in 2 of {} positions (bound 1% of at least "
        "100)"
    )
    assert bad.fault == said.format(100)
    assert verify_float16.diverge(wanted * 201, same * 199 + wrong * 2).fault is None
    assert verify_float16.diverge(wanted * 7, same * 6 + wrong).fault is None, "one of a few is more than 1 %"
    assert verify_float16.diverge(wanted * 7, same * 5 + wrong * 2).fault == said.format(7)


def test_logits_that_the_outputs_float16_cannot_tell_apart_are_a_near_tie() -> None:
    near = verify_float16.diverge(logits([20.0, 19.99, 0.0]) * 100, logits([19.99, 20.0, 0.0]) * 100)
    assert (near.top1, near.near_ties, near.fault) == (0, 100, None)
    far = verify_float16.diverge(logits([20.0, 19.97, 0.0]) * 100, logits([19.97, 20.0, 0.0]) * 100)
    assert (far.top1, far.near_ties) == (0, 0)


@pytest.mark.parametrize("broken", [[2.0, 1.0, 0.0], [np.nan, 1.0, 0.0]])
def test_a_divergence_above_the_law_or_not_a_number_is_a_fault(broken: list[float]) -> None:
    fault = verify_float16.diverge(logits([1.0, 2.0, 0.0]), logits(broken)).fault
    assert fault is not None
    assert fault.startswith("KL(reference || bundle) is ")
    assert fault.endswith("over 1 positions (bound 1e-01)")


def test_the_divergence_of_a_long_text_is_held_to_the_law_and_a_short_one_to_its_part_of_it() -> None:
    wanted, got = logits([1.0, 0.0]), logits([1.11, 0.0])  # KL 1.2e-3 each
    few, text = (verify_float16.diverge(wanted * n, got * n) for n in (10, 100))
    assert few.kl == pytest.approx(text.kl)
    assert (few.bound, few.fault) == (pytest.approx(1e-2), None)
    assert text.fault is not None
    assert text.fault.endswith("over 100 positions (bound 1e-03)")


def test_keys_that_are_off_by_more_than_roundings_add_up_to_are_found_in_their_layer() -> None:
    keys = {layer: np.ones((2, 1, 2), np.float32) for layer in range(3)}
    wanted = verify.Trail(logits([1.0, 2.0]), keys, keys)
    near = {layer: value + 0.01 for layer, value in keys.items()}
    assert verify.compare_float16("graph", 1, wanted, verify.Trail(wanted.logits, near, keys)).fault is None
    broken = {**near, 2: near[2] + 0.1}
    row = verify.compare_float16("graph", 1, wanted, verify.Trail(wanted.logits, keys, broken))
    assert row.fault == "new keys or values of layer 2 are off by 1.1e-01 of their largest (bound 2e-02)"


def test_the_report_shows_the_share_and_the_divergence() -> None:
    wanted = verify.Trail(logits([1.0, 2.0], [2.0, 1.0]))
    row = verify.compare_float16("graph text", 1, wanted, verify.Trail(logits([1.0, 2.0], [1.99, 2.0])))
    shown = verify.Report("b", "s", [row, verify.Row(rung="files")]).to_dict()["rows"]
    assert [part["top1_share"] for part in shown] == [0.5, None]
    assert shown[0]["kl"] == pytest.approx(row.kl)
    assert shown[1]["kl"] is None


def test_the_table_shows_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    from rollkv.export.cli import _print_report

    wanted = verify.Trail(logits([1.0, 2.0], [2.0, 1.0]))
    row = verify.compare_float16("text", 1, wanted, verify.Trail(logits([1.0, 2.0], [1.99, 2.0])))
    plain = verify.compare("torch", 1, wanted, wanted, 1e-4)
    _print_report(verify.Report("b", "s", [plain, row]))
    lines = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in _table(capsys)]
    header, torch_line, text_line = lines[0], lines[1], lines[2]
    assert dict(zip(header, torch_line, strict=True))["KL"] == ""
    shown = dict(zip(header, text_line, strict=True))
    assert (shown["KL"], shown["top-1"], shown["bound"]) == (f"{row.kl:.1e}", "1/2 50.0%", "5e-02")
    _print_report(verify.Report("b", "s", [plain]))
    assert "KL" not in capsys.readouterr().out


def _table(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line[:1] in ("│", "┃")]


@pytest.mark.filterwarnings("ignore:this bundle is float16")
def test_a_weight_that_was_rounded_the_other_way_is_found(source: Callable[[str], Path], tmp_path: Path) -> None:
    made = export(source("llama"), tmp_path / "bundle", **SMALL, dtype="float16")
    name = "layers.1.attention.k.weight"
    stored = stored_weights(made)[name]
    opened = open_checkpoint(str(source("llama")))
    exact = np.empty(stored.shape, np.float32)
    next(w for w in opened.weights if w.name == name).copy_to(exact)
    # to nearest, ties to even, from the bits: add half of what is cut off, less one when the last bit kept is even
    bits = exact.view(np.uint32)
    nearest = ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).view(np.float32)
    normal = np.abs(exact) >= 2.0**-14
    np.testing.assert_array_equal(stored.astype(np.float32)[normal], nearest[normal])
    assert made.manifest.weights.unique_bytes == sum(array.nbytes for array in stored_weights(made).values())
    changed = np.memmap(made.path / "weights.bin", np.float16, "r+", offset=stored.offset, shape=stored.shape)  # type: ignore[attr-defined]
    changed[0, 0] = np.nextafter(changed[0, 0], np.float16(9))
    changed.flush()
    from rollkv.export.artefact import weight_fault

    assert weight_fault(made, opened) == f"weights: {name} differs from the checkpoint"


def test_a_weight_that_float16_cannot_hold_is_named(source: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from rollkv.models.config import CheckpointError

    folder = tmp_path / "model"
    folder.mkdir()
    for file in source("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for value, said in ((65510.0, "reaches 65510; allowed: up to 65504"), (np.inf, "holds a value that is not finite")):
        tensors["model.layers.0.mlp.up_proj.weight"][2, 3] = value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"tensor model.layers.0.mlp.up_proj.weight {said}"):
            export(folder, tmp_path / "bundle", **SMALL, dtype="float16")
        assert not (tmp_path / "bundle").exists()
