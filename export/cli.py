"""The command `rollkv`: export and verify here, run, chat and info from the runtime. Imports late."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollkv.export.cli_audit import add_audit_command
from rollkv.export.cli_flags import add_export_flags
from rollkv.export.cli_targets import add_target_commands, find_target
from rollkv.export.cli_toolchain import add_toolchain_commands
from rollkv.export.stopping import stopped_cleanly
from rollkv.runtime.cli import Parser, UsageError, add_commands, run_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    return run_commands(build_parser(), arguments)


def build_parser() -> argparse.ArgumentParser:
    """Every command with every flag."""
    parser = Parser(
        prog="rollkv",
        description="Take a language model to an NPU board: static ONNX graphs, chunked prefill, a rolling KV cache.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    export = commands.add_parser(
        "export", help="write a bundle from a checkpoint", description="Write a bundle from a checkpoint."
    )
    add_export_flags(export)
    export.add_argument("--json", action="store_true", help="print a summary as JSON")
    export.set_defaults(main=export_command)

    verify = commands.add_parser(
        "verify",
        help="prove a bundle against transformers",
        description="Prove a bundle against transformers' own model of its checkpoint, rung by rung.",
    )
    verify.add_argument("bundle", metavar="BUNDLE", help="folder that `rollkv export` wrote")
    verify.add_argument(
        "--reference", metavar="MODEL", help="the checkpoint (default: the preset or hub id that the manifest names)"
    )
    verify.add_argument(
        "--lora", metavar="FOLDER", help="the adapter that was merged, which the reference needs peft for"
    )
    output = verify.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the report as JSON")
    output.add_argument("--json-out", metavar="FILE", help="write the report as JSON to a file, besides the table")
    verify.set_defaults(main=verify_command)

    families = commands.add_parser(
        "families",
        help="what can be exported",
        description="List every model_type that can be exported: in what it differs from llama, and what its graphs "
        "were proved with (docs/families.md has the errors).",
    )
    families.add_argument("--json", action="store_true", help="print the table as JSON")
    families.set_defaults(main=families_command)

    add_target_commands(commands)
    add_audit_command(commands)
    add_toolchain_commands(commands)
    add_commands(commands)
    bench = commands.choices["bench"]
    bench.add_argument(
        "--reference",
        metavar="MODEL",
        help="also time transformers on this checkpoint (preset, folder, GGUF file or hub id)",
    )
    bench.set_defaults(main=_bench)
    return parser


def _bench(options: argparse.Namespace) -> int:
    """`rollkv bench`, against transformers with its fastest attention for the CPU where the model is given."""
    from rollkv.runtime.bench import bench_command, checked_plot
    from rollkv.runtime.bundle import open_bundle

    if options.reference is None:
        return bench_command(options)
    checked_plot(options)
    bundle = open_bundle(options.bundle)
    import torch

    from rollkv.export.reference import Reference
    from rollkv.models.checkpoint import open_checkpoint
    from rollkv.runtime.backend import available_threads

    torch.set_num_threads(options.threads or available_threads())
    checkpoint = open_checkpoint(options.reference, _Progress("bench").line)
    m, config = bundle.manifest, checkpoint.config
    ours = m.vocab_size, m.hidden_size, len(m.layers)
    theirs = config.vocab_size, config.hidden_size, len(config.layers)
    if ours != theirs:
        raise UsageError(
            f"--reference {options.reference}: is another model than the bundle's: vocabulary, hidden size and layers "
            f"are {theirs}, those of the bundle {ours}"
        )
    return bench_command(options, Reference(checkpoint, bundle.manifest.max_kvcache_len, attention="sdpa").timed)


def families_command(options: argparse.Namespace) -> int:
    """`rollkv families`."""
    from rollkv.models.config import ROPE_TYPES
    from rollkv.models.family_listing import entries

    table = entries()
    if options.json:
        print(json.dumps([dataclasses.asdict(entry) for entry in table], indent=2))
        return 0
    width = max(len(entry.model_type) for entry in table)
    for entry in table:
        text = f"{'; '.join(entry.features) or 'as llama'} [{entry.proved_with}]"
        print(
            textwrap.fill(
                text, 118, initial_indent=f"{entry.model_type:{width}}  ", subsequent_indent=" " * (width + 2)
            )
        )
    print(f"\nRotary positions: {', '.join(ROPE_TYPES)} (proportional: gemma4_text).")
    return 0


def export_command(options: argparse.Namespace) -> int:
    """`rollkv export`."""
    progress = _Progress("export")
    from rollkv.export.audit import MASK_OPERAND_LIMIT, mask_operand_bytes
    from rollkv.export.signature import resolve
    from rollkv.export.write import check_output
    from rollkv.models.checkpoint import open_checkpoint

    started = time.perf_counter()
    output = Path(options.output)
    check_output(output)
    checkpoint = open_checkpoint(options.model, progress.line, _folder(options.lora))
    chosen = resolve(
        checkpoint.config,
        max_lm_input_len=options.max_lm_input_len,
        chunk_size=options.chunk_size,
        max_kvcache_len=options.max_kvcache_len,
        context_buckets=options.context_buckets,
        speculate=options.speculate,
        allow_no_room=options.allow_no_room,
        target=None if options.target is None else find_target(options.target),
        kv_layout=options.kv_layout,
        ids=options.ids,
        head=options.head,
        input=options.input,
        decode_attention=options.decode_attention,
        projections=options.projections,
        mask_value=options.mask_value,
        opset=options.opset,
        norm=options.norm,
        gqa=options.gqa,
        rope=options.rope,
        dtype=options.dtype,
        simplify=not options.no_simplify,
    )
    from rollkv.export.pipeline import export_bundle

    with progress, stopped_cleanly():
        manifest = export_bundle(checkpoint, chosen, output, progress.step)
    size = sum(info.size for info in manifest.files.values())
    masks = [value.shape[-1] for graph in manifest.graphs for value in graph.inputs if value.role.endswith("_mask")]
    operand = mask_operand_bytes(checkpoint.config.num_heads, chosen.chunk_size, max(masks))
    if "tokenizer.json" not in checkpoint.text:
        progress.line(
            "the checkpoint has no tokenizer.json: this bundle takes token ids only (Session in the Python API)"
        )
    if operand > MASK_OPERAND_LIMIT:
        progress.line(
            f"the mask operand of a prefill run is {operand / 2**20:.2f} MiB (2 bytes x heads x c x {max(masks)} "
            "slots); above 1 MiB a known HTP compiler pairs rows wrongly: check there, or lower -c"
        )
    for rope in checkpoint.config.ropes:
        if rope.type in ("dynamic", "longrope"):
            long = chosen.max_kvcache_len > (rope.original_max_position or 0)
            progress.line(
                f"rope type {rope.type}: scaled for C = {chosen.max_kvcache_len} whatever the prompt's length "
                f"({'above' if long else 'up to'} the original {rope.original_max_position} positions); transformers "
                "chooses anew for each length"
            )
    summary = {
        "bundle": str(output),
        "max_lm_input_len": chosen.max_lm_input_len,
        "chunk_size": chosen.chunk_size,
        "chunk_sizes": list(chosen.prefill_rows),
        "context_buckets": list(chosen.context_buckets),
        "speculate": chosen.speculate,
        "max_kvcache_len": chosen.max_kvcache_len,
        "bytes": size,
        "unique_weight_bytes": manifest.weights.unique_bytes,
        "mask_operand_bytes": operand,
        "seconds": round(time.perf_counter() - started, 2),
    }
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        sizes = "/".join(map(str, chosen.prefill_rows))
        visible = f" (visible {'/'.join(map(str, chosen.kv_lens))})" if chosen.context_buckets else ""
        print(
            f"{output}: L = {chosen.max_lm_input_len}, c = {sizes}, C = {chosen.max_kvcache_len}{visible}, "
            f"{size / 2**20:.1f} MiB, {summary['seconds']} s"
        )
    return 0


def verify_command(options: argparse.Namespace) -> int:
    """`rollkv verify`."""
    from rollkv.runtime.bundle import open_bundle

    bundle = open_bundle(options.bundle)
    if options.json_out and not Path(options.json_out).absolute().parent.is_dir():
        raise UsageError(f"--json-out {options.json_out}: no such folder")
    if options.json_out and Path(options.json_out).is_dir():
        raise UsageError(f"--json-out {options.json_out}: is a folder")
    if options.lora is not None and importlib.util.find_spec("peft") is None:
        raise UsageError(
            f"--lora {options.lora}: the reference merges it with peft, which is missing: pip install peft"
        )
    source = bundle.manifest.source
    model = options.reference
    if model is None:
        if source.kind not in ("preset", "hub"):
            raise UsageError(f"the bundle was made from the {source.kind} {source.id!r}; pass it with --reference")
        model = source.id
    from rollkv.export.verify import verify_bundle
    from rollkv.models.checkpoint import open_checkpoint

    progress = _Progress("verify")
    checkpoint = open_checkpoint(model, progress.line, _folder(options.lora))
    report = verify_bundle(bundle, checkpoint, progress.line)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    else:
        _print_report(report)
        if options.json_out:
            Path(options.json_out).write_text(
                json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8"
            )
    if report.fault:
        print(f"rollkv: verification failed: {report.fault}", file=sys.stderr)
    return 1 if report.fault else 0


def _folder(lora: str | None) -> Path | None:
    return None if lora is None else Path(lora)


def _print_report(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.bundle} against {report.source}")
    law = any(row.kl is not None for row in report.rows)  # of a float16 bundle: the bound is on KL
    for name in (
        "rung",
        "prompt",
        "max abs",
        "relative",
        *(["KL"] if law else []),
        "bound",
        "top-1",
        "keys, values",
        "",
    ):
        table.add_column(name, justify="left" if name in ("rung", "") else "right")
    for row in report.rows:
        numbers = [""] * (6 if law else 5)
        if row.steps:
            ties = f" +{row.near_ties} tie" if row.near_ties else ""
            share = f" {row.top1 / row.steps:.1%}" if row.kl is not None else ""
            numbers = [f"{row.max_abs:.2e}", f"{row.relative:.1e}", f"{row.bound:.0e}"]
            if law:
                numbers.insert(2, "" if row.kl is None else f"{row.kl:.1e}")
            numbers += [f"{row.top1}/{row.steps}{share}{ties}", f"{row.kv_relative:.1e}" if row.kv_relative else ""]
        table.add_row(
            row.rung, str(row.n or ""), *numbers, "skipped" if row.skipped else "ok" if row.holds else "BROKEN"
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


class _Progress:
    """A bar on a terminal, plain lines otherwise, both on stderr."""

    def __init__(self, verb: str) -> None:
        self._verb, self._bar, self._tasks = verb, None, {}  # type: str, Any, dict[str, Any]

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(self, what: str, done: int, total: int) -> None:
        """Part of a job."""
        if self._bar is not None:
            name = what.partition(" ")[0]
            if name not in self._tasks:
                self._tasks[name] = self._bar.add_task(name, total=total)
            self._bar.update(self._tasks[name], completed=done, description=what)
        elif done == 0 or " " in what:
            self.line(what)

    def line(self, text: str) -> None:
        """A remark."""
        print(f"rollkv {self._verb}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
