"""The compilers themselves on a tiny graph: every graph compiles, and its numbers are near those of ONNX Runtime.

Skipped where a toolchain is not installed; `make toolchains` runs all, `make toolchains-quick` QNN and OpenVINO.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Run

from rollkv.export.handoff import hand_over
from rollkv.export.targets import TARGETS
from rollkv.export.toolchains import TOOLCHAINS, default_environment, fault_of
from rollkv.runtime.bundle import Bundle

pytestmark = pytest.mark.toolchain
IDS = [1, *range(7, 300)]  # more than L = 40
TARGET = {"rknn": "rk3588", "qnn": "qualcomm-htp", "sophgo": "sophgo-bm1684x", "openvino": "openvino-npu", "mnn": "mnn"}
ARTEFACTS = {"rknn": ".rknn", "qnn": "_qnn.bin", "sophgo": ".bmodel", "openvino": ".bin", "mnn": ".mnn"}


def need(name: str) -> None:
    fault = fault_of(TOOLCHAINS[name], default_environment(TOOLCHAINS[name]))
    if fault:
        pytest.skip(f"{TOOLCHAINS[name].requirement} is not installed ({fault}): rollkv toolchain install {name}")


def handed(made: Bundle, folder: Path, name: str, samples: int = 2) -> Path:
    """A hand-off of a bundle without a tokenizer; its first chunk is padded."""
    text = folder.parent / "ids.jsonl"
    text.write_text(json.dumps({"ids": IDS}) + "\n")
    hand_over(made, text, folder, TARGETS[TARGET[name]], samples=samples)
    return folder


@pytest.mark.parametrize("name", TARGET)
def test_a_tool_compiles_the_form_of_its_profile_and_its_numbers_are_near(
    name: str, bundle: Callable[..., Bundle], tmp_path: Path, run: Run
) -> None:
    need(name)
    made = bundle("llama", target=TARGETS[TARGET[name]], chunk_size=8)
    graphs = tried(name, handed(made, tmp_path / "hand off", name), run)
    if name == "rknn":
        assert all(not {"Gather", "Div", "ReduceMax"} & set(graph["not_on_npu"]) for graph in graphs)


@pytest.mark.parametrize("name", TARGET)
def test_a_tool_compiles_a_head_of_its_own(name: str, bundle: Callable[..., Bundle], tmp_path: Path, run: Run) -> None:
    need(name)
    made = bundle("llama", target=TARGETS[TARGET[name]], chunk_size=8, head="split")
    tried(name, handed(made, tmp_path / "hand off", name), run, names=("prefill", "decode", "head"))


@pytest.mark.parametrize("attention", ["joined", "apart"])
@pytest.mark.parametrize("name", TARGET)
def test_a_tool_takes_the_default_form_but_for_what_its_profile_refuses(
    name: str, attention: str, bundle: Callable[..., Bundle], tmp_path: Path, run: Run
) -> None:
    need(name)
    folder = handed(bundle("llama", decode_attention=attention), tmp_path / "hand off", name)
    if ("decode_attention", attention) in TARGETS[TARGET[name]].refused:
        code, out, err = run("toolchain", "try", folder)
        assert (code, out) == (1, "")
        assert "graph decode: the tool failed" in err
        return
    graphs = tried(name, folder, run)
    if name == "rknn":
        assert all(graph["not_on_npu"]["Gather"] == 3 for graph in graphs)  # embedding, cos and sin, by ids


def test_sophgo_quantises_weights(bundle: Callable[..., Bundle], tmp_path: Path, run: Run) -> None:
    need("sophgo")
    made = bundle("llama", target=TARGETS["sophgo-bm1684x"], chunk_size=8)
    tried("sophgo", handed(made, tmp_path / "hand off", "sophgo"), run, "--flag=--quantize=W8F16")


def test_rknn_quantises_by_the_calibration_samples(bundle: Callable[..., Bundle], tmp_path: Path, run: Run) -> None:
    """Held before the first attention: eight bits for scores beside -32768 keep nothing of a random model's scores."""
    need("rknn")
    made = bundle("llama", target=TARGETS["rk3588"], chunk_size=8)
    folder = handed(made, tmp_path / "hand off", "rknn", samples=8)
    _, out, err = run("toolchain", "try", folder, "--flag=--quantize=w8a8", "--json")
    graphs = json.loads(out)["graphs"]
    assert [graph["graph"] for graph in graphs] == ["prefill", "decode"], err
    for graph in graphs:
        cosines = {output["name"]: output["cosine"] for output in graph["outputs"]}
        assert min(cosines["new_key_0"], cosines["new_value_0"]) > 0.99
        assert "INT8     NPU" in (folder / "build" / f"{graph['graph']}.log").read_text(encoding="utf-8")


def tried(
    name: str, folder: Path, run: Run, *flags: str, names: tuple[str, ...] = ("prefill", "decode")
) -> list[dict[str, Any]]:
    """What `rollkv toolchain try` says of each graph."""
    code, out, err = run("toolchain", "try", folder, *flags, "--cosine", "0.999", "--json")
    assert code == 0, err
    graphs: list[dict[str, Any]] = json.loads(out)["graphs"]
    assert [graph["graph"] for graph in graphs] == [*names]
    for graph in graphs:
        assert (folder / "build" / f"{graph['graph']}{ARTEFACTS[name]}").stat().st_size > 0
        assert graph["runs"] == (6 if graph["graph"] == "head" else 3)  # three prefill runs and three steps
        assert graph["peak_rss_mb"] > 10
        if name in ("qnn", "sophgo"):
            assert graph["not_on_npu"] == {}
    return graphs


@pytest.mark.parametrize("name", ["mnn", "qnn", "openvino"])
def test_a_graph_that_is_damaged_is_a_failure_of_the_tool(
    name: str, bundle: Callable[..., Bundle], tmp_path: Path, run: Run
) -> None:
    need(name)
    folder = handed(bundle("llama"), tmp_path / "f", name)
    (folder / "prefill.onnx").write_bytes((folder / "prefill.onnx").read_bytes()[:2000])
    code, out, err = run("toolchain", "try", folder)
    assert (code, out) == (1, "")
    assert "graph prefill: the tool failed with" in err
