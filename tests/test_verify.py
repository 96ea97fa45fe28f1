"""The ladder names the rung and the layer when something is broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import export, make_checkpoint

from rollkv.export import reference, verify
from rollkv.export.names import plain_name
from rollkv.export.write import Placed, map_tensor
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime.bundle import Bundle, open_bundle
from rollkv.runtime.session import Session


def climb(bundle: Bundle, checkpoint: Path) -> verify.Report:
    return verify.verify_bundle(bundle, open_checkpoint(str(checkpoint)), lambda line: None)


def _tensor(bundle: Bundle, name: str) -> np.ndarray:
    model = onnx.load(bundle.path / "prefill.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name == plain_name(name))
    where = {entry.key: entry.value for entry in tensor.external_data}
    place = Placed(int(where["offset"]), int(where["length"]), tuple(tensor.dims))
    return map_tensor(bundle.path / "weights.bin", place, "r+")


def _resign(bundle: Bundle) -> Bundle:
    """Give the manifest the hashes of the files as they now are."""
    from rollkv.export.write import file_infos

    file = bundle.path / "manifest.json"
    raw = json.loads(file.read_text())
    file.unlink()
    infos = file_infos(bundle.path)
    raw["files"] = {name: {"size": info.size, "sha256": info.sha256} for name, info in infos.items()}
    file.write_text(json.dumps(raw))
    return open_bundle(bundle.path)


def test_a_wrong_weight_is_found_before_anything_runs(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    made = export(checkpoint("llama"), tmp_path / "bundle")
    _tensor(made, "layers.1.attention.k.weight")[3, 2] *= 1.5
    report = climb(_resign(made), checkpoint("llama"))
    assert report.fault == "rung files, weights: layers.1.attention.k.weight differs from the checkpoint"
    assert [row.rung for row in report.rows] == ["files"]


def test_a_position_beyond_every_prompt_is_proved_too(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    made = export(checkpoint("llama"), tmp_path / "bundle")
    _tensor(made, "rope.full.sin")[255, 0] += 1e-3
    report = climb(_resign(made), checkpoint("llama"))
    assert report.fault == "rung files, weights: rope.full.sin is missing, or not the table of the model's positions"


def test_a_wrong_weight_shows_in_its_layer_and_a_wrong_head_in_no_layer(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "weight_fault", lambda *_: None)
    made = export(checkpoint("llama"), tmp_path / "layer")
    _tensor(made, "layers.1.attention.k.weight")[3] *= 1.5
    report = climb(_resign(made), checkpoint("llama"))
    assert report.fault is not None
    assert report.fault.startswith("rung traced, prompt of 1: new keys or values of layer 1 are off")
    assert all(row.holds for row in report.rows if row.rung == "torch")
    made = export(checkpoint("llama"), tmp_path / "head")
    _tensor(made, "head.weight")[:, 7] += 0.5
    report = climb(_resign(made), checkpoint("llama"))
    assert report.fault is not None
    assert "rung traced, prompt of 1: logits are off by" in report.fault


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("rope", "full", "inv_freq", 1), 0.5, "rope.full.inv_freq[1] is 0.5, must be 0.0464158"),
        (("rope", "full", "attention_scaling"), 2.0, "rope.full.attention_scaling is 2.0, must be 1.0"),
        (("hidden_size",), 99, "hidden_size is 99, must be 36"),
        (("eos_token_ids",), [], "eos_token_ids is [], must be [2]"),
        (("max_position",), 300, "max_position is 300, must be 256"),
        (("graphs", 0, "opset"), 13, "graphs[1].opset is 17, must be 13"),
        (("weights", "unique_bytes"), 5, "weights.unique_bytes is 5, must be"),
        (("bos_token_id",), 5, "bos_token_id is 5, must be 1"),
    ],
)
def test_a_false_manifest_is_found_by_its_field(
    path: tuple[str | int, ...], value: Any, says: str, checkpoint: Callable[[str], Path],
    bundle: Callable[..., Bundle], tmp_path: Path,
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(bundle("llama").path, tmp_path / "copy"))
    raw = json.loads((folder / "manifest.json").read_text())
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(raw))
    report = climb(open_bundle(folder), checkpoint("llama"))
    assert report.fault is not None
    assert report.fault.startswith(f"rung files, manifest: {says}"), report.fault


def test_an_extra_node_is_found_by_the_audit_of_the_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    made = export(checkpoint("llama"), tmp_path / "bundle")
    model = onnx.load(made.path / "decode.onnx", load_external_data=False)
    model.graph.node.append(onnx.helper.make_node("Shape", ["logits"], ["unread"]))
    (made.path / "decode.onnx").write_bytes(model.SerializeToString())
    report = climb(_resign(made), checkpoint("llama"))
    assert report.fault == "rung files, decode.onnx: op Shape is not allowed"


def test_a_graph_that_a_pass_would_have_spoilt_is_found_after_the_traced_rung(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    made = export(checkpoint("llama"), tmp_path / "bundle")
    for file in ("prefill.onnx", "decode.onnx"):
        model = onnx.load(made.path / file, load_external_data=False)
        node = next(n for n in model.graph.node if n.op_type == "Sigmoid" and n.name.startswith("layers__0__"))
        node.op_type = "Softmax"
        (made.path / file).write_bytes(model.SerializeToString())
    report = climb(_resign(made), checkpoint("llama"))
    assert report.fault is not None
    assert report.fault.startswith("rung graph, prompt of 1: new keys or values of layer 1 are off")


def test_a_host_that_shifts_positions_is_found_on_the_runtime_rung(
    checkpoint: Callable[[str], Path], bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollkv.runtime import feeds

    right = feeds.run_positions

    def wrong(past: int, pads: int, rows: int) -> np.ndarray:
        return right(past + (past >= 8), pads, rows)

    monkeypatch.setattr(feeds, "run_positions", wrong)
    report = climb(bundle("llama"), checkpoint("llama"))
    broken = [row for row in report.rows if not row.holds]
    assert {row.rung for row in broken} == {"runtime", "roll", "feeds"}
    assert any(row.fault and "positions" in row.fault for row in broken if row.rung == "feeds")


def test_a_host_that_shows_a_pad_is_found_by_the_audit_of_the_feeds(
    checkpoint: Callable[[str], Path], bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollkv.runtime import feeds

    right = feeds.fill_mask

    def wrong(mask: np.ndarray, past: int, pads: int, mask_value: float, window: int | None = None) -> None:
        right(mask, past, pads, mask_value, window)
        if pads:
            mask[:, mask.shape[1] - mask.shape[0]] = 0.0

    monkeypatch.setattr(feeds, "fill_mask", wrong)
    report = climb(bundle("llama"), checkpoint("llama"))
    assert any(row.rung == "feeds" and row.fault and "attention_mask" in row.fault for row in report.rows)


def test_leaving_rope_scaling_out_would_be_found(tmp_path: Path) -> None:
    scaled = make_checkpoint(tmp_path / "scaled", "llama3")
    config = json.loads((scaled / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    (plain / "model.safetensors").write_bytes((scaled / "model.safetensors").read_bytes())
    made = export(plain, tmp_path / "bundle")
    wanted, tokens = reference.Reference(open_checkpoint(str(scaled)), 48).greedy(list(range(3, 43)), 2)
    row = verify.compare("runtime", 40, wanted, verify.follow_session(Session(made), list(range(3, 43)), tokens), 1e-4)
    assert row.fault is not None


def test_a_checkpoint_that_is_not_the_bundles_is_refused(
    checkpoint: Callable[[str], Path], bundle: Callable[..., Bundle]
) -> None:
    with pytest.raises(
        verify.ReferenceMismatch, match="not the checkpoint of this bundle, which was made from 'llama'"
    ):
        climb(bundle("llama"), checkpoint("llama-bias"))


def test_nan_in_a_layer_is_named_with_that_layer() -> None:
    keys = {0: np.ones((2, 1, 2)), 1: np.ones((2, 1, 2))}
    wanted = reference.Trail([np.array([1.0, 2.0])], keys, keys)
    broken = {0: np.ones((2, 1, 2)), 1: np.full((2, 1, 2), np.nan)}
    row = verify.compare("graph", 1, wanted, reference.Trail(wanted.logits, keys, broken), 1.0)
    assert row.fault == "new keys or values of layer 1 are off by nan of their largest (bound 1e-03)"
    report = verify.Report("b", "s", [row]).to_dict()
    assert report["rows"][0]["kv_relative"] is None
    json.dumps(report, allow_nan=False)


def test_a_model_without_a_position_beyond_c_says_that_the_roll_was_skipped(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    made = export(checkpoint("llama"), tmp_path / "bundle", max_kvcache_len=256)
    report = climb(made, checkpoint("llama"))
    assert report.fault is None
    assert [row.skipped for row in report.rows if row.rung == "roll"] == [
        "C is all the positions of the model, nothing can be forgotten"
    ]


def test_nan_never_passes_a_bound() -> None:
    good = reference.Trail([np.array([1.0, 2.0])])
    bad = reference.Trail([np.array([1.0, np.nan])])
    row = verify.compare("graph", 1, good, bad, 1.0)
    assert row.fault is not None


@pytest.mark.filterwarnings("error")
def test_a_reference_that_is_all_zero_is_met_by_zero_alone() -> None:
    """As after a lone token whose embedding is zero: families that name a pad id have such a row."""
    zero = {0: np.zeros((1, 2, 3))}
    wanted = reference.Trail([np.zeros(3)], zero, zero)
    same = verify.compare("graph", 1, wanted, wanted, 1e-4)
    assert (same.relative, same.kv_relative, same.fault) == (0.0, 0.0, None)
    logits = verify.compare("graph", 1, wanted, reference.Trail([np.array([0.0, 1e-9, 0.0])], zero, zero), 1e-4)
    assert logits.fault == "logits are off by 1e-09, inf of the largest (bound 1e-04)"
    keys = verify.compare("graph", 1, wanted, reference.Trail([np.zeros(3)], {0: np.ones((1, 2, 3))}, zero), 1e-4)
    assert str(keys.fault).startswith("new keys or values of layer 0 are off by inf")
    nothing = verify.compare("graph", 1, wanted, reference.Trail([np.full(3, np.nan)], zero, zero), 1e-4)
    assert nothing.fault is not None


def test_a_different_argmax_passes_only_as_a_near_tie() -> None:
    wanted = reference.Trail([np.array([10.0, 9.99999, 0.0])])
    near = verify.compare("graph", 1, wanted, reference.Trail([np.array([9.99999, 10.0, 0.0])]), 1e-4)
    assert (near.top1, near.near_ties, near.fault) == (0, 1, None)
    wanted = reference.Trail([np.array([10.0, 8.5, 0.0])])
    far = verify.compare("graph", 1, wanted, reference.Trail([np.array([9.1, 9.2, 0.0])]), 0.1)
    assert far.fault == "argmax differs in 1 of 1 steps"


def test_the_oracle_shows_a_query_what_its_run_can_hold() -> None:
    visible = reference.oracle_visible([2, 2, 1], slots=3)
    assert visible.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_a_model_that_transformers_cannot_run_is_said(
    checkpoint: Callable[[str], Path], bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise TypeError("no such beta")

    monkeypatch.setattr(verify.Reference, "greedy", fails)
    with pytest.raises(verify.ReferenceMismatch, match="llama: transformers cannot run this model: no such beta"):
        climb(bundle("llama"), checkpoint("llama"))
