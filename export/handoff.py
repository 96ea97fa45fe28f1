"""A folder that a toolchain engineer uses as it is: graphs, samples, golden vectors, scripts, what it all means.

The flow on one screen. `handoff_text.py` reads the user's text, `handoff_runs.py` takes it through the chunk loop,
`handoff_data.py` writes samples in the tool's format, `handoff_readme.py` says what the folder holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from rollkv.export.handoff_data import WRITERS, SampleWriter, write_golden
from rollkv.export.handoff_readme import readmes
from rollkv.export.handoff_runs import Recorded, Stop, Tap, planned_calibration, planned_golden, reach, record, served
from rollkv.export.handoff_text import Corpus, HandoffError, read_corpus
from rollkv.export.signature import options_of
from rollkv.export.targets import Target, differences
from rollkv.export.write import FolderKind, check_output, replacing_folder, serialize
from rollkv.runtime.backend import OrtBackend, import_onnxruntime
from rollkv.runtime.bundle import Bundle, BundleError, GraphInfo, Manifest, hash_file
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.manifest import ValueInfo

FORMAT = 1
HANDOFF = FolderKind("handoff", "handoff.json", frozenset({"format", "rollkv", "target", "golden"}))
INLINE_LIMIT = (1 << 31) - (1 << 20)  # bytes of an .onnx with everything in it; protobuf ends at 2 GiB
KIT = Path(__file__).parent / "kit"
# Tool, or calibration format where there is no public tool -> the script that drives it.
BUILD_SCRIPTS = {
    "rknn-toolkit2": "build_rknn.py",
    "onnxruntime-qnn": "build_qnn.py",
    "tpu-mlir": "build_sophgo.py",
    "openvino": "build_openvino.py",
    "MNN": "build_mnn.py",
    "horizon": "build_horizon.py",
    "axera": "build_axera.py",
    "npz": "build_generic.py",
}
COSINES = {"float32": 0.99999, "float16": 0.9999}  # precision -> least cosine of an output; others 0.99


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """What was written."""

    folder: Path
    data: Mapping[str, Any]  # of handoff.json
    bytes: int  # of all files


def hand_over(
    bundle: Bundle,
    text: Path,
    output: Path,
    target: Target,
    *,
    chat: bool = False,
    samples: int = 20,
    report: Callable[[str], None] = lambda _: None,
) -> Handoff:
    """Write the folder `output`. samples: of each graph. report: is told of what is done, and of what is lacking.

    Raises HandoffError and TextError as `read_corpus` does; ExportError when the folder cannot take that name;
    BundleError when a file of the bundle is damaged; OSError, with ENOSPC before anything runs when it would not fit.
    """
    m = bundle.manifest
    _check_place(bundle, output)
    corpus = read_corpus(text, bundle, chat)
    for remark in (*corpus.remarks, *_shortness(m, corpus)):
        report(remark)
    graphs = _runnable(m)
    calibration = {g.file: planned_calibration(m, g, len(corpus), samples) for g in graphs}
    golden = {g.file: planned_golden(m, g, len(corpus)) for g in graphs}
    _check_reached(m, graphs, calibration, len(corpus))
    _check_space(bundle, output, calibration, golden)
    inline = _inline(bundle, target, report)
    with replacing_folder(output, HANDOFF) as folder:
        _copy_bundle(bundle, folder, inline)
        with warnings.catch_warnings():  # that float16 is computed in float32 is in `golden_by`
            warnings.simplefilter("ignore", UserWarning)
            tap = Tap(OrtBackend(bundle, graphs=[]))
        loaded = LoadedBundle(bundle, backend=tap)
        runs: dict[str, dict[int, Recorded]] = {g.file: {} for g in graphs}
        report("golden runs")
        for g in graphs:
            record(loaded, tap, corpus, golden[g.file], _golden_keeper(folder, runs[g.file]))
        with contextlib.ExitStack() as closing:
            writers: dict[str, SampleWriter] = {}
            for g in graphs:
                writers[g.file] = WRITERS[target.calibration](folder, stem(g), [value.name for value in g.inputs])
                closing.callback(writers[g.file].close)
            for g in graphs:
                report(f"calibration samples of {g.file}")
                count = record(loaded, tap, corpus, calibration[g.file], _sample_keeper(writers[g.file]))
                if count < samples:
                    report(f"{g.file}: the text gives {count} different samples, {samples} were asked for")
        data = describe(m, target, writers, runs)
        script = build_script(target)
        for name in ("replay.py", "jobs.py"):
            shutil.copyfile(KIT / name, folder / name)
        shutil.copyfile(KIT / script, folder / "build.py")
        example = next(runs[g.file][0] for g in graphs if g.role == "prefill" and not runs[g.file][0].stop.position)
        for name, page in readmes(m, target, data, _names(folder), script, example).items():
            (folder / name).write_text(page, encoding="utf-8")
        (folder / "handoff.json").write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        report("checksums")
        _write_sums(bundle, folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Handoff(folder=output, data=data, bytes=size)


def stem(graph: GraphInfo) -> str:
    """The name of a graph in the folder."""
    return Path(graph.file).stem


def build_script(target: Target) -> str:
    """The script of the kit that becomes build.py."""
    tool = target.tool.partition("==")[0] if target.tool is not None else target.calibration
    return BUILD_SCRIPTS[tool]


def form_fault(m: Manifest, target: Target) -> str | None:
    """The first flag in which the bundle's graphs differ from a profile's form, in words."""
    for name, has, wanted in differences(dataclasses.asdict(options_of(m)), target):
        allowed = f"{target.opsets[0]} .. {target.opsets[1]}" if name == "opset" else wanted
        return f"--{name.replace('_', '-')} is {has}, {target.name} takes {allowed}"
    return None


def describe(
    m: Manifest,
    target: Target,
    writers: Mapping[str, SampleWriter],
    runs: Mapping[str, Mapping[int, Recorded]],
) -> dict[str, Any]:
    """handoff.json. runs: file of a graph -> its golden runs by number."""
    cosine = COSINES.get(target.precision, 0.99)
    golden = {stem(g): [_golden_path(g, k) for k in sorted(runs[g.file])] for g in _runnable(m)}
    return {
        "format": FORMAT,
        "rollkv": importlib.metadata.version("rollkv"),
        "target": target.name,
        "tool": target.tool,
        "precision": target.precision,
        "model": m.source.id,
        "max_lm_input_len": m.max_lm_input_len,
        "chunk_size": m.chunk_size,
        "max_kvcache_len": m.max_kvcache_len,
        "kv_layout": m.kv_layout,
        "dtype": m.dtype,
        "mask_value": m.mask_value,
        "graphs": [
            {
                "name": stem(g),
                "file": g.file,
                "role": g.role,
                "rows": g.rows,
                "kv_len": g.kv_len,
                "head": g.head,
                "opset": g.opset,
                "inputs": [_value(value) for value in g.inputs],
                "outputs": [_value(value) for value in g.outputs],
            }
            for g in m.graphs
        ],
        "calibration": {
            "format": target.calibration,
            "graphs": {
                stem(g): {
                    "samples": writers[g.file].count,
                    "path": writers[g.file].path,
                    "list": writers[g.file].list_path,
                }
                for g in _runnable(m)
            },
        },
        "golden": golden,
        "golden_runs": {
            stem(g): [
                {"path": _golden_path(g, k), "past": run.stop.position, "pads": run.pads, "ids": list(run.ids)}
                for k, run in sorted(runs[g.file].items())
            ]
            for g in _runnable(m)
        },
        "golden_by": golden_by(m),
        "tolerances": {"cosine": cosine, "relative": round(2 * (2 * (1 - cosine)) ** 0.5, 6)},
        "kv_pairs": m.kv_pairs,
        "manifest": {k: v for k, v in dataclasses.asdict(m).items() if k not in ("graphs", "files", "kv_pairs")},
    }


def golden_by(m: Manifest) -> str:
    """What computed the golden outputs."""
    halves = ", float16 computed in float32 and rounded" if m.dtype == "float16" else ""
    return f"onnxruntime {import_onnxruntime().__version__}, CPU, all graph optimisations{halves}"


def _runnable(m: Manifest) -> list[GraphInfo]:
    return [*m.driven, *([] if m.head_graph is None else [m.head_graph])]


def _value(value: ValueInfo) -> dict[str, Any]:
    return {key: item for key, item in dataclasses.asdict(value).items() if item is not None}


def _golden_path(graph: GraphInfo, number: int) -> str:
    return f"golden/{stem(graph)}/{number}"


def _names(folder: Path) -> list[str]:
    """What the folder will hold, as the README lists it."""
    there = [f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()]
    return sorted([*there, "README.md", "README.zh.md", "handoff.json", "SHA256SUMS"])


def _golden_keeper(folder: Path, runs: dict[int, Recorded]) -> Callable[[Recorded], None]:
    def keep(run: Recorded) -> None:
        write_golden(folder, _golden_path(run.stop.wanted, run.stop.number), run.inputs, run.outputs)
        small = {name: array for name, array in run.inputs.items() if array.nbytes < 1 << 24}  # for the README
        runs[run.stop.number] = dataclasses.replace(run, inputs=small, outputs={})

    return keep


def _sample_keeper(writer: SampleWriter) -> Callable[[Recorded], None]:
    return lambda run: writer.add(run.inputs)


def _shortness(m: Manifest, corpus: Corpus) -> list[str]:
    """What to say of graphs whose cache the text does not fill."""
    remarks = []
    for graph in m.driven:
        (least, most), reached = served(m, graph), reach(m, graph, len(corpus))
        if least <= reached < most:
            remarks.append(
                f"the text is too short for a full cache of {graph.file}: it has {len(corpus)} tokens, so the fullest "
                f"run comes after {reached} tokens instead of {most}"
            )
    return remarks


def _check_place(bundle: Bundle, output: Path) -> None:
    check_output(output, HANDOFF)
    home = bundle.path.resolve()
    if home in (output.resolve(), *output.resolve().parents):
        raise HandoffError(f"-o {output}: lies in the bundle, into which nothing is written; give another folder")


def _check_reached(m: Manifest, graphs: Sequence[GraphInfo], stops: Mapping[str, Sequence[Stop]], have: int) -> None:
    for graph in graphs:
        if not stops[graph.file]:
            raise HandoffError(
                f"graph {graph.file} is used after {served(m, graph)[0]} tokens and more, the text has {have}; "
                "give a longer text"
            )


def _check_space(
    bundle: Bundle, output: Path, calibration: Mapping[str, Sequence[Stop]], golden: Mapping[str, Sequence[Stop]]
) -> None:
    """Raise OSError now, and not after minutes, when the folder will not fit."""
    need = sum(info.size for info in bundle.manifest.files.values())
    for graph in _runnable(bundle.manifest):
        inputs, outputs = _bytes(graph.inputs), _bytes(graph.outputs)
        need += len(calibration[graph.file]) * inputs + len(golden[graph.file]) * (inputs + outputs)
    nearest = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(nearest).free
    if need > free:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {need / 2**20:.0f} MiB are needed, {free / 2**20:.0f} MiB are free; "
            "--samples takes fewer",
            str(output),
        )


def _bytes(values: Sequence[ValueInfo]) -> int:
    return sum(int(np.prod(value.shape)) * np.dtype(value.dtype).itemsize for value in values)


def _inline(bundle: Bundle, target: Target, report: Callable[[str], None]) -> bool:
    """Whether each graph takes its weights into its own file."""
    if target.weights != "inline":
        return False
    size = (bundle.path / bundle.manifest.weights.file).stat().st_size
    if size > INLINE_LIMIT:
        report(f"the weights have {size} bytes, too many for one .onnx: they stay in {bundle.manifest.weights.file}")
    return size <= INLINE_LIMIT


def _copy_bundle(bundle: Bundle, folder: Path, inline: bool) -> None:
    m = bundle.manifest
    graphs = {graph.file for graph in m.graphs}
    for name in m.files:
        if inline and name in graphs:
            (folder / name).write_bytes(serialize(onnx.load(bundle.path / name)))
        elif not (inline and name == m.weights.file):
            shutil.copyfile(bundle.path / name, folder / name)


def _write_sums(bundle: Bundle, folder: Path) -> None:
    """SHA256SUMS, as sha256sum -c reads it. Raises BundleError when a copied file is not what the manifest says."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, digest = path.relative_to(folder).as_posix(), hash_file(path)
        known = bundle.manifest.files.get(name)
        if known is not None and known.size == path.stat().st_size and known.sha256 != digest:
            raise BundleError(f"{bundle.path / name}: its content is not what the manifest's sha256 says; export again")
        lines.append(f"{digest}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
