"""The compilers themselves on a tiny graph: every graph compiles, and its numbers are near those of ONNX Runtime.

Skipped where a toolchain is not installed; `make toolchains` runs all, `make toolchains-quick` QNN and OpenVINO.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Run
from handoff_folders import hand_off

from rollkv.export.targets import TARGETS
from rollkv.export.toolchains import TOOLCHAINS, default_environment, fault_of
from rollkv.runtime.bundle import Bundle

pytestmark = pytest.mark.toolchain
PROMPT = [1, *range(7, 200, 10)]  # 21 tokens: for c = 8 the first run has 3 pads
TARGET = {"rknn": "rk3588", "qnn": "qualcomm-htp", "sophgo": "sophgo-bm1684x", "openvino": "openvino-npu", "mnn": "mnn"}
ARTEFACTS = {"rknn": ".rknn", "qnn": "_qnn.bin", "sophgo": ".bmodel", "openvino": ".bin", "mnn": ".mnn"}


def need(name: str) -> None:
    fault = fault_of(TOOLCHAINS[name], default_environment(TOOLCHAINS[name]))
    if fault:
        pytest.skip(f"{TOOLCHAINS[name].requirement} is not installed ({fault}): rollkv toolchain install {name}")


@pytest.mark.parametrize("attention", ["joined", "apart"])
@pytest.mark.parametrize("name", TARGET)
def test_a_tool_compiles_both_graphs_and_its_numbers_are_near(
    name: str, attention: str, bundle: Callable[..., Bundle], tmp_path: Path, run: Run
) -> None:
    need(name)
    made = bundle("llama", decode_attention=attention)
    folder = hand_off(made, tmp_path / "hand off", TARGET[name], TOOLCHAINS[name].script, PROMPT)
    code, out, err = run("toolchain", "try", folder, "--cosine", "0.999", "--json")
    if ("decode_attention", attention) in TARGETS[TARGET[name]].refused:
        assert (code, out) == (1, "")
        assert "graph decode: the tool failed" in err
        return
    assert code == 0, err
    graphs = json.loads(out)["graphs"]
    assert [graph["graph"] for graph in graphs] == ["prefill", "decode"]
    for graph in graphs:
        assert (folder / "build" / f"{graph['graph']}{ARTEFACTS[name]}").stat().st_size > 0
        assert graph["runs"] == 3
        assert graph["peak_rss_mb"] > 10
        if name in ("qnn", "sophgo"):
            assert graph["not_on_npu"] == {}
        if name == "rknn":
            assert graph["not_on_npu"]["Gather"] == 3  # embedding, cos and sin, by ids


@pytest.mark.parametrize("name", ["mnn", "qnn", "openvino"])
def test_a_graph_that_is_damaged_is_a_failure_of_the_tool(
    name: str, bundle: Callable[..., Bundle], tmp_path: Path, run: Run
) -> None:
    need(name)
    folder = hand_off(bundle("llama"), tmp_path / "f", TARGET[name], TOOLCHAINS[name].script, PROMPT)
    (folder / "prefill.onnx").write_bytes((folder / "prefill.onnx").read_bytes()[:2000])
    code, out, err = run("toolchain", "try", folder)
    assert (code, out) == (1, "")
    assert "graph prefill: the tool failed with" in err
