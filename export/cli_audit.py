"""`rollkv audit`: a bundle against a target, and its numbers against float16 and int16. Imports late."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rollkv.export.cli_targets import find_target


def add_audit_command(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    audit = commands.add_parser(
        "audit",
        help="what a target will make of a bundle",
        description="Hold the graphs of a bundle against a target's limits, and what real numbers do in them against "
        "float16 and int16; emulate float16.",
    )
    audit.add_argument("bundle", metavar="BUNDLE", help="folder that `rollkv export` wrote")
    audit.add_argument(
        "--target", metavar="TARGET", help="profile to hold it against (default: that of the export, else universal)"
    )
    audit.add_argument(
        "--data",
        metavar="FILE",
        help="text whose tokens are run, .txt or .jsonl in UTF-8 (default: a few paragraphs that come with rollkv)",
    )
    audit.add_argument("--no-run", action="store_true", help="look at the files only: no ranges, no float16")
    audit.add_argument("--strict", action="store_true", help="exit with 1 when there is any finding")
    audit.add_argument("--json", action="store_true", help="print everything as JSON")
    audit.set_defaults(main=audit_command)


def audit_command(options: argparse.Namespace) -> int:
    """`rollkv audit`."""
    from rollkv.export.bundle_audit import audit_bundle
    from rollkv.runtime.bundle import open_bundle

    target = None if options.target is None else find_target(options.target)
    bundle = open_bundle(options.bundle)
    if target is None:
        target = find_target(bundle.manifest.target or "universal")
    audit = audit_bundle(bundle, target, run=not options.no_run, data=options.data and Path(options.data))
    if options.json:
        print(json.dumps(_finite(audit.to_dict()), indent=2, allow_nan=False))
    else:
        _print(audit)
    if options.strict and audit.findings:
        print(f"rollkv: {len(audit.findings)} findings for {target.name}: {audit.findings[0]}", file=sys.stderr)
        return 1
    return 0


def _print(audit: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 118)
    if audit.ranges is not None:
        table = Table(title=f"largest magnitudes over {len(audit.ranges.runs)} runs ({audit.tokens} tokens)")
        for name in ("layer", "residual", "its int16 step", "its median", "x x of a norm", "score", "in float16"):
            table.add_column(name, justify="right")
        for row in audit.layers():
            cells = [
                f"{row[name]:.4g}" if row[name] is not None else ""
                for name in ("residual", "int16_step", "median", "square", "score")
            ]
            table.add_row(str(row["layer"]), *cells, "overflows" if row["overflows"] else "fits")
        console.print(table)
    if audit.float16 is not None:
        a, law = audit.float16, audit.float16.law
        console.print(
            f"float16 emulated, {law.positions} rows: top-1 {a.top1:.1%}, KL {law.kl:.2e}, smallest "
            f"cosine {a.cosine:.6f}, largest difference {a.max_abs:.3g}" + (f"; {a.fault}" if a.fault else "")
        )
    console.print(f"{audit.bundle} for {audit.target}: {len(audit.findings)} findings")
    for finding in audit.findings:
        console.print(f"  {finding.level:8} {finding}", markup=False, highlight=False)


def _finite(value: Any) -> Any:
    """For JSON, where a number that is not finite is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
