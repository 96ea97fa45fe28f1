"""Ranges are what transformers computes, the first overflow is the first, and float16 is emulated bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from conftest import export, make_checkpoint
from onnx import TensorProto, helper

from rollkv.export.bundle_audit import audit_bundle
from rollkv.export.emulation import Float16Backend, agreement, rounded
from rollkv.export.ranges import measure
from rollkv.export.targets import TARGETS
from rollkv.export.verify_float16 import Divergence, diverge
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle, open_bundle
from rollkv.runtime.session import Session

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model whose residual stream reaches thousands from the second layer on, as real ones do."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path_factory.mktemp("loud") / "source", "llama", num_hidden_layers=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[5] *= 300
    model.save_pretrained(folder)
    return export(folder, folder.parent / "bundle")


def hidden_states(folder: Path, ids: list[int]) -> list[np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    states: list[np.ndarray] = []
    for layer in model.model.layers:  # transformers gives the last state after its norm only
        layer.register_forward_hook(
            lambda _m, _i, out: states.append((out if torch.is_tensor(out) else out[0]).numpy())
        )
    with torch.no_grad():
        model(torch.tensor([ids]))
    return states


def test_residuals_and_squares_are_those_of_transformers(loud: Bundle) -> None:
    ids = [1, *range(40, 63)]  # three full chunks: no row of pads
    ranges = measure(loud, ids, steps=0)
    states = hidden_states(loud.path.parent / "source", ids)
    for layer, reading in ranges.of("residual").items():
        assert reading.largest == pytest.approx(float(np.abs(states[layer]).max()), rel=1e-4)
    squares = ranges.of("square")
    assert squares[2].largest >= float(np.square(states[1]).max()) * (1 - 1e-4)
    assert ranges.hidden_rows == 0
    assert len(ranges.runs) == 3


def test_scores_are_the_products_of_queries_and_keys(loud: Bundle) -> None:
    """The score of a one-token prompt's own slot in the first layer, from the weights in NumPy: nothing is turned."""
    from safetensors.numpy import load_file

    source = loud.path.parent / "source"
    weights, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    token = 17
    x = weights["model.embed_tokens.weight"][token]
    x = x / np.sqrt(np.mean(x * x) + config["rms_norm_eps"]) * weights["model.layers.0.input_layernorm.weight"]
    q = (weights["model.layers.0.self_attn.q_proj.weight"] @ x).reshape(2, 3, 6)
    k = (weights["model.layers.0.self_attn.k_proj.weight"] @ x).reshape(2, 1, 6)
    wanted = np.abs((q * k).sum(-1) / np.sqrt(6)).max()
    # The pads of the run have keys of their own, so the decode graph is looked at: one row, an empty cache.
    from rollkv.export.ranges import plain_session, watched

    info = next(graph for graph in loud.manifest.graphs if graph.role == "decode")
    model, readings = watched(loud, info)
    feeds = {value.name: np.zeros(value.shape, value.dtype) for value in info.inputs}
    feeds["input_ids"][...] = token
    names = [f"max/{i}" for i, r in enumerate(readings) if r.kind == "score" and r.layer == 0]
    got = plain_session(loud, model).run(names, feeds)  # type: ignore[attr-defined]
    assert max(map(float, got)) == pytest.approx(float(wanted), rel=1e-4)


def test_pads_are_counted_as_rows_that_see_nothing(loud: Bundle) -> None:
    assert measure(loud, [1, 5, 6], steps=1).hidden_rows == 5


def test_the_first_overflow_is_named_with_its_layer_and_the_flag_that_cures_it(loud: Bundle) -> None:
    audit = audit_bundle(loud, TARGETS["universal"])
    first = next(finding for finding in audit.findings if finding.rule == "float16")
    assert first.text.startswith("the first overflow of float16 is x x of a norm in layer 2: ")
    assert first.cure == "--norm rowmax"
    assert next(row["layer"] for row in audit.layers() if row["overflows"]) == 2
    assert any(f.rule == "float16" and f.level == "refused" for f in audit.findings)


def test_a_model_of_small_numbers_is_the_same_in_float16(bundle: Callable[..., Bundle]) -> None:
    audit = audit_bundle(bundle("llama"), TARGETS["universal"])
    assert audit.float16 is not None
    assert audit.float16.fault is None
    assert audit.float16.law.kl < 1e-3
    assert not [f for f in audit.findings if f.rule == "float16"]


def test_a_mask_value_that_scores_reach_is_found(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    shallow = export(checkpoint("llama"), tmp_path / "shallow", mask_value=-2.0)
    texts = [str(f) for f in audit_bundle(shallow, TARGETS["universal"]).findings if f.rule == "mask"]
    assert any("which the mask value -2 does not hide; cure: a --mask-value of larger magnitude" in t for t in texts)


def test_one_scale_over_scores_and_mask_is_found_and_its_cure_is_no_finding(
    checkpoint: Callable[[str], Path], bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    found = [f for f in audit_bundle(bundle("llama"), TARGETS["universal"]).findings if f.rule == "int16"]
    cure = next(f.cure for f in found if "one 16-bit scale" in f.text)
    assert cure is not None
    value = float(cure.split(",")[0].removeprefix("--mask-value="))
    cured = audit_bundle(export(checkpoint("llama"), tmp_path / "cured", mask_value=value), TARGETS["universal"])
    assert not [f for f in cured.findings if "one 16-bit scale" in f.text or f.rule == "mask"]


def test_every_value_of_the_emulation_is_a_float16_number_and_overflow_is_infinite() -> None:
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"], "a"),
        helper.make_node("Add", ["square", "x"], ["y"], "b"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, [4])],
        [value("y", TensorProto.FLOAT, [4])],
        value_info=[value("square", TensorProto.FLOAT, [4])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    x = np.array([0.1, 3.14159, 255.9, 300.0], np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        rounded(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    narrow = x.astype(np.float16).astype(np.float32)
    with np.errstate(over="ignore"):
        square = (narrow * narrow).astype(np.float16).astype(np.float32)
        wanted = (square + narrow).astype(np.float16).astype(np.float32)
    assert np.isinf(wanted[3])
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], wanted)


def test_the_emulation_of_a_bundle_differs_from_float32_by_what_float16_rounds(bundle: Callable[..., Bundle]) -> None:
    made = bundle("llama")
    ids = [1, *range(50, 70)]
    exact = Session(made, backend=OrtBackend(made)).prefill(ids)
    emulated = Session(made, backend=Float16Backend(made)).prefill(ids)
    error = float(np.abs(exact - emulated).max() / np.abs(exact).max())
    assert 1e-5 < error < 2e-2  # an ulp of float16 is 1e-3 of a number
    assert np.array_equal(emulated, emulated.astype(np.float16).astype(np.float32))


def test_agreement_of_a_backend_with_itself_is_whole(bundle: Callable[..., Bundle]) -> None:
    made = bundle("llama")
    engine = OrtBackend(made)
    same = agreement(made, engine, engine, [1, *range(50, 70)], 4)
    assert same.law == Divergence(kl=0.0, top1=5, near_ties=0, positions=5)
    assert (same.max_abs, same.fault) == (0.0, None)
    assert same.cosine == pytest.approx(1.0)


def test_divergence_is_that_of_the_definition() -> None:
    a, b = np.array([1.0, 2.0, 3.0]), np.array([3.0, 1.0, 0.0])
    p, q = (np.exp(x) / np.exp(x).sum() for x in (a, b))
    assert diverge([a], [b]).kl == pytest.approx(float((p * np.log(p / q)).sum()))
    assert diverge([a], [a + 5]).kl == pytest.approx(0.0, abs=1e-12)


def test_the_command_prints_every_layer_and_strict_exits_with_1(loud: Bundle, run: Run) -> None:
    code, out, err = run("audit", loud.path)
    assert (code, err) == (0, "")
    assert "the first overflow of float16 is x x of a norm in layer 2" in out.replace("\n", " ").replace("  ", " ")
    code, out, err = run("audit", loud.path, "--strict", "--json")
    assert code == 1
    assert err.startswith("rollkv: ")
    assert err.count("\n") == 1
    said = json.loads(out)
    assert [row["layer"] for row in said["layers"]] == [0, 1, 2]
    assert said["target"] == "universal"
    assert {"rule", "level", "text", "cure", "graph"} == set(said["findings"][0])


def test_the_command_runs_nothing_when_told_so_and_refuses_an_unknown_target(loud: Bundle, run: Run) -> None:
    code, out, _ = run("audit", loud.path, "--no-run", "--json", "--target", "rk3588")
    assert code == 0
    assert json.loads(out)["layers"] == []
    code, out, err = run("audit", loud.path, "--target", "tpu")
    assert (code, out) == (2, "")
    assert err.startswith("rollkv: target 'tpu' is unknown; allowed: universal, rk3588")


def test_the_command_runs_the_users_own_text(text_bundle: Bundle, tmp_path: Path, run: Run) -> None:
    said = []
    for text in ("The lighthouse keeper counts ships. " * 9, "Zwölf Boxkämpfer jagen Viktor quer. " * 9):
        (tmp_path / "own.txt").write_text(text, encoding="utf-8")
        code, out, err = run("audit", text_bundle.path, "--json", "--data", tmp_path / "own.txt")
        assert (code, err) == (0, "")
        said.append(json.loads(out)["layers"])
    assert said[0] != said[1]
    (tmp_path / "own.txt").write_bytes(b"")
    code, out, err = run("audit", text_bundle.path, "--data", tmp_path / "own.txt")
    assert (code, out) == (2, "")
    assert err == f"rollkv: --data {tmp_path / 'own.txt'}: is empty; give a text of what the model will be asked\n"


def test_the_targets_command_lists_every_profile_and_the_limits_of_one(run: Run) -> None:
    code, out, err = run("targets")
    assert (code, err) == (0, "")
    assert all(name in out for name in TARGETS)
    code, out, _ = run("targets", "rk3588")
    assert code == 0
    for note in TARGETS["rk3588"].notes:
        assert note.text.split(";")[0][:40] in out
    code, out, _ = run("targets", "--json")
    assert [entry["name"] for entry in json.loads(out)] == list(TARGETS)


def test_reopening_gives_the_same_audit(loud: Bundle) -> None:
    again = audit_bundle(open_bundle(loud.path), TARGETS["universal"])
    assert again.to_dict() == audit_bundle(loud, TARGETS["universal"]).to_dict()
