"""`rollkv handoff`: what it says, which target it takes, what is refused, and that a failure leaves nothing."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_exports import command, content
from commands import Run, reseal, user_error
from conftest import export

from rollkv.export import handoff, handoff_data
from rollkv.export.handoff import form_fault, hand_over
from rollkv.export.handoff_text import HandoffError
from rollkv.export.targets import TARGETS
from rollkv.runtime.bundle import Bundle, BundleError, open_bundle

UNTARGETED = "the bundle was exported for no target: samples are .npz, as for universal; --target takes another format"


def python(*arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command_says_what_it_does_and_what_it_wrote(
    text_bundle: Bundle, text_file: Path, tmp_path: Path, run: Run
) -> None:
    code, out, err = run(
        "handoff", text_bundle.path, "--data", text_file, "-o", tmp_path / "out", "--samples", 2, "--json"
    )
    assert code == 0
    summary = json.loads(out)
    assert summary["samples"] == {"prefill": 2, "decode": 2}
    assert summary["golden"] == {"prefill": 3, "decode": 3}
    assert summary["bytes"] == sum(len(data) for data in content(tmp_path / "out").values())
    assert UNTARGETED in err
    assert "more than L = 120: it goes in, in turns of at most L" in err
    code, out, _ = run("handoff", text_bundle.path, "--data", text_file, "-o", tmp_path / "out", "--samples", 1)
    assert code == 0
    assert out.startswith(f"{tmp_path / 'out'}: for universal, samples (npz): prefill 1, decode 1, ")


def test_the_target_of_the_bundle_is_the_default(copy: Path, text_file: Path, tmp_path: Path, run: Run) -> None:
    reseal(copy, target="rk3588")
    code, out, err = run("handoff", copy, "--data", text_file, "-o", tmp_path / "out", "--samples", 1, "--json")
    assert code == 0
    assert json.loads(out)["target"] == "rk3588"
    assert "the bundle was exported for rk3588 with another form: --norm" not in err
    assert "the bundle was exported for rk3588 with another form: --ids" not in err
    assert "another form: --gqa is fold, rk3588 takes repeat" in err


def test_another_target_is_taken_when_the_graphs_have_its_form(
    text_source: Path, text_file: Path, tmp_path: Path, run: Run, bundle: Callable[..., Bundle]
) -> None:
    opened = export(text_source, tmp_path / "b", decode_attention="joined")
    reseal(opened.path, norm="rowmax", target="universal")  # as an export for universal says
    code, out, _ = run(
        "handoff",
        opened.path,
        "--data",
        text_file,
        "-o",
        tmp_path / "out",
        "--samples",
        1,
        "--target",
        "horizon",
        "--json",
    )
    assert code == 0
    assert (json.loads(out)["target"], json.loads(out)["calibration"]) == ("horizon", "horizon")


def test_the_opset_may_be_any_that_the_target_takes(text_bundle: Bundle) -> None:
    m = text_bundle.manifest
    fault = form_fault(m, TARGETS["sophgo-bm1684x"])
    assert fault == "--norm is plain, sophgo-bm1684x takes rowmax"
    from dataclasses import replace

    newer = replace(m, graphs=[replace(graph, opset=18) for graph in m.graphs])
    assert form_fault(newer, TARGETS["sophgo-bm1684x"]) == "--opset is 18, sophgo-bm1684x takes 13 .. 17"
    assert "--opset" not in str(form_fault(newer, TARGETS["openvino-npu"]))


def test_what_computed_the_golden_outputs_is_said(text_bundle: Bundle) -> None:
    import dataclasses

    import onnxruntime

    said = f"onnxruntime {onnxruntime.__version__}, CPU, all graph optimisations"
    assert handoff.golden_by(text_bundle.manifest) == said
    half = dataclasses.replace(text_bundle.manifest, dtype="float16")
    assert handoff.golden_by(half) == said + ", float16 computed in float32 and rounded"


def test_a_short_text_is_said_and_still_replays(text_bundle: Bundle, tmp_path: Path, run: Run) -> None:
    (tmp_path / "t.txt").write_text("hello, how are you")
    code, _, err = run("handoff", text_bundle.path, "--data", tmp_path / "t.txt", "-o", tmp_path / "out")
    assert code == 0
    assert re.search(r"too short for a full cache of prefill\.onnx: it has (\d+) tokens, so the fullest run", err)
    assert re.search(r"prefill\.onnx: the text gives \d+ different samples, 20 were asked for", err)
    assert python(tmp_path / "out/replay.py", "--onnxruntime").returncode == 0


# What is refused


@pytest.mark.parametrize(
    ("name", "data", "flags", "said"),
    [
        ("t.txt", b"", [], "t.txt: is empty; give a text of what the model will be asked"),
        ("t.txt", b" \n\n", [], "t.txt: is empty; give a text of what the model will be asked"),
        ("t.txt", b"ok\nna\xefve\n", [], "t.txt: not UTF-8: byte 0xef in line 2; convert it to UTF-8"),
        ("t.csv", b"a", [], "t.csv: ends in '.csv'; allowed: a .txt or a .jsonl file"),
        ("t.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', [], "t.jsonl, line 3: not JSON: Expecting value"),
        ("t.jsonl", b'{"prompt": "a", "text": "b"}', [], "t.jsonl, line 1: holds ['prompt', 'text']; allowed: an "
         "object with one of prompt, text, messages, ids"),
        ("t.jsonl", b"[1]", [], "line 1: holds list; allowed: an object with one of prompt, text, messages, ids"),
        ("t.jsonl", b'{"text": 5}', [], "line 1: text is '5'; allowed: a string"),
        ("t.jsonl", b'{"ids": [1, 320]}', [], "line 1: ids is [1, 320]; allowed: a list of whole numbers 0 .. 319"),
        ("t.jsonl", b'{"ids": []}', [], "t.jsonl, line 1: has no tokens; allowed: at least one"),
        ("t.jsonl", b'{"messages": []}', [], "line 1: holds messages, which need the chat template; pass --chat"),
        ("t.jsonl", b'{"text": "a"}\n{"messages": []}', ["--chat"], "line 2: the conversation is []"),
        ("t.txt", b"hello", ["--target", "rk3599"], "target 'rk3599' is unknown; allowed: universal, rk3588"),
        ("t.txt", b"hello", ["--target", "rk3588"], "--target rk3588: --gqa is fold, rk3588 takes repeat, so the "
         "graphs are not in its form; export them with --target rk3588"),
        ("t.txt", b"hello", ["--samples", "0"], "--samples"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(
    name: str, data: bytes, flags: list[str], said: str, text_bundle: Bundle, tmp_path: Path, run: Run
) -> None:
    (tmp_path / name).write_bytes(data)
    result = run("handoff", text_bundle.path, "--data", tmp_path / name, "-o", tmp_path / "new" / "out", *flags)
    code, out, err = result
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert said in last
    assert [item.name for item in tmp_path.iterdir()] == [name]


def test_a_missing_text_and_a_folder_in_its_place_are_named(text_bundle: Bundle, tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no.txt", "no such file"), (tmp_path / "d.txt", "is not a file")):
        (tmp_path / "d.txt").mkdir(exist_ok=True)
        with pytest.raises(HandoffError, match=f"--data {re.escape(str(path))}: {why}; give a text file"):
            hand_over(text_bundle, path, tmp_path / "out", TARGETS["universal"])


def test_a_text_of_which_the_tokenizer_makes_nothing_is_refused(
    text_bundle: Bundle, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollkv.runtime.text import Tokenizer

    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: [])
    with pytest.raises(HandoffError, match=r"--data .*täxt\.txt: the text has no tokens; allowed: at least one"):
        hand_over(text_bundle, text_file, tmp_path / "out", TARGETS["universal"])


def test_a_bundle_without_a_tokenizer_takes_records_of_ids_only(
    bundle: Callable[..., Bundle], text_file: Path, tmp_path: Path, run: Run
) -> None:
    code, out, err = run("handoff", bundle("llama").path, "--data", text_file, "-o", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "has no tokenizer.json, so text cannot become tokens; token ids can be given instead" in err.splitlines()[-1]


def test_a_graph_that_the_text_does_not_reach_is_named(bundle: Callable[..., Bundle], tmp_path: Path) -> None:
    opened = bundle("llama", chunk_size=(4, 8), context_buckets=(12, 24), kv_layout="bksd-kt")
    (tmp_path / "t.jsonl").write_text('{"ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}')
    with pytest.raises(
        HandoffError, match=r"graph prefill_c4_k48\.onnx is used after 21 tokens and more, the text has 9"
    ):
        hand_over(opened, tmp_path / "t.jsonl", tmp_path / "out", TARGETS["universal"])
    assert [item.name for item in tmp_path.iterdir()] == ["t.jsonl"]


def test_nothing_is_written_into_the_bundle_nor_over_another_folder(
    copy: Path, text_file: Path, tmp_path: Path, run: Run
) -> None:
    before = content(copy)
    for output in (copy / "handoff", copy / "a" / "b"):
        assert "lies in the bundle, into which nothing is written; give another folder" in user_error(
            _quiet(run("handoff", copy, "--data", text_file, "-o", output))
        )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text('{"format": 1, "rollkv": "1", "graphs": []}')
    for output in (copy, tmp_path / "mine"):
        assert user_error(_quiet(run("handoff", copy, "--data", text_file, "-o", output))) == (
            f"-o {output}: exists and is not a handoff; give another name or remove it"
        )
    assert content(copy) == before


def _quiet(result: tuple[int, str, str]) -> tuple[int, str, str]:
    """Without the remark on the target."""
    code, out, err = result
    return code, out, "".join(line for line in err.splitlines(True) if UNTARGETED not in line)


def test_a_damaged_bundle_is_found_by_its_checksum(copy: Path, text_file: Path, tmp_path: Path) -> None:
    opened = open_bundle(copy)
    data = bytearray((copy / "weights.bin").read_bytes())
    data[40] ^= 1
    (copy / "weights.bin").write_bytes(data)
    name = "weights.bin"
    assert opened.manifest.files[name].size == len(data)
    with pytest.raises(BundleError, match=r"weights\.bin: its content is not what the manifest's sha256 says"):
        hand_over(opened, text_file, tmp_path / "out", TARGETS["universal"], samples=1)
    assert not (tmp_path / "out").exists()


# Failures leave what was there


@pytest.mark.parametrize("place", ["start", "sample", "golden"])
def test_a_full_disk_is_said_and_the_handoff_before_stays(
    place: str, text_bundle: Bundle, text_file: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    assert run("handoff", text_bundle.path, "--data", text_file, "-o", output, "--samples", 1)[0] == 0
    before = content(output)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if place == "start":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1 << 20))  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr(
            *{"sample": (handoff_data.NpzWriter, "_write"), "golden": (handoff, "write_golden")}[place], full
        )
    code, out, err = run("handoff", text_bundle.path, "--data", text_file, "-o", output, "--samples", 300)
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith(f"rollkv: {output}: No space left on device")
    if place == "start":
        assert re.search(r"\d+ MiB are needed, 1 MiB are free; --samples takes fewer", last)
    assert content(output) == before
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_handoff_that_is_stopped_leaves_nothing(
    number: int, text_bundle: Bundle, text_file: Path, tmp_path: Path
) -> None:
    arguments = ("handoff", text_bundle.path, "--data", text_file, "-o", tmp_path / "new" / "out", "--samples", 20000)
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "calibration samples of prefill.onnx" in line:
                break
        process.send_signal(number)
        process.stderr.read()
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert list(tmp_path.iterdir()) == []
