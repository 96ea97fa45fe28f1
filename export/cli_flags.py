"""The flags of `rollkv export` that say what a bundle is made of and in which form. Imports nothing heavy."""

from __future__ import annotations

import argparse

from rollkv.models.projections import DEFAULT_PROJECTIONS
from rollkv.runtime.cli_options import size, sizes


def add_export_flags(export: argparse.ArgumentParser) -> None:
    """Add them, and the argument MODEL."""
    export.add_argument(
        "model",
        metavar="MODEL",
        help="preset (smollm2-135m, qwen2.5-coder-0.5b), Hugging Face folder, .gguf file or hub id",
    )
    export.add_argument(
        "-o",
        "--output",
        metavar="BUNDLE",
        required=True,
        help="folder to write; a bundle that is there is replaced at the end",
    )
    export.add_argument("--lora", metavar="FOLDER", help="PEFT LoRA adapter to merge into the weights")
    export.add_argument(
        "-L", "--max-lm-input-len", metavar="L", type=int, help="longest prompt in tokens (default 1024)"
    )
    export.add_argument(
        "-c",
        "--chunk-size",
        metavar="c",
        type=sizes,
        help="rows of one prefill run (default 128); several, such as 32,128,512, make a prefill graph each",
    )
    export.add_argument(
        "--speculate",
        metavar="ROWS",
        type=size,
        help="make a prefill graph of ROWS rows that gives the logits of all of them, for speculative decoding",
    )
    export.add_argument(
        "-C",
        "--max-kvcache-len",
        metavar="C",
        type=int,
        help="key slots that a query can see, its own run included (default L + 256)",
    )
    export.add_argument(
        "--context-buckets",
        metavar="C'",
        type=sizes,
        default=(),
        help="smaller visible lengths, such as 256,512, each with graphs of its own: a run with little behind it does "
        "not pay for an empty cache (default none)",
    )
    export.add_argument(
        "--allow-no-room", action="store_true", help="allow C == L, which leaves the longest prompt one token"
    )
    add_form_flags(export)
    export.add_argument(
        "--projections",
        choices=("separate", "joined"),
        help="products as the checkpoint has them, or those of q, k, v and of gate, up as one each, with norms and the "
        f"scale of the scores folded in (default {DEFAULT_PROJECTIONS}, or the target's)",
    )
    export.add_argument("--no-simplify", action="store_true", help="leave onnxsim out")


def add_form_flags(export: argparse.ArgumentParser) -> None:
    """Add `--target` and the flags that set each field of a graph's form alone."""
    export.add_argument(
        "--target",
        metavar="TARGET",
        help="NPU compiler whose graph form is the default of the flags below (`rollkv targets` lists them)",
    )
    layouts = ("bskd", "bksd", "bksd-kt")
    export.add_argument("--kv-layout", choices=layouts, help="axes of the cache (default bskd)")
    export.add_argument("--ids", choices=("int32", "int64"), help="type of ids and positions (default int32)")
    export.add_argument(
        "--input",
        choices=("ids", "embeds"),
        help="what a run takes: token ids, or their embeddings, which the host looks up (default ids)",
    )
    export.add_argument(
        "--decode-attention",
        choices=("apart", "joined"),
        help="a decode step takes past and new keys apart, which copies neither, or joins them first as a prefill run "
        "does (default apart)",
    )
    export.add_argument(
        "--head",
        choices=("last", "all", "none", "split"),
        help="rows of logits; none: the graphs give the last hidden row, which the host multiplies; split: which a "
        "graph of its own, head.onnx, takes (default last)",
    )
    export.add_argument(
        "--norm",
        choices=("plain", "rowmax", "native", "rsqrt"),
        help="form of RMSNorm: x / sqrt(mean(x x) + eps); each row scaled by its largest value first, which stays "
        "finite in float16; the op RMSNormalization (opset 23); with a Reciprocal (default plain)",
    )
    export.add_argument(
        "--gqa",
        choices=("fold", "repeat"),
        help="heads of a group: query heads folded into rows, or key/value heads repeated (default fold)",
    )
    export.add_argument(
        "--rope",
        choices=("graph", "feed"),
        help="rotary tables in the graph, or cos and sin fed by the host (default graph)",
    )
    export.add_argument(
        "--dtype", choices=("float32", "float16"), help="of weights, caches and masks (default float32)"
    )
    export.add_argument("--mask-value", metavar="X", type=float, help="what hides a slot (default --mask-value=-32768)")
    export.add_argument("--opset", type=int, choices=range(13, 24), help="ONNX opset (default 17)")
