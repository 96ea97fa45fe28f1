"""What a float16 bundle costs on the CPU: SmolLM2-135M, C = 1024, c = 128, 2 threads, against the same in float32.

    python -m benchmarks.float16

The copy has the same graphs with weights, constants, inputs and outputs in float16. ONNX Runtime has few float16
kernels for the CPU: it computes the others in float32, casts the weights once and the values around them.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.bundles import FOLDER, preset_bundle
from rollkv.export.write import file_infos
from rollkv.runtime import Session
from rollkv.runtime.bundle import Bundle, open_bundle


def halved(opened: Bundle, folder: Path) -> Bundle:
    """A copy in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    single, half = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
    for graph in opened.manifest.graphs:
        model = onnx.load(opened.path / graph.file)
        assert "Cast" not in {node.op_type for node in model.graph.node}
        for tensor in model.graph.initializer:
            if tensor.data_type == single:
                values = numpy_helper.to_array(tensor)
                assert np.abs(values).max() <= 65504
                tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), tensor.name))
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            if value.type.tensor_type.elem_type == single:
                value.type.tensor_type.elem_type = half
        onnx.save(model, folder / graph.file)
    (folder / "weights.bin").write_bytes(b"")
    (folder / "manifest.json").unlink(missing_ok=True)
    manifest = dataclasses.replace(opened.manifest, files=file_infos(folder))
    (folder / "manifest.json").write_text(manifest.to_json().replace('"float32"', '"float16"'))
    return open_bundle(folder)


def main() -> int:
    warnings.simplefilter("ignore")
    single = preset_bundle("smollm2-135m", 896, 128, 1024)
    sessions = {"float32": Session(single, threads=2), "float16": Session(halved(single, FOLDER / "half"), threads=2)}
    runs: dict[str, list[float]] = {name: [] for name in sessions}
    steps: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(4):
        for name, session in sessions.items():
            session.reset()
            start = time.perf_counter()
            session.prefill(list(range(100, 356)))
            if turn:
                runs[name].append((time.perf_counter() - start) / 2)
            for _ in range(8):
                start = time.perf_counter()
                session.decode(7)
                steps[name].append(time.perf_counter() - start)
    medians = {name: (statistics.median(runs[name]), statistics.median(steps[name])) for name in sessions}
    for name, (run, step) in medians.items():
        ratios = run / medians["float32"][0], step / medians["float32"][1]
        print(f"{name}: 128 rows {run * 1e3:.0f} ms ({ratios[0]:.1f}x), step {step * 1e3:.1f} ms ({ratios[1]:.1f}x)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
