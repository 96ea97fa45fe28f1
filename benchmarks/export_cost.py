"""What an export costs: CPU time of SmolLM2, bytes on disk, and memory that does not grow with the weights.

    python -m benchmarks.export_cost

CPU time is user + system of one process from after the imports to the finished bundle: both graphs, simplified,
audited, weights written, everything hashed. Memory is the highest anonymous part of the resident set (RssAnon, sampled
every 5 ms by the parent) of exports of two random llama checkpoints in bf16 shards, one of 100 MB and one above 3 GB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import json, sys, time
from pathlib import Path
from rollkv.export import audit, passes, pipeline, reference, trace, write
from rollkv.export.signature import resolve
from rollkv.models.checkpoint import open_checkpoint
import onnxsim, gguf, safetensors, onnx_ir, onnxscript, torch.onnx._internal.exporter._core
model, output, size = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
cpu, wall = time.process_time(), time.perf_counter()
checkpoint = open_checkpoint(model)
manifest = pipeline.export_bundle(checkpoint, resolve(checkpoint.config, **size), output, lambda *_: None)
print(json.dumps({
    "cpu": time.process_time() - cpu,
    "wall": time.perf_counter() - wall,
    "bytes": sum(info.size for info in manifest.files.values()),
    "unique": manifest.weights.unique_bytes,
}))
"""


def export(model: str, output: Path, size: dict[str, int]) -> dict[str, float]:
    """One export in a process of its own; its figures, and its highest RssAnon in MB."""
    command = [sys.executable, "-c", CHILD, model, str(output), json.dumps(size)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0
    while child.poll() is None:
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
            peak = max(peak, int(status.partition("RssAnon:")[2].split()[0]))
        except (OSError, IndexError):
            pass
        time.sleep(0.005)
    assert child.stdout is not None
    assert child.returncode == 0
    return {**json.loads(child.stdout.read()), "anon_mb": peak / 1000}


def random_llama(folder: Path, layers: int) -> int:
    """A llama of hidden size 2048 with random bf16 weights, a shard for each layer; returns its bytes."""
    import torch
    from safetensors.torch import save_file

    hidden, width, vocab, kv = 2048, 8192, 8192, 512
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}
    size = 0

    def shard(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        nonlocal size
        tensors = {k: (torch.randn(s, dtype=torch.float32) * 0.02).to(torch.bfloat16) for k, s in shapes.items()}
        save_file(tensors, folder / file)
        index.update(dict.fromkeys(shapes, file))
        size += (folder / file).stat().st_size

    shard("ends.safetensors", {
        "model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,),
    })  # fmt: skip
    for i in range(layers):
        p = f"model.layers.{i}"
        shard(f"layer{i}.safetensors", {
            f"{p}.input_layernorm.weight": (hidden,), f"{p}.post_attention_layernorm.weight": (hidden,),
            f"{p}.self_attn.q_proj.weight": (hidden, hidden), f"{p}.self_attn.k_proj.weight": (kv, hidden),
            f"{p}.self_attn.v_proj.weight": (kv, hidden), f"{p}.self_attn.o_proj.weight": (hidden, hidden),
            f"{p}.mlp.gate_proj.weight": (width, hidden), f"{p}.mlp.up_proj.weight": (width, hidden),
            f"{p}.mlp.down_proj.weight": (hidden, width),
        })  # fmt: skip
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return size


def main() -> int:
    size = {"max_lm_input_len": 1216, "chunk_size": 128, "max_kvcache_len": 1344}
    with tempfile.TemporaryDirectory(dir=".") as work:
        runs = [export("smollm2-135m", Path(work) / "smollm2", size) for _ in range(3)]
        best = sorted(runs, key=lambda run: run["cpu"])[1]
        print("SmolLM2-135M, L = 1216, c = 128, C = 1344, median of 3")
        print(f"  CPU time after imports   {best['cpu']:.1f} s (wall {best['wall']:.1f} s); bound 30 s")
        print(f"  bytes / unique bytes     {best['bytes'] / best['unique']:.4f}; bound 1.02")
        peaks = []
        for name, layers in (("small", 1), ("large", 26)):
            folder = Path(work) / name
            held = random_llama(folder, layers)
            run = export(str(folder), Path(work) / f"{name}-bundle", {"max_lm_input_len": 512, "max_kvcache_len": 640})
            peaks.append(run["anon_mb"])
            print(f"llama of {held / 1e6:.0f} MB in bf16: RssAnon peak {run['anon_mb']:.0f} MB, CPU {run['cpu']:.0f} s")
            for path in sorted(folder.iterdir()):
                path.unlink()
            for path in sorted((Path(work) / f"{name}-bundle").iterdir()):
                path.unlink()
        print(f"  difference of the peaks  {peaks[1] - peaks[0]:.0f} MB; bound 250 MB")
    return 0 if best["cpu"] <= 30 and best["bytes"] <= 1.02 * best["unique"] and peaks[1] - peaks[0] <= 250 else 1


if __name__ == "__main__":
    sys.exit(main())
