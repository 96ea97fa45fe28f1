"""Against onnxruntime-genai on the same weights: SmolLM2-135M float32, 2 threads, C = 1024, c = 128, n = 512.

    pip install -e '.[genai]'
    python -m benchmarks.genai [ROUNDS]

Both make their model from one safetensors folder, which is timed, and both run in this process, taking turns; every
ratio is of one run of this script. In the second part two processes that only spin run beside. The machine's limit is
measured too: what NumPy's sgemm reaches, and how fast both cores read memory together.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bundles import FOLDER, preset
from rollkv.runtime import Session
from rollkv.runtime.backend import import_onnxruntime

C, ROWS, N, STEPS, THREADS = 1024, 128, 512, 24, 2
SIZES = ["-L", "896", "-c", str(ROWS), "-C", str(C)]
EXPORT = ["-c", "import sys; from rollkv.export.cli import main; sys.exit(main())", "export"]
LENGTHS = ["--context-buckets", "256,512,768"]


def safetensors_folder(output: Path) -> None:
    """The preset as a folder that both exporters read."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file = preset("smollm2-135m").path
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    tensors = {name: t.contiguous().clone() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    config.__dict__.pop("quantization_config", None)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "float32"
    config.save_pretrained(output)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(output)
    GenerationConfig(bos_token_id=1, eos_token_id=2).save_pretrained(output)


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return time.perf_counter() - start


def export_both(source: Path, ours: Path, theirs: Path) -> None:
    """Wall time of each whole process, in turns."""
    builder = ["-m", "onnxruntime_genai.models.builder", "-m", "smollm2", "-i", str(source), "-o", str(theirs)]
    builder += ["-p", "fp32", "-e", "cpu", "--extra_options", "hf_token=false"]
    times: dict[str, list[float]] = {"rollkv": [], "genai": []}
    for _ in range(3):
        times["rollkv"].append(timed([*EXPORT, str(source), "-o", str(ours), *SIZES]))
        shutil.rmtree(theirs, ignore_errors=True)
        times["genai"].append(timed(builder))
    a, b = (statistics.median(times[name]) for name in ("rollkv", "genai"))
    print(f"export, median of 3: {a:.1f} s; genai's builder {b:.1f} s; ratio {a / b:.2f} (bound 1)", flush=True)
    config = json.loads((theirs / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = THREADS
    (theirs / "genai_config.json").write_text(json.dumps(config))


class Theirs:
    def __init__(self, folder: Path) -> None:
        import onnxruntime_genai

        self._og: Any = onnxruntime_genai
        self._model = self._og.Model(str(folder))

    def run(self, ids: list[int]) -> tuple[float, list[float], list[int]]:
        """Seconds of a prompt up to its first token, of each step after it, and the tokens."""
        settings = self._og.GeneratorParams(self._model)
        settings.set_search_options(max_length=C, do_sample=False)
        generator, tokens, steps = self._og.Generator(self._model, settings), [], []
        start = time.perf_counter()
        generator.append_tokens(np.array(ids, np.int32))
        generator.generate_next_token()
        first = time.perf_counter() - start
        tokens.append(int(generator.get_next_tokens()[0]))
        for _ in range(STEPS):
            start = time.perf_counter()
            generator.generate_next_token()
            steps.append(time.perf_counter() - start)
            tokens.append(int(generator.get_next_tokens()[0]))
        return first, steps, tokens


class Ours:
    def __init__(self, folder: Path) -> None:
        self._session = Session(folder, threads=THREADS)

    def run(self, ids: list[int]) -> tuple[float, list[float], list[int]]:
        self._session.reset()
        generation = self._session.generate(ids, max_new_tokens=STEPS + 1, ignore_eos=True)
        times, tokens = [], []
        for _ in range(STEPS + 1):
            start = time.perf_counter()
            tokens.append(int(next(generation)))
            times.append(time.perf_counter() - start)
        return times[0], times[1:], tokens


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """So many processes that compute without end."""
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def best_rate(work: Callable[[], Any], amount: float) -> float:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return amount / statistics.median(times)


def sgemm_rate() -> float:
    """FLOP/s of NumPy's product of matrices of 2048."""
    a, b = (np.random.default_rng(k).random((2048, 2048), np.float32) for k in (0, 1))
    return best_rate(lambda: a @ b, 2 * 2048.0**3)


def read_rate() -> float:
    """Bytes/s that THREADS threads read together."""
    halves = [np.ones(1 << 27, np.float32) for _ in range(THREADS)]

    def read() -> None:
        threads = [threading.Thread(target=lambda half=half: np.einsum("i->", half)) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return best_rate(read, sum(half.nbytes for half in halves))


def compare(engines: dict[str, Any], rounds: int, beside: str) -> dict[str, tuple[float, float]]:
    """Medians of each engine's prompt and step, all in turns."""
    ids = list(range(100, 100 + N))
    prompts: dict[str, list[float]] = {name: [] for name in engines}
    steps: dict[str, list[float]] = {name: [] for name in engines}
    answers: dict[str, list[int]] = {}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            first, each, answers[name] = engine.run(ids)
            if turn:  # the first warms up
                prompts[name].append(first)
                steps[name] += each
    medians = {name: (statistics.median(prompts[name]), statistics.median(steps[name])) for name in engines}
    theirs = medians["genai"]
    print(f"{beside}, medians of {rounds} turns; ratio: genai's time / ours")
    for name, (prompt, step) in medians.items():
        same = sum(a == b for a, b in zip(answers[name], answers["genai"], strict=True))
        print(
            f"  {name:22} {N} tokens {prompt * 1e3:7.0f} ms ({theirs[0] / prompt:.2f}x)   step {step * 1e3:6.1f} ms "
            f"({theirs[1] / step:.2f}x)   {same} of {STEPS + 1} tokens as genai's",
            flush=True,
        )
    return medians


def main(arguments: list[str]) -> int:
    rounds = int(arguments[0]) if arguments else 7
    import_onnxruntime()  # with its telemetry off, before genai loads it
    source, ours, theirs = (FOLDER / "genai" / name for name in ("source", "rollkv", "genai"))
    lengths = FOLDER / "genai" / "rollkv-lengths"
    safetensors_folder(source)
    export_both(source, ours, theirs)
    timed([*EXPORT, str(source), "-o", str(lengths), *SIZES, *LENGTHS])
    engines = {"genai": Theirs(theirs), "rollkv": Ours(ours), "rollkv, visible 256..": Ours(lengths)}
    flops, bandwidth = sgemm_rate(), read_rate()
    print(f"sgemm {flops / 1e9:.0f} GFLOP/s, reading {bandwidth / 1e9:.1f} GB/s")
    quiet = compare(engines, rounds, "quiet")
    weights = 4 * 134_515_008
    table = 4 * 49152 * 576  # the head reads it too; a prompt needs it for its last row only
    for name in list(engines)[1:]:
        prompt, step = quiet[name]
        work = 2 * N * (weights - table) / 4 + 2 * table / 4 * (N // ROWS)
        work += 4 * 576 * 30 * N * N / 2  # scores and values of what a token sees
        read = weights + 2 * 4 * 192 * 30 * (N + STEPS / 2)
        print(
            f"  {name:22} of the machine's limit: prefill {work / prompt / flops:.2f} (bound 0.85), "
            f"decode {read / step / bandwidth:.2f} (bound 0.95)"
        )
    with spinning(2):
        busy = compare(engines, rounds, "two spinning processes beside")
    best = {k: min(quiet[name][k] for name in list(engines)[1:]) for k in (0, 1)}
    met = quiet["genai"][0] >= 1.6 * best[0] and quiet["genai"][1] >= 1.25 * best[1]
    return 0 if met and all(busy["genai"][k] >= min(busy[n][k] for n in list(engines)[1:]) for k in (0, 1)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
