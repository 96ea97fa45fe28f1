"""Commands for the way to a toolchain: `rollkv targets` and those beside it. Imports late."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from typing import Any

from rollkv.export.cli_handoff import add_handoff_command
from rollkv.runtime.cli import UsageError


def add_target_commands(commands: Any) -> None:
    """Add the commands to a parser's subparsers."""
    targets = commands.add_parser(
        "targets",
        help="what each NPU compiler takes",
        description="List the target profiles: what each NPU compiler takes and refuses, the graph form that suits it, "
        "and how each limit is known.",
    )
    targets.add_argument("target", metavar="TARGET", nargs="?", help="one of them, with its notes (default: a table)")
    targets.add_argument("--json", action="store_true", help="print the profiles as JSON")
    targets.set_defaults(main=targets_command)
    add_handoff_command(commands)


def targets_command(options: argparse.Namespace) -> int:
    """`rollkv targets`."""
    from rollkv.export.targets import TARGETS

    chosen = list(TARGETS.values()) if options.target is None else [find_target(options.target)]
    if options.json:
        print(json.dumps([as_data(target) for target in chosen], indent=2))
        return 0
    if options.target is None:
        width = max(map(len, TARGETS))
        for target in chosen:
            form = ", ".join(f"{name} {value}" for name, value in target.form().items() if value != -32768.0)
            print(
                textwrap.fill(
                    f"{target.name:{width}}  {target.title}: {form}", 118, subsequent_indent=" " * (width + 2)
                )
            )
        print("\n`rollkv targets TARGET` has the limits of one and how they are known.")
        return 0
    for target in chosen:
        for name, value in as_data(target).items():
            if name != "notes":
                text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                print(textwrap.fill(f"{name:18} {text}", 118, subsequent_indent=" " * 19))
        print("notes")
        for note in target.notes:
            print(textwrap.fill(f"- {note.text} ({note.source})", 118, initial_indent="  ", subsequent_indent="    "))
    return 0


def find_target(name: str) -> Any:
    """The profile of that name. Raises UsageError that lists those there are."""
    from rollkv.export.targets import TARGETS

    if name not in TARGETS:
        raise UsageError(f"target {name!r} is unknown; allowed: {', '.join(TARGETS)}")
    return TARGETS[name]


def as_data(target: Any) -> dict[str, Any]:
    """A profile for JSON: its sets as sorted lists."""
    data = dataclasses.asdict(target)
    return {
        k: sorted(v) if isinstance(v, frozenset) else list(v) if isinstance(v, tuple) else v for k, v in data.items()
    }
