"""`--head split`: the head is a graph of its own. Its logits, its weights, its runs, its hand-off, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundle_exports import content
from conftest import export
from proof import MODELS
from test_verify import _resign, climb

from rollkv.export.bundle_audit import audit_bundle
from rollkv.export.feeds import RecordingBackend, feed_fault
from rollkv.export.handoff import hand_over
from rollkv.export.signature import ExportError, options_of, resolve
from rollkv.export.targets import TARGETS
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle, BundleError, open_bundle
from rollkv.runtime.info import describe
from rollkv.runtime.session import Session

Source = Callable[[str], Path]
IDS = [1, *range(7, 27)]  # 21 tokens: for c = 8 the first run has 3 pads


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name].save(tmp_path_factory.mktemp("source") / name)
        return made[name]

    return get


@pytest.fixture(scope="module")
def split(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(source("llama"), tmp_path_factory.mktemp("split") / "bundle", head="split")


# What it computes


@pytest.mark.filterwarnings("ignore:this bundle is float16")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama-square", {"kv_layout": "bksd"}),  # a tied head
        ("gemma2", {"kv_layout": "bksd-kt"}),  # a soft-cap, windows
        ("granite", {"opset": 23, "norm": "native"}),  # scaled logits
        ("phi", {"input": "embeds"}),  # a bias
        ("llama", {"dtype": "float16"}),
        ("llama", {"chunk_size": (4, 8), "context_buckets": (24,), "projections": "joined", "rope": "feed"}),
    ],
)
def test_the_ladder_climbs_a_bundle_whose_head_is_a_graph(
    source: Source, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    made = export(source(name), tmp_path / "bundle", head="split", **settings)
    assert climb(made, source(name)).fault is None
    m = made.manifest
    assert (m.head_table, m.head_bias, m.logit_scale, m.logit_softcap) == (None, None, 1.0, None)
    assert options_of(m).head == "split"
    assert [graph.file for graph in m.graphs if graph.role == "head"] == ["head.onnx"]


@pytest.mark.parametrize("name", ["llama", "llama-square", "gemma2", "phi"])
def test_its_logits_and_its_stored_bytes_are_those_of_a_head_inside(source: Source, tmp_path: Path, name: str) -> None:
    split, inside = (export(source(name), tmp_path / head, head=head) for head in ("split", "last"))
    sessions = [Session(made) for made in (split, inside)]
    for feed in (lambda s: s.prefill(IDS), lambda s: s.decode(5), lambda s: s.decode(9)):
        got, wanted = (feed(session) for session in sessions)
        assert np.abs(got - wanted).max() <= 1e-6 * np.abs(wanted).max()
    sizes = [(made.path / made.manifest.weights.file).stat().st_size for made in (split, inside)]
    assert sizes[0] == sizes[1]


def test_the_product_is_in_the_head_s_graph_alone(split: Bundle) -> None:
    vocab = split.manifest.vocab_size
    for info in split.manifest.graphs:
        model = onnx.load(split.path / info.file, load_external_data=False)
        ends = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.output}
        assert ("logits" in ends) == (info.role == "head")
        assert ends["logits" if info.role == "head" else "hidden_states"][-1] == (
            vocab if info.role == "head" else split.manifest.hidden_size
        )


def test_the_head_runs_after_the_last_run_of_a_prompt_and_each_step(split: Bundle) -> None:
    recorder = RecordingBackend(OrtBackend(split))
    session = Session(split, backend=recorder)
    session.prefill(IDS)
    session.decode(3)
    roles = [graph.role for graph, _, _ in recorder.runs]
    assert roles == ["prefill", "prefill", "prefill", "head", "decode", "head"]
    for (_, _, before), (_, feeds, _) in (recorder.runs[2:4], recorder.runs[4:6]):
        np.testing.assert_array_equal(feeds["hidden_states"], before["hidden_states"])


def test_a_head_that_is_fed_something_else_is_found(split: Bundle) -> None:
    class Changing(RecordingBackend):
        def run(self, graph: Any, feeds: Any) -> Any:
            feeds = {name: array + 1 for name, array in feeds.items()} if graph.role == "head" else feeds
            return super().run(graph, feeds)

    for kind, fault in ((RecordingBackend, None), (Changing, "graph head.onnx is fed another hidden state than")):
        recorder = kind(OrtBackend(split))
        found = feed_fault(Session(split, backend=recorder), recorder, IDS)
        assert found is None if fault is None else str(found).startswith(fault)


def test_a_wrong_weight_of_the_head_is_found_by_the_ladder(source: Source, tmp_path: Path) -> None:
    made = export(source("llama"), tmp_path / "bundle", head="split")
    file = made.path / "head.onnx"
    model = onnx.load(file, load_external_data=False)
    external = {entry.key: entry for entry in model.graph.initializer[0].external_data}
    external["offset"].value = str(int(external["offset"].value) - 64)
    onnx.save(model, file)
    assert climb(_resign(made), source("llama")).fault is not None


# What is said of it


def test_info_and_audit_know_it(split: Bundle) -> None:
    lines = [text for name, text in describe(split.manifest) if name == "graph"]
    assert lines[-1].startswith("head.onnx: head, logits of a hidden state, opset 17")
    findings = audit_bundle(split, TARGETS["axera"]).findings
    assert not [f for f in findings if "head" in f.text]
    warned = [f for f in audit_bundle(split, TARGETS["universal"]).findings if f.text.startswith("head is split")]
    assert [f.cure for f in warned] == ["--head last"]


def test_logits_of_every_row_for_speculation_are_refused(source: Source) -> None:
    config = open_checkpoint(str(source("llama"))).config
    with pytest.raises(ExportError) as caught:
        resolve(config, max_lm_input_len=40, chunk_size=8, max_kvcache_len=48, head="split", speculate=4)
    assert str(caught.value) == (
        "--speculate is 4, but --head split gives the hidden state of the last row alone; allowed: either"
    )


def test_axera_s_profile_has_it(source: Source) -> None:
    config = open_checkpoint(str(source("llama"))).config
    assert resolve(config, target=TARGETS["axera"]).head == "split"


# The hand-off


@pytest.mark.parametrize("target", ["axera", "sophgo-bm1684x", "universal"])
def test_a_hand_off_has_samples_and_golden_runs_of_the_head(source: Source, tmp_path: Path, target: str) -> None:
    form = {**TARGETS[target].form(), "head": "split"}
    made = export(source("llama"), tmp_path / "bundle", **form)
    text = tmp_path / "ids.jsonl"
    text.write_text(json.dumps({"ids": [1, *range(7, 300)]}) + "\n")
    folder = tmp_path / "hand off"
    hand_over(made, text, folder, TARGETS[target], samples=4)
    data = json.loads((folder / "handoff.json").read_text())
    assert data["calibration"]["graphs"]["head"]["samples"] == 4
    runs = data["golden_runs"]
    assert len(runs["head"]) == 6
    assert {run["pads"] for run in runs["head"]} == {0}
    # the same places of the text as the golden runs of the graphs before it, so their hidden states are what it is fed
    before = [run for name in ("prefill", "decode") for run in runs[name]]
    for run, other in zip(runs["head"], before, strict=True):
        fed = np.load(folder / run["path"] / "inputs" / "hidden_states.npy")
        np.testing.assert_array_equal(fed, np.load(folder / other["path"] / "outputs" / "hidden_states.npy"))
    done = subprocess.run(
        [sys.executable, "replay.py", "--onnxruntime"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("README.md", "README.zh.md"):
        said = (folder / page).read_text(encoding="utf-8")
        assert "`head.onnx`" in said
        assert "head_table" not in said
        assert "{" not in said


# What is refused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw["graphs"].pop(), "head_table is missing, which graphs with head none need where no graph has"),
        (lambda raw: raw["graphs"].append(raw["graphs"][-1]), "have the role head, must be one or none"),
        (lambda raw: raw["graphs"][-1].update(rows=2), "head.onnx: rows is 2, must be 1 in a graph of the role head"),
        (lambda raw: raw["graphs"][-1].update(kv_len=48), "head.onnx: kv_len is 48, must be 0 in a graph of the role"),
        (
            lambda raw: raw["graphs"][-1].update(head="all"),
            "head.onnx: head is 'all', must be 'last' in a graph of",
        ),
        (
            lambda raw: raw["graphs"][-1]["inputs"][0].update(shape=[1, 2, 36]),
            "hidden_states has shape [1, 2, 36], must be [1, 1, 36]",
        ),
        (
            lambda raw: raw["graphs"][-1]["outputs"][0].update(role="hidden_states"),
            "its outputs have the roles ['hidden_states'], must be ['logits']",
        ),
        (
            lambda raw: raw["graphs"][-1]["inputs"][0].update(dtype="float16"),
            "hidden_states has dtype 'float16', but graph prefill.onnx gives 'float32'",
        ),
        (lambda raw: raw.update(logit_scale=2.0), "so logit_scale and logit_softcap are in it; must be 1 and null"),
        (
            lambda raw: [graph.update(head="last") for graph in raw["graphs"][:2]],
            "graph head.onnx has the role head, but no graph has head none",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    split: Bundle, tmp_path: Path, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    raw = json.loads((split.path / "manifest.json").read_text())
    change(raw)
    folder = tmp_path / "bundle"
    folder.mkdir()
    for name in content(split.path):
        (folder / name).write_bytes((split.path / name).read_bytes())
    (folder / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert says in str(caught.value)
