"""The build scripts of a hand-off, without their tools: what they share, read, write and refuse."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toolchain_folders import OUTPUTS, make_folder

from rollkv.export.toolchain_try import KIT

OURS = ("rknn", "qnn", "sophgo", "openvino", "mnn", "horizon", "axera")
TOOL_MODULES = {
    "rknn": {"rknn"},
    "qnn": {"onnxruntime", "onnxruntime_qnn"},
    "sophgo": {"tpu_mlir"},
    "openvino": {"openvino"},
    "mnn": {"MNN", "_tools"},
    "horizon": set(),
    "axera": set(),
}


def text(name: str) -> str:
    return (KIT / f"build_{name}.py").read_text(encoding="utf-8")


def module(name: str) -> Any:
    """A script of the kit, as its own folder imports it."""
    if str(KIT) not in sys.path:
        sys.path.insert(0, str(KIT))
    return importlib.import_module(name if name == "jobs" else f"build_{name}")


def script(name: str, *arguments: str | Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(KIT / f"build_{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


@pytest.mark.parametrize("name", OURS)
def test_a_script_imports_the_standard_library_numpy_and_its_tool(name: str) -> None:
    found = set()
    for node in ast.walk(ast.parse(text(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    assert found - set(sys.stdlib_module_names) - {"numpy"} == {"jobs"} | TOOL_MODULES[name]


def test_the_wrapper_of_mnn_that_reports_home_is_not_used() -> None:
    names = {getattr(node, "module", None) for node in ast.walk(ast.parse(text("mnn")))}
    names |= {a.name for node in ast.walk(ast.parse(text("mnn"))) if isinstance(node, ast.Import) for a in node.names}
    assert not any(name and name.startswith("MNN.tools") for name in names)


@pytest.mark.parametrize("name", OURS)
def test_an_unknown_graph_is_refused_with_those_there_are(name: str, tmp_path: Path) -> None:
    done = script(name, "--folder", make_folder(tmp_path / "f"), "x")
    assert done.returncode == 2
    assert done.stderr.endswith("error: no graph 'x' in handoff.json; allowed: prefill\n")
    assert not (tmp_path / "f" / "build").exists()


def test_outputs_are_saved_as_float32_in_the_shapes_of_the_folder(tmp_path: Path) -> None:
    kit = module("jobs")
    folder = make_folder(tmp_path / "f")
    handoff = json.loads((folder / "handoff.json").read_text())
    job = kit.Job(folder, tmp_path / "build", handoff, handoff["graphs"][0], SimpleNamespace())
    arrays = {value["name"]: np.ones(int(np.prod(value["shape"])), np.float16) for value in OUTPUTS}
    job.save("golden/prefill/1", arrays)
    for value in OUTPUTS:
        saved = np.load(tmp_path / "build" / "outputs" / "prefill" / "1" / f"{value['name']}.npy")
        assert (saved.dtype, list(saved.shape)) == (np.float32, value["shape"])
    with pytest.raises(ValueError, match=r"prefill: logits has shape \(7,\), not \[1, 1, 5\]"):
        job.save("golden/prefill/1", arrays | {"logits": np.ones(7)})
    assert list(job.inputs("golden/prefill/0")) == ["attention_mask"]


def test_peak_memory_is_of_this_process_and_not_of_the_one_that_started_it(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("read from /proc")
    ballast = np.ones(60 << 20)  # 480 MB here
    code = f"import sys; sys.path.insert(0, {str(KIT)!r}); import jobs; print(jobs.peak_rss_mb())"
    small = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    code = code.replace("print(", "x = jobs.np.ones(25 << 20); print(")
    large = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert ballast.nbytes > 400 << 20
    assert small < 200
    assert 190 <= large - small <= 230


PLACEMENT = """\
D RKNN: [09:11:28.790] ID   OpType             DataType Target InputShape                   OutputShape   Cycles
D RKNN: [09:11:28.790] 0    InputOperator      INT32    CPU    \\                            (1,16)        0/0/0
D RKNN: [09:11:28.790] 7    Gather             FLOAT16  CPU    (307,36),(1,16)              (1,16,36)     0/0/0
D RKNN: [09:11:28.790] 8    Gather             FLOAT16  CPU    (256,3),(1,16)               (1,16,3)      0/0/0
D RKNN: [09:11:28.790] 9    exNorm             FLOAT16  NPU    (1,36,1,16)                  (1,36,1,16)   0/0/0
D RKNN: [09:11:28.793] 93  Concat         new_key_1    FLOAT16   NC1HWC2      (1,16,2,6)   (1,8,2,6,8)   | 0x00000000
D RKNN: [09:11:28.790] 118  OutputOperator     FLOAT16  CPU    (1,1,307)                    \\             0/0/0
"""


def test_ops_on_the_board_s_cpu_are_read_from_the_placement_table() -> None:
    on_cpu = module("rknn").on_cpu
    assert on_cpu(PLACEMENT) == {"Gather": 2}
    assert on_cpu(PLACEMENT.replace("CPU", "NPU")) == {}
    assert on_cpu("I rknn-toolkit2 version: 2.5.0") is None


def test_a_call_of_rknn_that_returns_minus_one_is_an_error() -> None:
    module("rknn").check(0, "build")
    with pytest.raises(RuntimeError, match="rknn-toolkit2: build failed with -1; its reason is above"):
        module("rknn").check(-1, "build")


def test_the_list_of_calibration_samples_has_no_blanks_in_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scratch = tmp_path / "hand off", tmp_path / "scratch"
    (folder / "calibration" / "prefill").mkdir(parents=True)
    (folder / "calibration" / "prefill" / "dataset.txt").write_text("a/0.npy b/0.npy\na/1.npy b/1.npy\n")
    scratch.mkdir()
    monkeypatch.chdir(scratch)
    graphs = {"prefill": {"list": "calibration/prefill/dataset.txt"}}
    job = SimpleNamespace(folder=folder, name="prefill", handoff={"calibration": {"graphs": graphs}})
    lines = Path(module("rknn").calibration(job)).read_text().splitlines()
    paths = [[Path(path).resolve() for path in line.split()] for line in lines]
    assert paths == [[folder / name / f"{k}.npy" for name in "ab"] for k in (0, 1)]


def test_each_graph_is_compiled_in_an_empty_folder_that_goes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f")
    data = json.loads((folder / "handoff.json").read_text())
    data["graphs"].append({**data["graphs"][0], "name": "decode"})
    (folder / "handoff.json").write_text(json.dumps(data))
    code = (
        "import sys, os\n"
        f"sys.path.insert(0, {str(KIT)!r})\n"
        "from jobs import main\n"
        "def compile_graph(job):\n"
        "    assert os.listdir() == []\n"
        "    os.symlink(job.folder, 'folder')\n"
        "sys.exit(main('', {}, compile_graph, compile_graph))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--folder", str(folder)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["graph"] for line in done.stdout.splitlines()] == ["prefill", "decode"]
    assert list((folder / "build").iterdir()) == []


def test_names_of_tpu_mlir_are_matched_whole() -> None:
    kit = module("sophgo")
    files = ["new_key_1_Add_f32", "new_key_10_Add_f32", "logits"]
    assert kit.written("new_key_1", files) == "new_key_1_Add_f32"
    assert kit.written("new_key_10", files) == "new_key_10_Add_f32"
    assert kit.written("logits", files) == "logits"
    with pytest.raises(ValueError, match="tpu-mlir: output new_key_2 is none of"):
        kit.written("new_key_2", files)
    assert (kit.named_chip("sophgo-bm1688"), kit.named_chip("universal")) == ("bm1688", "bm1684x")
    assert kit.on_cpu('%1 = "tpu.GenericCpu"(%0) {cpu_op_name = "onnx.topk"}'.replace("onnx.", "")) == {"topk": 1}


def with_calibration(folder: Path) -> Path:
    data = json.loads((folder / "handoff.json").read_text())
    data["calibration"] = {"graphs": {"prefill": {"samples": 2, "path": "calibration/prefill", "list": None}}}
    (folder / "handoff.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(("name", "tool", "written"), [("horizon", "hb_compile", "yaml"), ("axera", "pulsar2", "json")])
def test_a_vendor_s_configuration_is_written_and_the_missing_tool_named(
    name: str, tool: str, written: str, tmp_path: Path
) -> None:
    folder = with_calibration(make_folder(tmp_path / "f"))
    done = script(name, "--folder", folder, env=os.environ | {"PATH": ""}, cwd=tmp_path)
    config = folder / "build" / f"prefill.{written}"
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"{tool} is not on the PATH; {config} is written for it: {tool} ")
    assert str(folder / "prefill.onnx") in config.read_text()
    assert script(name, "--folder", folder, "--simulate").stderr.startswith(f"{tool}'s simulator is not driven here")
    assert "not run" in module(name).__doc__


def test_the_configurations_name_every_input_and_its_samples(tmp_path: Path) -> None:
    folder = with_calibration(make_folder(tmp_path / "f"))
    for name in ("horizon", "axera"):
        script(name, "--folder", folder)
    samples = folder / "calibration" / "prefill" / "attention_mask"
    lines = (folder / "build" / "prefill.yaml").read_text().splitlines()
    assert f'  cal_data_dir: "{samples}"' in lines
    assert '  input_shape: "1x1x4x6"' in lines
    quant = json.loads((folder / "build" / "prefill.json").read_text())["quant"]
    assert [c["calibration_dataset"] for c in quant["input_configs"]] == [f"{samples}.tar"]


@pytest.mark.parametrize("name", ["horizon", "axera"])
def test_a_vendor_s_tool_that_is_there_is_called(name: str, tmp_path: Path) -> None:
    tool = {"horizon": "hb_compile", "axera": "pulsar2"}[name]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / tool).write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "bin" / tool).chmod(0o755)
    folder = with_calibration(make_folder(tmp_path / "f"))
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = script(name, "--folder", folder, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["graph"] == "prefill"
    assert f"--config {folder / 'build' / 'prefill'}" in done.stderr  # the tool's own words
