"""Bundles of the joined form: what is written, what `verify` holds it to, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gemma4_models
import numpy as np
import onnx
import pytest
from bundle_exports import LENGTHS
from commands import Run, user_error
from conftest import export
from test_lora import LINEARS, adapter
from test_signature import config
from test_verify import climb

from rollkv.export.artefact import stored_weights, weight_fault
from rollkv.export.signature import ExportError, ExportOptions, options_of, resolve
from rollkv.export.verify import verify_bundle
from rollkv.export.write import ALIGNMENT
from rollkv.models.checkpoint import Weight, open_checkpoint
from rollkv.models.projections import DEFAULT_PROJECTIONS, default_projections
from rollkv.runtime import Session
from rollkv.runtime.bundle import Bundle, open_bundle

GEMMA4 = next(iter(gemma4_models.EXPORTED.values()))


def changed(folder: Path, target: Path, **fields: Any) -> Bundle:
    """A copy of a bundle with other fields in its manifest; None: the field is taken out."""
    shutil.copytree(folder, target)
    file = target / "manifest.json"
    raw = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return open_bundle(target)


# What is written


@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        # 3 products, 2 weights of norms, the scale, 2 Reshapes and most of a rotation for 6 cuts
        ("llama", 8),
        ("qwen2", 10),  # and 2 biases
        ("qwen3", 0),  # with norms between: 3 products and 2 weights of norms for 5 cuts
    ],
)
def test_a_layer_has_fewer_nodes(name: str, fewer: int, bundle: Callable[..., Bundle]) -> None:
    apart, joined = (bundle(name, projections=form) for form in ("separate", "joined"))
    for file in ("prefill.onnx", "decode.onnx"):
        count = [len(onnx.load(each.path / file, load_external_data=False).graph.node) for each in (apart, joined)]
        assert count[0] - count[1] == fewer * len(apart.manifest.layers), count


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3"])
def test_no_weight_is_written_twice(name: str, bundle: Callable[..., Bundle]) -> None:
    apart, joined = (bundle(name, projections=form) for form in ("separate", "joined"))
    held, wanted = stored_weights(joined), stored_weights(apart)
    norms = sum(wanted[tensor].nbytes for tensor in wanted if tensor not in held and "_norm" in tensor)
    assert norms == 4 * 36 * 2 * len(joined.manifest.layers)
    unique = [each.manifest.weights.unique_bytes for each in (joined, apart)]
    assert unique[0] == unique[1] - norms == sum(tensor.nbytes for tensor in held.values())
    size, most = ((each.path / "weights.bin").stat().st_size for each in (joined, apart))
    assert abs(size - unique[0]) <= ALIGNMENT * len(held)
    assert size < most


def test_a_weight_is_the_product_of_what_the_checkpoint_holds(
    bundle: Callable[..., Bundle], checkpoint: Callable[[str], Path]
) -> None:
    """llama: N = 6, K = 2, D = 6, W = 50."""
    held = stored_weights(bundle("llama-bias", projections="joined"))
    whole = {weight.name: np.empty(weight.shape, np.float32) for weight in open(checkpoint("llama-bias"))}
    for weight in open(checkpoint("llama-bias")):
        weight.copy_to(whole[weight.name])
    layer, scale = "layers.1.", np.float32(6**-0.5)
    norm = whole[f"{layer}attention_norm.weight"][:, None]
    q, k, v = (whole[f"{layer}attention.{part}.weight"] * norm for part in "qkv")
    np.testing.assert_array_equal(held[f"{layer}attention.qkv.weight"], np.concatenate((q * scale, k, v), 1))
    q, k, v = (whole[f"{layer}attention.{part}.bias"] for part in "qkv")
    np.testing.assert_array_equal(held[f"{layer}attention.qkv.bias"], np.concatenate((q * scale, k, v)))
    norm = whole[f"{layer}mlp_norm.weight"][:, None]
    gate, up = (whole[f"{layer}mlp.{part}.weight"] * norm for part in ("gate", "up"))
    np.testing.assert_array_equal(held[f"{layer}mlp.gate_up.weight"], np.concatenate((gate, up), 1))
    gate, up = (whole[f"{layer}mlp.{part}.bias"] for part in ("gate", "up"))
    np.testing.assert_array_equal(held[f"{layer}mlp.gate_up.bias"], np.concatenate((gate, up)))
    assert f"{layer}attention_norm.weight" not in held
    np.testing.assert_array_equal(held["head.norm.weight"], whole["head.norm.weight"])


def open(folder: Path) -> tuple[Weight, ...]:
    return open_checkpoint(str(folder)).weights


def test_the_embedding_outside_and_graphs_of_several_sizes_take_the_same_weights(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = {"input": "embeds", "chunk_size": (4, 8), "context_buckets": (24,), "speculate": 3}
    made = export(checkpoint("qwen3"), tmp_path / "bundle", projections="joined", **settings)
    assert climb(made, checkpoint("qwen3")).fault is None


def test_an_adapter_is_merged_before_anything_is_joined(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    base = checkpoint("qwen2")
    lora = adapter(base, tmp_path / "adapter", target_modules=LINEARS)
    apart, joined = (export(base, tmp_path / form, lora=lora, projections=form) for form in ("separate", "joined"))
    wanted, got = (Session(made).prefill(range(11, 30)) for made in (apart, joined))
    assert np.abs(got - wanted).max() < 2e-5 * np.abs(wanted).max()
    report = verify_bundle(joined, open_checkpoint(str(base), lora=lora), lambda line: None)
    assert report.fault is None


def test_a_part_that_is_not_finite_is_refused_by_its_tensors(
    checkpoint: Callable[[str], Path], tmp_path: Path, run: Run
) -> None:
    from safetensors.numpy import load_file, save_file

    source = Path(shutil.copytree(checkpoint("llama"), tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 2] = np.inf
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    code, _, said = run("export", source, "-o", tmp_path / "out", "--projections", "joined", *LENGTHS)
    assert code == 2
    attention = "model.layers.0.self_attn"
    assert f"tensor {attention}.q_proj.weight or tensor {attention}.k_proj.weight or tensor {attention}.v_proj" in said
    assert "holds a value that is not finite" in said


# The manifest


def test_the_manifest_says_the_form_and_the_options_are_read_back(bundle: Callable[..., Bundle]) -> None:
    for form in ("separate", "joined"):
        m = bundle("llama", projections=form).manifest
        assert m.projections == form
        assert options_of(m).projections == form


def test_a_target_that_wants_the_joined_form_gets_it_where_the_model_has_it(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from rollkv.export.signature import resolve
    from rollkv.export.targets import TARGETS

    llama, gemma = (open_checkpoint(str(path)).config for path in (checkpoint("llama"), gemma4_models.save(tmp_path)))
    htp = TARGETS["qualcomm-htp"]
    assert resolve(llama, target=htp).projections == "joined"
    assert resolve(llama, target=htp, projections="separate").projections == "separate"
    assert resolve(llama, target=TARGETS["rk3588"]).projections == "separate"
    assert resolve(gemma, target=htp).projections == "separate"


def test_a_manifest_without_the_key_is_of_the_separate_form(
    bundle: Callable[..., Bundle], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    older = changed(bundle("llama", projections="separate").path, tmp_path / "older", projections=None)
    assert older.manifest.projections == "separate"
    assert climb(older, checkpoint("llama")).fault is None


@pytest.mark.parametrize(("has", "says"), [("separate", "joined"), ("joined", "separate")])
def test_a_manifest_that_says_the_other_form_is_found(
    has: str, says: str, bundle: Callable[..., Bundle], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    false = changed(bundle("llama", projections=has).path, tmp_path / "false", projections=says)
    fault = climb(false, checkpoint("llama")).fault
    assert fault is not None
    assert fault.startswith("rung files, manifest: weights.unique_bytes is ")
    assert str(weight_fault(false, open_checkpoint(str(checkpoint("llama"))))).startswith("weights: layers.0.")


# What is refused


def test_a_form_that_there_is_not_is_refused_on_the_command_line(run: Run, tmp_path: Path) -> None:
    said = user_error(run("export", "m", "-o", tmp_path / "out", "--projections", "fused"))
    assert "argument --projections: invalid choice: 'fused'" in said


def test_the_command_line_exports_the_form(source: Path, tmp_path: Path, run: Run) -> None:
    for form, flags in (("joined", ["--projections", "joined"]), (DEFAULT_PROJECTIONS, [])):
        code, _, _ = run("export", source, "-o", tmp_path / "out", *flags, *LENGTHS)
        assert code == 0
        assert open_bundle(tmp_path / "out").manifest.projections == form


def test_gemma_4_has_the_separate_form_only(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gemma4_models.save(tmp_path / "source", **GEMMA4)
    cfg = open_checkpoint(str(source)).config
    said = "--projections is 'joined', allowed: separate; a Gemma 4 layer has a form of its own"
    with pytest.raises(ExportError) as caught:
        resolve(cfg, projections="joined")
    assert str(caught.value) == said
    assert said in user_error(run("export", source, "-o", tmp_path / "out", "--projections", "joined", *LENGTHS))
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("rollkv.models.projections.DEFAULT_PROJECTIONS", "joined")
    assert resolve(cfg).projections == default_projections(cfg) == "separate"
    assert resolve(config()).projections == "joined"


def test_the_default_is_kept_in_one_place() -> None:
    lengths = {"max_lm_input_len": 4, "chunk_sizes": (2,), "max_kvcache_len": 8}
    assert ExportOptions(**lengths).projections == resolve(config()).projections == DEFAULT_PROJECTIONS
