"""What static routing costs: a mixture of 64 experts of which 8 are chosen, against an MLP as wide as the 8 together.

Both are random models of 4 layers that differ in nothing else; medians of the same run, interleaved.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from conftest import export

from rollkv.runtime.session import Session

CHUNK, SLOTS = 128, 512
COMMON = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
EXPERTS = {"num_local_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "norm_topk_prob": True}


def session(folder: Path, family: str, **settings: Any) -> Session:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **COMMON, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "source")
    lengths = {"max_lm_input_len": CHUNK, "chunk_size": CHUNK, "max_kvcache_len": SLOTS}
    return Session(export(folder / "source", folder / "bundle", **lengths))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mixture = session(Path(folder) / "mixture", "qwen3_moe", intermediate_size=2048, **EXPERTS)
        dense = session(Path(folder) / "dense", "qwen3", intermediate_size=2048)
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(12):
            for name, each in (("mixture", mixture), ("dense", dense)):
                each.reset()
                for what, call in (("chunk", lambda e: e.prefill(range(CHUNK))), ("step", lambda e: e.decode(1))):
                    start = time.perf_counter()
                    call(each)
                    times.setdefault((name, what), []).append(time.perf_counter() - start)
    for what in ("chunk", "step"):
        a, b = (1000 * statistics.median(times[name, what]) for name in ("mixture", "dense"))
        print(f"{what}: mixture {a:.1f} ms, dense {b:.1f} ms, {a / b:.1f}x")


if __name__ == "__main__":
    main()
