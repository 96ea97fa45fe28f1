"""`rollkv toolchain`: list, install and try NPU compilers. Imports late."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rollkv.runtime.cli import UsageError

DEFAULT_COSINE = 0.999  # where handoff.json names none


def add_toolchain_commands(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    toolchain = commands.add_parser(
        "toolchain",
        help="try an NPU compiler on a hand-off",
        description="Install NPU compilers into environments of their own, and try them on a folder that `rollkv "
        "handoff` wrote. Nothing is installed unless it is asked for.",
    )
    verbs = toolchain.add_subparsers(metavar="VERB", required=True)

    listing = verbs.add_parser(
        "list",
        help="what there is",
        description="List the toolchains: what they take of the disk, their licences, and which are installed.",
    )
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    listing.set_defaults(main=list_command)

    install = verbs.add_parser(
        "install",
        help="make a toolchain's environment",
        description="Make a toolchain's environment from the Python package index. Says its size and its licence; "
        "without --yes that is all.",
    )
    install.add_argument("toolchain", metavar="TOOLCHAIN", help="one of `rollkv toolchain list`")
    install.add_argument("--yes", action="store_true", help="install: size and licence are known")
    install.add_argument(
        "--into",
        metavar="ENV",
        help="folder of the environment (default: in $ROLLKV_TOOLCHAINS, else in the cache of rollkv)",
    )
    install.add_argument(
        "--python", metavar="PYTHON", help="interpreter to make it with (default: this, or the PATH's)"
    )
    install.add_argument("--torch-index", metavar="URL", help="wheel index to take the CPU build of torch from")
    install.set_defaults(main=install_command)

    attempt = verbs.add_parser(
        "try",
        help="compile, simulate, compare",
        description="Compile a handed-off folder with its own build script, run the tool's simulator on the golden "
        "vectors, and print cosine and largest error of every output, time, memory, and ops that are not on the NPU.",
    )
    attempt.add_argument("folder", metavar="FOLDER", help="folder that `rollkv handoff` wrote")
    attempt.add_argument("--tool", metavar="TOOLCHAIN", help="toolchain (default: that of handoff.json)")
    attempt.add_argument("--env", metavar="ENV", help="its environment (default: where `install` puts it)")
    attempt.add_argument(
        "--graph", metavar="GRAPH", action="append", default=[], help="only this graph; may be repeated"
    )
    attempt.add_argument(
        "--cosine",
        metavar="X",
        type=float,
        help=f"least cosine of an output (default: that of handoff.json, else {DEFAULT_COSINE})",
    )
    attempt.add_argument("--build", metavar="BUILD", help="folder for what the tool makes (default FOLDER/build)")
    attempt.add_argument(
        "--flag", metavar="FLAG", action="append", default=[], help="one more for the build script, as --flag=--chip=x"
    )
    attempt.add_argument("--json", action="store_true", help="print the report as JSON")
    attempt.set_defaults(main=try_command)


def list_command(options: argparse.Namespace) -> int:
    """`rollkv toolchain list`."""
    from rollkv.export.toolchains import TOOLCHAINS, default_environment, fault_of

    rows = [
        {
            **dataclasses.asdict(toolchain),
            "environment": str(default_environment(toolchain)),
            "installed": fault_of(toolchain, default_environment(toolchain)) is None,
        }
        for toolchain in TOOLCHAINS.values()
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(f"{row['name']:9} {row['requirement']}, Python {' or '.join(row['pythons'])}, {row['megabytes']} MB")
        print(f"{'':9} licence: {row['licence']}")
        print(f"{'':9} {'installed in' if row['installed'] else 'not installed in'} {row['environment']}")
    return 0


def install_command(options: argparse.Namespace) -> int:
    """`rollkv toolchain install`."""
    from rollkv.export.toolchains import default_environment, find_toolchain, install

    toolchain = find_toolchain(options.toolchain)
    environment = Path(options.into) if options.into else default_environment(toolchain)
    terms = f"{toolchain.requirement} takes {toolchain.megabytes} MB in {environment}; licence: {toolchain.licence}"
    if not options.yes:
        raise UsageError(f"{terms}; nothing was installed: say --yes to install it")
    _say(terms)
    install(toolchain, environment.absolute(), options.python, options.torch_index, _say)
    return 0


def try_command(options: argparse.Namespace) -> int:
    """`rollkv toolchain try`."""
    from rollkv.export.toolchain_try import ToolFailure, chosen_graphs, read_handoff, try_graph
    from rollkv.export.toolchains import TOOLCHAINS, find_toolchain, installed_python, toolchain_of

    folder = Path(options.folder)
    handoff = read_handoff(folder)
    tool = handoff.get("tool")
    toolchain = find_toolchain(options.tool) if options.tool else toolchain_of(str(tool))
    if toolchain is None:
        raise UsageError(
            f"{folder}: handoff.json names {tool or 'no tool'} (target {handoff.get('target')}), which is no toolchain "
            f"of rollkv's; choose one with --tool: {', '.join(TOOLCHAINS)}"
        )
    graphs = chosen_graphs(handoff, options.graph)
    least = (
        options.cosine if options.cosine is not None else handoff.get("tolerances", {}).get("cosine", DEFAULT_COSINE)
    )
    if not -1 <= least <= 1:
        raise UsageError(f"--cosine {least}: allowed: -1 .. 1")
    python = installed_python(toolchain, Path(options.env).absolute() if options.env else None)
    build = Path(options.build) if options.build else folder / "build"
    if tool and tool != toolchain.requirement and toolchain_of(tool) is toolchain:
        _say(f"handoff.json was written for {tool}, this is {toolchain.requirement}")
    trials = []
    try:
        for graph in graphs:
            trials.append(
                try_graph(folder.absolute(), handoff, graph, toolchain, python, build.absolute(), options.flag, _say)
            )
    except ToolFailure as error:
        for line in error.lines:
            print(line, file=sys.stderr)
        raise
    broken = [trial for trial in trials if not trial.worst.cosine >= least]
    if options.json:
        report = {
            "folder": str(folder),
            "tool": toolchain.requirement,
            "least_cosine": least,
            "graphs": [
                {**dataclasses.asdict(t), "worst": t.worst.name, "first_diverging": t.first_diverging} for t in trials
            ],
        }
        print(json.dumps(report, indent=2, default=str).replace("Infinity", "null"))
    else:
        print_trials(trials, toolchain.requirement, folder)
    for trial in broken:
        _say(f"{trial.graph}: cosine of {trial.worst.name} is {trial.worst.cosine:.6f}, under {least}")
    return 1 if broken else 0


def print_trials(trials: Any, tool: str, folder: Path) -> None:
    """A table of outputs, and what each graph took."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{folder} with {tool}")
    for name in ("graph", "output", "cosine", "max abs", "run"):
        table.add_column(name, justify="right" if name in ("cosine", "max abs") else "left")
    for trial in trials:
        for error in trial.outputs:
            table.add_row(trial.graph, error.name, f"{error.cosine:.6f}", f"{error.max_abs:.2e}", error.run)
    console = Console(width=None if sys.stdout.isatty() else 118, highlight=False)
    console.print(table)
    for trial in trials:
        off = trial.not_on_npu
        told = "not told by this tool" if off is None else ", ".join(f"{k} {off[k]}" for k in sorted(off)) or "none"
        memory = "?" if trial.peak_rss_mb is None else str(trial.peak_rss_mb)
        first = trial.first_diverging or "none"
        console.print(
            f"{trial.graph}: compiled in {trial.compile_seconds:.1f} s, {trial.runs} runs simulated in "
            f"{trial.simulate_seconds:.1f} s, {memory} MB; ops not on the NPU: {told}; worst {trial.worst.name} "
            f"{trial.worst.cosine:.6f}; first under 0.9999: {first}",
            soft_wrap=True,
        )


def _say(text: str) -> None:
    print(f"rollkv toolchain: {text}", file=sys.stderr)
