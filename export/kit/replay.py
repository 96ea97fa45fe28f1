"""Compare what a board or a simulator computed with the golden vectors of this folder.

    python replay.py OUTPUTS [--cosine X] [--layout nchw|nhwc] [--graph NAME]
    python replay.py --onnxruntime

OUTPUTS holds <graph>/<k>/<name>.npy, or .bin or .raw with float32 or float16 numbers, for each golden run k: feed
golden/<graph>/<k>/inputs/<name>.npy and write every output. Rows of pads mean nothing and are left out. Outputs are
looked at in the graph's order: layer by layer, keys before values, logits last; the first that diverges is where to
look. Exit code 1 when one diverges, is missing, damaged or not finite; 2 when the command or this folder is not right.

Needs Python 3.8 and NumPy; --onnxruntime, which runs the graphs of this folder itself, needs onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, NoReturn  # noqa: UP035 (Python 3.8)

import numpy as np

Array = Any  # of NumPy, whose types old versions do not have
Value = Dict[str, Any]  # noqa: UP006 (Python 3.8)
FOLDER = Path(__file__).resolve().parent
SUFFIXES = (".npy", ".bin", ".raw")
SLOT_AXES = {"bskd": (1, 1), "bksd": (2, 2), "bksd-kt": (3, 2)}  # kv_layout -> axis of a run's rows in keys, in values


class Wrong(Exception):
    """What stops a comparison of one output, in words."""


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Compare outputs with the golden vectors of this folder.")
    parser.add_argument("outputs", nargs="?", metavar="OUTPUTS", help="folder of <graph>/<k>/<name>.npy, .bin or .raw")
    parser.add_argument("--onnxruntime", action="store_true", help="run the folder's own graphs instead")
    parser.add_argument("--cosine", type=float, metavar="X", help="least cosine (default: of handoff.json)")
    parser.add_argument(
        "--layout",
        choices=("nchw", "nhwc"),
        default="nchw",
        help="axes of outputs with four: as in the graph, or moved by the tool to (0, 2, 3, 1) (default nchw)",
    )
    parser.add_argument("--graph", action="append", metavar="NAME", help="compare this graph only; may be repeated")
    options = parser.parse_args()
    handoff = json.loads((FOLDER / "handoff.json").read_text(encoding="utf-8"))
    graphs = [graph for graph in handoff["graphs"] if graph["name"] in handoff["golden"]]
    names = [graph["name"] for graph in graphs]
    for name in options.graph or []:
        if name not in names:
            parser.error("--graph {} is not in this folder; it has {}".format(name, ", ".join(names)))
    if options.graph:
        graphs = [graph for graph in graphs if graph["name"] in options.graph]
    if (options.outputs is None) != options.onnxruntime:
        parser.error("give either OUTPUTS or --onnxruntime")
    if options.outputs is not None and not Path(options.outputs).is_dir():
        parser.error(f"OUTPUTS {options.outputs}: no such folder")
    if options.cosine is not None and not 0 < options.cosine <= 1:
        parser.error(f"--cosine is {options.cosine}, allowed: above 0, at most 1")
    cosine, relative = handoff["tolerances"]["cosine"], handoff["tolerances"]["relative"]
    if options.cosine is not None:  # the difference of two vectors of one length and that cosine, and as much again
        cosine, relative = options.cosine, max(1e-6, 2 * (2 * (1 - options.cosine)) ** 0.5)
    faults = []
    for graph in graphs:
        engine = load_engine(graph) if options.onnxruntime else None
        for run in handoff["golden_runs"][graph["name"]]:
            where = "{}/{}".format(graph["name"], Path(run["path"]).name)
            made = run_engine(engine, graph, run) if engine is not None else None
            for output in in_order(graph["outputs"]):
                wanted = golden(run, output)
                try:
                    if made is not None:
                        got = made[output["name"]]
                    else:
                        got = read(Path(options.outputs) / where, output, options.layout)
                    a, b = (real_rows(array, graph, run, output, handoff) for array in (wanted, got))
                    fault, line = compare(a, b, cosine, relative)
                except Wrong as error:
                    fault, line = str(error), ""
                print(
                    "{:24} {:24} {}".format(where, output["name"], line + ("" if fault is None else "  <-- " + fault))
                )
                if fault is not None:
                    faults.append(("{} of {}".format(output["name"], where), fault, line != ""))
    if not faults:
        print(f"all outputs agree: cosine at least {cosine:g}, relative difference at most {relative:.3g}")
        return 0
    diverging = [fault for fault in faults if fault[2]]
    unread = len(faults) - len(diverging)
    if unread:
        name, fault, _ = next(fault for fault in faults if not fault[2])
        print(f"{unread} outputs could not be compared, the first is {name}: {fault}")
    if diverging:
        print(f"the first tensor that diverges is {diverging[0][0]}: {diverging[0][1]}")
    return 1


def in_order(outputs: list[Value]) -> list[Value]:
    """Keys and values layer by layer, then what has no layer."""
    cached = [value for value in outputs if value.get("layer") is not None]
    rest = [value for value in outputs if value.get("layer") is None]
    return sorted(cached, key=lambda value: (value["layer"], value["role"] != "new_key")) + rest


def golden(run: Value, output: Value) -> Array:
    """The expected array."""
    path = FOLDER / run["path"] / "outputs" / (output["name"] + ".npy")
    try:
        array: Array = np.load(str(path), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        damaged(path, error)
    return array


def damaged(path: Path, error: Exception) -> NoReturn:
    """End: the folder itself is not whole."""
    print(f"{path}: {error}; check the folder with sha256sum -c SHA256SUMS", file=sys.stderr)
    sys.exit(2)


def read(folder: Path, output: Value, layout: str) -> Array:
    """An output that was written, in the graph's shape."""
    shape = tuple(output["shape"])
    moved = layout == "nhwc" and len(shape) == 4
    stored = tuple(shape[axis] for axis in (0, 2, 3, 1)) if moved else shape
    count = int(np.prod(shape))
    path = next((p for p in (folder / (output["name"] + suffix) for suffix in SUFFIXES) if p.is_file()), None)
    if path is None:
        raise Wrong("missing: no {}.npy, .bin or .raw in {}".format(output["name"], folder))
    if path.suffix == ".npy":
        try:
            array = np.load(str(path), allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise Wrong("{} cannot be read: {}".format(path.name, " ".join(str(error).split()))) from None
        if array.dtype.kind != "f":
            raise Wrong(f"{path.name} holds {array.dtype}, want float32 or float16")
        if array.shape != stored and array.shape != (count,):
            raise Wrong(f"{path.name} has the shape {list(array.shape)}, want {list(stored)}")
    else:
        size = path.stat().st_size
        kinds = {4 * count: "<f4", 2 * count: "<f2"}
        if size not in kinds:
            raise Wrong(f"{path.name} has {size} bytes, want {4 * count} (float32) or {2 * count} (float16)")
        array = np.fromfile(str(path), kinds[size])
    array = array.reshape(stored)
    return np.transpose(array, (0, 3, 1, 2)) if moved else array


def real_rows(array: Array, graph: Value, run: Value, output: Value, handoff: Value) -> Array:
    """Without the rows of pads, which see nothing and whose numbers differ from engine to engine."""
    if output.get("layer") is not None:
        axis = SLOT_AXES[handoff["kv_layout"]][output["role"] == "new_value"]
    elif array.ndim > 1 and array.shape[1] == graph["rows"] > 1:
        axis = 1
    else:
        return array
    return np.moveaxis(array, axis, 0)[run["pads"] :]


def difference(wanted: Array, got: Array) -> tuple[float, float, float]:
    """Cosine, largest absolute difference, and the difference's length over that of wanted, in float64.

    What is not finite has a cosine of -1 and is infinitely far off.
    """
    a, b = wanted.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    if not np.isfinite(b).all():
        return -1.0, float("inf"), float("inf")
    size, other = float(np.sqrt(a @ a)), float(np.sqrt(b @ b))
    cosine = min(1.0, float(a @ b) / (size * other)) if size and other else float(size == other)
    off = float(np.sqrt((a - b) @ (a - b)))
    return cosine, float(np.abs(a - b).max()) if a.size else 0.0, off / size if size else off


def compare(wanted: Array, got: Array, least: float, most: float) -> tuple[str | None, str]:
    """What is wrong, or None; and the numbers as text."""
    bad = int(got.size - np.isfinite(got).sum())
    if bad:
        return f"{bad} of {got.size} numbers are not finite", "cosine nan"
    cosine, largest, relative = difference(wanted, got)
    line = f"cosine {cosine:.6f}  max abs {largest:.2e}  relative {relative:.2e}"
    if cosine < least - 1e-12:
        return f"cosine {cosine:.6f} is below {least:g}", line
    if relative > most:
        return f"differs by {relative:.2e} of its size, above {most:.3g}", line
    return None, line


def load_engine(graph: Value) -> Any:
    """A session of ONNX Runtime."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        print("--onnxruntime needs onnxruntime, which is not installed: pip install onnxruntime", file=sys.stderr)
        sys.exit(2)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(FOLDER / graph["file"]), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises many kinds
        damaged(FOLDER / graph["file"], error)


def run_engine(engine: Any, graph: Value, run: Value) -> dict[str, Array]:
    """Outputs of one golden run, by name."""
    feeds = {}
    for value in graph["inputs"]:
        path = FOLDER / run["path"] / "inputs" / (value["name"] + ".npy")
        try:
            feeds[value["name"]] = np.load(str(path), allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            damaged(path, error)
    names = [value["name"] for value in graph["outputs"]]
    return dict(zip(names, engine.run(names, feeds)))  # noqa: B905 (Python 3.8)


if __name__ == "__main__":
    sys.exit(main())
