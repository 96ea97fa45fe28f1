"""`rollkv toolchain try` with a build script that drives no tool: what it runs, compares, prints and refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from commands import Run, user_error
from toolchain_folders import OUTPUTS, make_environment, make_folder

from rollkv.export.kit.replay import difference, in_order, real_rows
from rollkv.export.toolchain_try import read_answer
from rollkv.export.toolchains import TOOLCHAINS


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Environments that look complete."""
    monkeypatch.setenv("ROLLKV_TOOLCHAINS", str(tmp_path / "tools"))
    for name in ("openvino", "rknn"):
        make_environment(tmp_path / "tools" / name, TOOLCHAINS[name])
    return tmp_path / "tools"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "hand off é")


def test_equal_outputs_have_cosine_one_and_the_script_is_asked_twice(run: Run, folder: Path) -> None:
    code, out, err = run("toolchain", "try", folder, "--json")
    assert code == 0, err
    assert err.splitlines() == ["rollkv toolchain: compiling prefill", "rollkv toolchain: simulating prefill"]
    report = json.loads(out)
    assert report["tool"] == "openvino==2026.4.0"
    (graph,) = report["graphs"]
    assert (graph["compile_seconds"], graph["simulate_seconds"], graph["peak_rss_mb"], graph["runs"]) == (
        1.5,
        1.5,
        7,
        3,
    )
    assert graph["not_on_npu"] == {"Gather": 3}
    assert [output["name"] for output in graph["outputs"]] == [
        "new_key_9", "new_value_9", "new_key_10", "new_value_10", "logits",
    ]  # fmt: skip
    assert all(output["cosine"] == pytest.approx(1) and output["max_abs"] == 0 for output in graph["outputs"])
    assert graph["first_diverging"] is None


def test_the_table_has_every_output_and_what_the_graph_took(run: Run, folder: Path) -> None:
    code, out, _ = run("toolchain", "try", folder)
    assert code == 0
    assert all(value["name"] in out for value in OUTPUTS)
    assert "compiled in 1.5 s, 3 runs simulated in 1.5 s, 7 MB; ops not on the NPU: Gather 3" in out
    assert "first under 0.9999: none" in out


def test_the_first_output_that_diverges_is_named_layer_by_layer(run: Run, tmp_path: Path) -> None:
    edit = 'EDIT = {("logits", "2"): lambda a: -a, ("new_value_9", "1"): lambda a: a[:, ::-1]}'
    folder = make_folder(tmp_path / "f", edit)
    code, out, err = run("toolchain", "try", folder, "--json")
    assert code == 1
    (graph,) = json.loads(out)["graphs"]
    assert graph["first_diverging"] == "new_value_9"
    assert graph["worst"] == "logits"
    errors = {output["name"]: output for output in graph["outputs"]}
    assert errors["logits"]["cosine"] == pytest.approx(-1)
    assert errors["logits"]["run"] == "2"
    want = np.load(folder / "golden" / "prefill" / "2" / "outputs" / "logits.npy")
    assert errors["logits"]["max_abs"] == pytest.approx(2 * np.abs(want).max())
    assert err.splitlines()[-1] == "rollkv toolchain: prefill: cosine of logits is -1.000000, under 0.999"


def test_rows_of_pads_are_left_out_of_the_comparison(run: Run, tmp_path: Path) -> None:
    def spoil(row: int) -> str:
        return f'EDIT = {{("new_key_9", "0"): lambda a: np.where(np.arange(4)[:, None, None] == {row}, 9, a)}}'

    assert run("toolchain", "try", make_folder(tmp_path / "pad", spoil(0)))[0] == 0
    code, _, err = run("toolchain", "try", make_folder(tmp_path / "real", spoil(1)))
    assert code == 1
    assert "cosine of new_key_9 is 0." in err


@pytest.mark.parametrize(("layout", "key", "value"), [("bskd", 1, 1), ("bksd", 2, 2), ("bksd-kt", 3, 2)])
def test_rows_of_pads_are_left_out_where_the_layout_has_them(layout: str, key: int, value: int) -> None:
    array = np.arange(4**4).reshape(4, 4, 4, 4)
    graph, run, handoff = {"rows": 4}, {"pads": 3}, {"kv_layout": layout}
    for role, axis in (("new_key", key), ("new_value", value)):
        real = real_rows(array, graph, run, {"role": role, "layer": 0}, handoff)
        assert np.array_equal(real, np.moveaxis(array, axis, 0)[3:])
    rows, last = np.arange(36).reshape(1, 4, 9), np.arange(9).reshape(1, 1, 9)
    assert np.array_equal(real_rows(rows, graph, run, {"role": "logits"}, handoff), rows[0, 3:, None])
    assert np.array_equal(real_rows(last, graph, run, {"role": "logits"}, handoff), last)


def test_the_least_cosine_is_the_flag_then_the_folder_then_the_default(run: Run, tmp_path: Path) -> None:
    slight = 'EDIT = {("logits", "0"): lambda a: a + np.float32(0.03) * np.abs(a).max() * np.arange(-2, 3)}'
    folder = make_folder(tmp_path / "f", slight)
    cosine = min(g["cosine"] for g in json.loads(run("toolchain", "try", folder, "--json")[1])["graphs"][0]["outputs"])
    assert 0.99 < cosine < 0.9999
    assert run("toolchain", "try", folder, "--cosine", "0.99")[0] == 0
    assert run("toolchain", "try", folder, "--cosine", "0.9999")[0] == 1
    strict = make_folder(tmp_path / "g", slight, tolerances={"cosine": 0.9999})
    assert "under 0.9999" in run("toolchain", "try", strict)[2]
    loose = make_folder(tmp_path / "h", slight, tolerances={"cosine": 0.9})
    assert run("toolchain", "try", loose)[0] == 0


def test_numbers_that_are_not_finite_diverge(run: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f", 'EDIT = {("new_key_10", "1"): lambda a: a * np.inf}')
    code, out, err = run("toolchain", "try", folder, "--json")
    assert code == 1
    assert "cosine of new_key_10 is -1.000000" in err
    assert json.loads(out)["graphs"][0]["outputs"][2]["max_abs"] is None


def test_cosine_and_error_are_those_of_a_hand_calculation() -> None:
    cosine, error, relative = difference(np.array([3.0, 4.0], np.float32), np.array([4.0, 3.0], np.float32))
    assert cosine == pytest.approx(24 / 25)
    assert error == 1
    assert relative == pytest.approx(2**0.5 / 5)
    assert difference(np.zeros(3), np.zeros(3)) == (1.0, 0.0, 0.0)
    assert difference(np.zeros(3), np.ones(3))[:2] == (0.0, 1.0)
    assert difference(np.ones(2), np.array([1, np.nan])) == (-1.0, math.inf, math.inf)


def test_outputs_are_sorted_by_layer_and_keys_before_values() -> None:
    names = [value["name"] for value in in_order(list(OUTPUTS))]
    assert names == ["new_key_9", "new_value_9", "new_key_10", "new_value_10", "logits"]


def test_a_tool_that_fails_shows_its_last_lines_and_exits_with_one(run: Run, tmp_path: Path) -> None:
    lines = 'print(*[f"line {i}" for i in range(50)], sep="\\n", file=sys.stderr); sys.exit(3)'
    folder = make_folder(tmp_path / "f", lines)
    code, out, err = run("toolchain", "try", folder)
    assert (code, out) == (1, "")
    shown = err.splitlines()
    assert shown[1:-1] == [f"line {i}" for i in range(30, 50)]
    log = folder / "build" / "prefill.log"
    assert shown[-1] == f"rollkv: graph prefill: the tool failed with exit code 3; all that it said is in {log}"
    assert "line 0\n" in log.read_text()


def test_a_tool_that_is_killed_is_said_so(run: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f", "import os; os.kill(os.getpid(), 9)")
    assert "the tool failed with signal 9" in run("toolchain", "try", folder)[2]


def test_a_disk_that_is_full_while_the_tool_runs_is_said_so(run: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f", 'sys.exit("OSError: [Errno 28] No space left on device")')
    code, _, err = run("toolchain", "try", folder)
    assert code == 1
    assert err.splitlines()[-1] == f"rollkv: {folder / 'build'}: No space left on device"


def test_a_script_that_answers_nothing_or_leaves_out_an_output_is_a_failure(run: Run, tmp_path: Path) -> None:
    silent = make_folder(tmp_path / "f", "sys.exit(0)")
    code, _, err = run("toolchain", "try", silent)
    assert code == 1
    assert "graph prefill: the build script gave no line of JSON for it" in err
    lacking = make_folder(tmp_path / "g", 'handoff["graphs"][0]["outputs"].pop()')
    code, _, err = run("toolchain", "try", lacking)
    assert code == 1
    assert "graph prefill: the tool gave no new_value_9 for golden/prefill/0" in err
    bent = make_folder(tmp_path / "h", 'EDIT = {("logits", "0"): lambda a: a[0]}')
    code, _, err = run("toolchain", "try", bent)
    assert code == 1
    assert "logits has shape (1, 5), golden is (1, 1, 5)" in err


def test_lines_of_json_are_told_from_the_rest() -> None:
    line = {"graph": "decode", "seconds": 0.1, "peak_rss_mb": None, "not_on_npu": {}}
    assert read_answer(json.dumps(line)) == line
    assert read_answer("I Loading : 100%") is None
    assert read_answer('{"graph": "decode"}') is None
    assert read_answer("[1]") is None


def test_the_tool_sees_neither_this_environment_nor_a_path_to_report_home(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ("PYTHONPATH", "PYTHONNOUSERSITE", "ORT_DISABLE_TELEMETRY", "PATH")
    code = f"import os; (folder / 'seen.json').write_text(json.dumps({{n: os.environ.get(n) for n in {names}}}))"
    folder = make_folder(tmp_path / "f", code)
    assert run("toolchain", "try", folder)[0] == 0
    seen = json.loads((folder / "seen.json").read_text())
    assert (seen["PYTHONPATH"], seen["PYTHONNOUSERSITE"], seen["ORT_DISABLE_TELEMETRY"]) == (None, "1", "1")
    assert seen["PATH"].startswith(str(tmp_path / "tools" / "openvino" / "bin"))


def test_a_tool_whose_simulator_compiles_is_asked_once(run: Run, tmp_path: Path) -> None:
    code = 'print(json.dumps({"graph": name, "seconds": 9, "peak_rss_mb": 1, "not_on_npu": {}, "compile_seconds": 7}))'
    folder = make_folder(
        tmp_path / "f", f"import atexit; atexit.register(lambda: {code})", tool="rknn-toolkit2==2.5.0", target="rk3588"
    )
    code, out, err = run("toolchain", "try", folder, "--json")
    assert code == 0, err
    assert err == "rollkv toolchain: compiling and simulating prefill\n"
    (graph,) = json.loads(out)["graphs"]
    assert (graph["compile_seconds"], graph["simulate_seconds"], graph["not_on_npu"]) == (7, 2, {})


def test_flags_and_the_build_folder_reach_the_script(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "build.py").write_text("import sys, json; sys.exit(json.dumps(sys.argv[1:]))")
    build = tmp_path / "elsewhere"
    err = run("toolchain", "try", folder, "--build", build, "--flag=--hint=bf16", "--graph", "prefill")[2]
    said = json.loads(err.splitlines()[1])
    assert said == ["--folder", str(folder), "--build", str(build), "--hint=bf16", "prefill"]
    assert not (folder / "build").exists()


def test_a_folder_that_is_no_hand_off_is_refused(run: Run, tmp_path: Path) -> None:
    message = user_error(run("toolchain", "try", tmp_path))
    assert message == f"{tmp_path}: is no hand-off, there is no handoff.json in it; rollkv handoff writes one"
    (tmp_path / "handoff.json").write_text("[")
    assert "handoff.json: is not what rollkv handoff writes" in user_error(run("toolchain", "try", tmp_path))
    (tmp_path / "handoff.json").write_text('{"format": 2}')
    assert "format 2, this version reads up to 1" in user_error(run("toolchain", "try", tmp_path))
    (tmp_path / "handoff.json").write_text('{"format": 1}')
    assert "handoff.json: graphs is missing" in user_error(run("toolchain", "try", tmp_path))


def test_a_hand_off_that_lacks_a_part_is_refused(run: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f")
    (folder / "build.py").unlink()
    assert "build.py is missing; write the hand-off anew" in run("toolchain", "try", folder)[2]
    folder = make_folder(tmp_path / "g")
    (folder / "golden" / "prefill" / "1" / "outputs" / "new_key_9.npy").write_bytes(b"x")
    code, _, err = run("toolchain", "try", folder)
    assert code == 2
    assert "new_key_9.npy: cannot be read" in err
    folder = make_folder(tmp_path / "h", golden={})
    assert user_error(run("toolchain", "try", folder)) == "handoff.json: no graph has golden runs"


def test_a_tool_that_is_not_installed_is_said_with_the_command(run: Run, tmp_path: Path, folder: Path) -> None:
    other = make_folder(tmp_path / "q", tool="onnxruntime-qnn==2.7.0")
    message = user_error(run("toolchain", "try", other))
    assert message.startswith(
        f"toolchain qnn is not installed in {tmp_path / 'tools' / 'qnn'} (there is no such folder)"
    )
    assert "rollkv toolchain install qnn (480 MB; licence: MIT; Qualcomm's own" in message
    message = user_error(run("toolchain", "try", folder, "--env", tmp_path / "tools" / "rknn"))
    assert "(openvino==2026.4.0 is not in it)" in message
    assert f"rollkv toolchain install openvino --into {tmp_path / 'tools' / 'rknn'}" in message
    message = user_error(run("toolchain", "try", folder, "--env", tmp_path))
    assert "(there is no Python in it)" in message


def test_a_folder_for_no_tool_needs_one_to_be_chosen(run: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f", tool=None, target="universal")
    message = user_error(run("toolchain", "try", folder))
    assert "handoff.json names no tool (target universal)" in message
    assert "choose one with --tool: rknn, qnn, sophgo, openvino, mnn" in message
    assert "toolchain 'x' is unknown" in user_error(run("toolchain", "try", folder, "--tool", "x"))
    from rollkv.export.toolchain_try import KIT, build_script

    assert build_script(folder, {"tool": None}, TOOLCHAINS["rknn"]) == KIT / "build_rknn.py"
    assert build_script(folder, {"tool": "rknn-toolkit2==2.4.0"}, TOOLCHAINS["rknn"]) == folder / "build.py"


def test_another_version_of_the_tool_is_remarked(run: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f", tool="openvino==2025.1.0")
    code, _, err = run("toolchain", "try", folder)
    assert code == 0
    assert err.startswith(
        "rollkv toolchain: handoff.json was written for openvino==2025.1.0, this is openvino==2026.4.0"
    )


def test_an_unknown_graph_and_a_cosine_out_of_range_are_refused(run: Run, folder: Path) -> None:
    assert user_error(run("toolchain", "try", folder, "--graph", "x")) == "--graph x: allowed: prefill"
    assert user_error(run("toolchain", "try", folder, "--cosine", "2")) == "--cosine 2.0: allowed: -1 .. 1"
    assert user_error(run("toolchain", "try", folder, "--cosine", "nan")) == "--cosine nan: allowed: -1 .. 1"
