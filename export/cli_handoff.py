"""`rollkv handoff`. Imports late."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollkv.export.stopping import stopped_cleanly
from rollkv.runtime.cli import UsageError
from rollkv.runtime.cli_options import number

if TYPE_CHECKING:
    from rollkv.export.targets import Target
    from rollkv.runtime.bundle import Manifest

DEFAULT_SAMPLES = 20


def add_handoff_command(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    handoff = commands.add_parser(
        "handoff",
        help="write a folder for a toolchain engineer",
        description="Write a folder that a toolchain engineer can use as it is: graphs, calibration samples from the "
        "chunk loop over your text, golden vectors, a build script, a replay script, a README in English and Chinese.",
    )
    handoff.add_argument("bundle", metavar="BUNDLE", help="folder that `rollkv export` wrote")
    handoff.add_argument(
        "--data",
        metavar="FILE",
        required=True,
        help="what the model will be asked: a UTF-8 .txt file, or a .jsonl file of {prompt}, {text}, {messages}, {ids}",
    )
    handoff.add_argument(
        "-o", "--output", metavar="FOLDER", required=True, help="folder to write; a handoff that is there is replaced"
    )
    handoff.add_argument(
        "--chat", action="store_true", help="put each record, or each line of a .txt file, into the chat template"
    )
    handoff.add_argument(
        "--samples",
        metavar="N",
        type=number(1),
        default=DEFAULT_SAMPLES,
        help=f"calibration samples of each graph (default {DEFAULT_SAMPLES})",
    )
    handoff.add_argument(
        "--target",
        metavar="TARGET",
        help="file formats and build script of this target (default: the one that the bundle was exported for)",
    )
    handoff.add_argument("--json", action="store_true", help="print a summary as JSON")
    handoff.set_defaults(main=handoff_command)


def handoff_command(options: argparse.Namespace) -> int:
    """`rollkv handoff`."""
    started = time.perf_counter()
    from rollkv.runtime.bundle import open_bundle

    bundle = open_bundle(options.bundle)
    target = _target(bundle.manifest, options.target)
    from rollkv.export.handoff import hand_over

    with stopped_cleanly():
        made = hand_over(
            bundle,
            Path(options.data),
            Path(options.output),
            target,
            chat=options.chat,
            samples=options.samples,
            report=_say,
        )
    samples = {name: graph["samples"] for name, graph in made.data["calibration"]["graphs"].items()}
    summary = {
        "folder": str(made.folder),
        "target": target.name,
        "calibration": target.calibration,
        "samples": samples,
        "golden": {name: len(paths) for name, paths in made.data["golden"].items()},
        "bytes": made.bytes,
        "seconds": round(time.perf_counter() - started, 2),
    }
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        counts = ", ".join(f"{name} {count}" for name, count in samples.items())
        print(
            f"{made.folder}: for {target.name}, samples ({target.calibration}): {counts}, "
            f"{made.bytes / 2**20:.1f} MiB, {summary['seconds']} s"
        )
    return 0


def _target(m: Manifest, given: str | None) -> Target:
    """The profile to write for. Raises UsageError for an unknown one, or one whose form the graphs do not have."""
    from rollkv.export.cli_targets import find_target
    from rollkv.export.handoff import form_fault

    target: Target = find_target(given or m.target or "universal")
    fault = form_fault(m, target)
    if given is not None and given != m.target and fault is not None:
        raise UsageError(
            f"--target {given}: {fault}, so the graphs are not in its form; export them with --target {given}"
        )
    if given is None and m.target is None:
        _say("the bundle was exported for no target: samples are .npz, as for universal; --target takes another format")
    elif fault is not None:
        _say(f"the bundle was exported for {target.name} with another form: {fault}")
    return target


def _say(text: str) -> None:
    print(f"rollkv handoff: {text}", file=sys.stderr)
