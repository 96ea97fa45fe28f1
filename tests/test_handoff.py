"""A handoff's folder: what lies in it, that it runs elsewhere, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundle_exports import content

from rollkv.export import handoff
from rollkv.export.handoff import build_script, hand_over
from rollkv.export.handoff_data import WRITERS
from rollkv.export.handoff_words import CHINESE, ENGLISH, Words
from rollkv.export.targets import TARGETS
from rollkv.runtime.bundle import Bundle

UNTARGETED = "the bundle was exported for no target: samples are .npz, as for universal; --target takes another format"


@pytest.fixture(scope="module")
def folder(text_bundle: Bundle, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A handoff of 5 samples for no target."""
    output = tmp_path_factory.mktemp("hand off") / "földer"
    hand_over(text_bundle, text_file, output, TARGETS["universal"], samples=5)
    return output


def python(*arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)


# What lies in it


def test_every_file_is_where_handoff_json_says(folder: Path, text_bundle: Bundle) -> None:
    data = json.loads((folder / "handoff.json").read_text("utf-8"))
    m = text_bundle.manifest
    assert (data["format"], data["target"], data["tool"], data["precision"]) == (1, "universal", None, "float16")
    assert (data["max_lm_input_len"], data["chunk_size"], data["max_kvcache_len"]) == (120, 8, 160)
    assert [(g["name"], g["file"], g["rows"], g["kv_len"]) for g in data["graphs"]] == [
        ("prefill", "prefill.onnx", 8, 160),
        ("decode", "decode.onnx", 1, 160),
    ]
    for graph, info in zip(data["graphs"], m.graphs, strict=True):
        for part in ("inputs", "outputs"):
            listed = [(v["name"], v["shape"], v["dtype"], v["role"]) for v in graph[part]]
            assert listed == [(v.name, v.shape, v.dtype, v.role) for v in getattr(info, part)]
        for k, path in enumerate(data["golden"][graph["name"]]):
            assert path == f"golden/{graph['name']}/{k}"
            for part in ("inputs", "outputs"):
                names = {f"{value['name']}.npy" for value in graph[part]}
                assert {file.name for file in (folder / path / part).iterdir()} == names
        assert len(data["golden"][graph["name"]]) == 3
    assert data["calibration"]["graphs"]["decode"] == {"samples": 5, "path": "calibration/decode", "list": None}
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *m.files,
        "README.md",
        "README.zh.md",
        "handoff.json",
        "SHA256SUMS",
        "replay.py",
        "build.py",
        "jobs.py",
    } | {
        "calibration",
        "golden",
    }


def test_the_checksums_cover_every_file(folder: Path) -> None:
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {line.rpartition(": ")[0] for line in done.stdout.splitlines()} == {*content(folder)} - {"SHA256SUMS"}


def test_golden_runs_are_a_padded_first_chunk_a_full_one_the_fullest_cache_and_three_steps(folder: Path) -> None:
    runs = json.loads((folder / "handoff.json").read_text("utf-8"))["golden_runs"]
    prefill = [(run["past"], run["pads"]) for run in runs["prefill"]]
    assert prefill == [(0, 3), (76, 0), (152, 0)]
    assert runs["prefill"][0]["ids"][0] == 0  # BOS of this tokenizer
    first, *later = [run["past"] for run in runs["decode"]]
    assert later == [first + 1, first + 2]
    mask = np.load(folder / "golden/prefill/2/inputs/attention_mask.npy")[0, 0]
    assert (mask[-1] == 0).all()  # C slots are seen
    ids = np.load(folder / "golden/prefill/0/inputs/input_ids.npy")
    assert ids.tolist() == [[0, 0, 0, *runs["prefill"][0]["ids"]]]


def test_golden_steps_follow_each_other(folder: Path) -> None:
    """The cache of a step is that of the step before, rolled by one slot."""
    for k in (0, 1):
        for name in ("key_0", "value_0", "key_1", "value_1"):
            past = np.load(folder / f"golden/decode/{k}/inputs/past_{name}.npy")
            new = np.load(folder / f"golden/decode/{k}/outputs/new_{name}.npy")
            following = np.load(folder / f"golden/decode/{k + 1}/inputs/past_{name}.npy")
            assert np.array_equal(following, np.concatenate((past, new), 1)[:, 1:])


def test_samples_are_spread_over_first_chunks_and_full_and_partly_filled_caches(
    text_bundle: Bundle, text_file: Path, tmp_path: Path
) -> None:
    hand_over(text_bundle, text_file, tmp_path / "out", TARGETS["universal"], samples=20)
    seen: dict[str, list[int]] = {"prefill": [], "decode": []}
    padded = 0
    for name, visible in seen.items():
        for file in sorted((tmp_path / "out/calibration" / name).iterdir()):
            with np.load(file) as sample:
                assert all(np.isfinite(sample[key]).all() for key in sample)
                assert sample["attention_mask"].dtype == np.float32
                assert sample["input_ids"].dtype == np.int32
                visible.append(int((sample["attention_mask"][0, 0, -1] == 0).sum()))
                padded += name == "prefill" and bool((sample["attention_mask"][0, 0, 0] != 0).all())
                filled = np.abs(sample["past_key_0"]).sum((0, 2, 3)) > 0
                rows = sample["input_ids"].shape[1]
                assert filled.sum() >= visible[-1] - rows  # real past keys, not zeros
    assert padded == 5
    assert seen["prefill"].count(8) == 5
    assert seen["prefill"].count(160) == 5
    assert sum(8 < count < 160 for count in seen["prefill"]) == 5
    assert seen["decode"].count(160) == 7
    assert len(set(seen["decode"])) > 8


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_a_readme_states_every_input_and_output_with_its_shape(folder: Path, text_bundle: Bundle, page: str) -> None:
    text = (folder / page).read_text("utf-8")
    for graph in text_bundle.manifest.graphs:
        assert f"`{graph.file}`" in text
        for value in (*graph.inputs, *graph.outputs):
            assert f"| `{value.name}` | {tuple(value.shape)} | {value.dtype} |" in text
    for word in ("-32768", "120", "160", "`bskd`", "P + c <= C", "3 .. 7", "155 .. 159", "sha256sum -c", "build.py"):
        assert word in " ".join(text.split())
    assert not re.search(r"\{\w*\}", text)
    assert "0 0 0 0 " in text  # the ids of the padded chunk, its BOS among them
    chinese = len(re.findall(r"[\u4e00-\u9fff]", text))
    assert (chinese > 1000) == (page == "README.zh.md")
    assert (chinese == 0) == (page == "README.md")


@pytest.mark.parametrize("name", list(TARGETS))
def test_a_readme_has_the_notes_of_the_target(name: str, text_bundle: Bundle, text_file: Path, tmp_path: Path) -> None:
    hand_over(text_bundle, text_file, tmp_path / "out", TARGETS[name], samples=1)
    script = (tmp_path / "out" / "build.py").read_bytes()
    assert script == (handoff.KIT / build_script(TARGETS[name])).read_bytes()
    for page in ("README.md", "README.zh.md"):
        text = (tmp_path / "out" / page).read_text("utf-8")
        assert all(note.text in text and note.source in text for note in TARGETS[name].notes)
        assert TARGETS[name].tool is None or str(TARGETS[name].tool) in text


@pytest.mark.parametrize("words", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_a_readme_has_the_contract_s_formulas_of_what_the_host_feeds(words: Words) -> None:
    contract = (Path(__file__).parent.parent / "docs" / "contract.md").read_text(encoding="utf-8")
    angle, scale = "float32(p) * float32(inv_freq[i])", "1 + beta ln(1 + floor(p / length))"
    assert angle in contract
    assert scale in contract
    assert angle in words.host_parts["rope_cos"]
    assert scale in words.host_parts["rope_query_scale"]


def test_every_target_has_a_writer_and_a_script() -> None:
    assert {target.calibration for target in TARGETS.values()} <= set(WRITERS)
    assert all((handoff.KIT / build_script(target)).is_file() for target in TARGETS.values())
    tools = {(t.tool or t.calibration).partition("==")[0] for t in TARGETS.values()}
    assert tools == set(handoff.BUILD_SCRIPTS)


# It runs elsewhere, and is the same again


def test_two_handoffs_of_one_bundle_are_the_same_bytes(
    folder: Path, text_bundle: Bundle, text_file: Path, tmp_path: Path
) -> None:
    hand_over(text_bundle, text_file, tmp_path / "again", TARGETS["universal"], samples=5)
    assert content(tmp_path / "again") == content(folder)


def test_a_folder_that_was_moved_builds_and_replays(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "a b" / "möved"))
    replayed = python(moved / "replay.py", "--onnxruntime", cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    built = python("build.py", "--simulate", cwd=moved)
    assert built.returncode == 0, built.stderr
    compared = python("replay.py", "build/outputs", cwd=moved)
    assert compared.returncode == 0, compared.stdout
    assert compared.stdout.splitlines()[-1].startswith("all outputs agree")


def test_the_generic_build_takes_one_graph_and_names_those_there_are(folder: Path, tmp_path: Path) -> None:
    done = python(folder / "build.py", "decode", "--build", tmp_path / "b")
    assert done.returncode == 0
    assert [item.name for item in (tmp_path / "b/outputs").iterdir()] == ["decode"]
    refused = python(folder / "build.py", "decoder", "--build", tmp_path / "b")
    assert refused.returncode == 2
    assert "no graph 'decoder' in handoff.json; allowed: prefill, decode" in refused.stderr


def test_a_profile_that_wants_one_file_gets_the_weights_in_the_graphs(
    text_bundle: Bundle, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    target = dataclasses.replace(TARGETS["universal"], weights="inline")
    hand_over(text_bundle, text_file, tmp_path / "out", target, samples=1)
    assert not (tmp_path / "out/weights.bin").exists()
    model = onnx.load(tmp_path / "out/decode.onnx", load_external_data=False)
    assert all(tensor.data_location != onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer)
    assert python(tmp_path / "out/replay.py", "--onnxruntime").returncode == 0
    said: list[str] = []
    monkeypatch.setattr(handoff, "INLINE_LIMIT", 10)
    hand_over(text_bundle, text_file, tmp_path / "large", target, samples=1, report=said.append)
    assert (tmp_path / "large/weights.bin").exists()
    assert any("too many for one .onnx: they stay in weights.bin" in line for line in said)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"chunk_size": (4, 8), "context_buckets": (12, 24), "kv_layout": "bksd-kt"}),
        ("mistral-window", {"chunk_size": (4, 8), "context_buckets": (6, 24), "kv_layout": "bksd"}),
        ("qwen2", {"input": "embeds", "ids": "int64"}),
        ("llama", {"head": "all", "speculate": 4}),
        ("llama", {"chunk_size": 48, "max_lm_input_len": 5}),
        ("llama", {"chunk_size": 1, "max_lm_input_len": 1, "max_kvcache_len": 2}),
    ],
)
def test_bundles_of_other_shapes_replay(
    name: str, settings: dict[str, Any], bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    opened = bundle(name, **settings)
    ids = np.random.default_rng(3).integers(0, opened.manifest.vocab_size, 120).tolist()
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"ids": ids[i : i + 30]}) + "\n" for i in (0, 30, 60, 90)))
    made = hand_over(opened, tmp_path / "ids.jsonl", tmp_path / "out", TARGETS["universal"], samples=4)
    assert [graph["name"] for graph in made.data["graphs"]] == [Path(g.file).stem for g in opened.manifest.graphs]
    for graph in opened.manifest.graphs:
        used = [run["past"] for run in made.data["golden_runs"][Path(graph.file).stem]]
        assert max(used) == graph.kv_len - graph.rows if graph.role == "prefill" else max(used) < graph.kv_len
        assert made.data["calibration"]["graphs"][Path(graph.file).stem]["samples"] >= 1
    done = python(tmp_path / "out/replay.py", "--onnxruntime")
    assert done.returncode == 0, done.stdout + done.stderr
