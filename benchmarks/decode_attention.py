"""A decode step that takes past and new keys apart, against one that joins them first as a prefill run does.

    python -m benchmarks.decode_attention [SLOTS ...]

SmolLM2-135M float32, 2 threads, in every layout. Both bundles are loaded in one process and take turns, 20 steps at a
time after a prompt of 512 tokens; medians of ROUNDS rounds.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.bundles import FOLDER, preset
from rollkv.export.pipeline import export_bundle
from rollkv.export.signature import resolve
from rollkv.runtime import Session

LAYOUTS, SIZES, FORMS = ("bskd", "bksd", "bksd-kt"), (1024, 4096), ("joined", "apart")
STEPS, ROUNDS = 20, 6


def main(arguments: list[str]) -> int:
    checkpoint, slower = preset("smollm2-135m"), []
    FOLDER.mkdir(parents=True, exist_ok=True)
    print("layout       C      joined       apart   (a decode step, ms)")
    for slots in map(int, arguments) if arguments else SIZES:
        for layout in LAYOUTS:
            folder = Path(tempfile.mkdtemp(dir=FOLDER))
            try:
                times: dict[str, list[float]] = {form: [] for form in FORMS}
                sessions = {}
                for form in FORMS:
                    options = resolve(
                        checkpoint.config,
                        max_lm_input_len=512,
                        max_kvcache_len=slots,
                        kv_layout=layout,
                        decode_attention=form,
                    )
                    export_bundle(checkpoint, options, folder / form, lambda *_: None)
                    sessions[form] = Session(folder / form, threads=2)
                    sessions[form].prefill(range(100, 612))
                for number in range(ROUNDS + 1):
                    for form, session in sessions.items():
                        for _ in range(STEPS):
                            start = time.perf_counter()
                            session.decode(7)
                            if number:  # the first round warms up
                                times[form].append(time.perf_counter() - start)
                joined, apart = (statistics.median(times[form]) * 1e3 for form in FORMS)
                if apart > joined:
                    slower.append(f"{layout} at {slots}")
                print(f"{layout:8} {slots:5} {joined:11.1f} {apart:11.1f}", flush=True)
            finally:
                shutil.rmtree(folder)
    print(f"apart is slower: {', '.join(slower) or 'nowhere'}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
