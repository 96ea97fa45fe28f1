"""The commands of a board engineer: run, chat, bench, info. They need neither torch nor ONNX.

Also the frame for every command: one line for a user error, exit codes, closed pipes. Imports only what parsing needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from rollkv.runtime.cli_options import UsageError, add_engine_flags, add_generation_flags, number, sizes

__all__ = ["EXTRAS", "UNEXPECTED", "Parser", "UsageError", "add_commands", "main", "run_commands"]

UNEXPECTED = 70
EXTRAS = {  # module -> the extra that brings it
    "torch": "export",
    "onnx": "export",
    "onnxscript": "export",
    "onnx_ir": "export",
    "onnxsim": "export",
    "safetensors": "export",
    "ml_dtypes": "export",
    "gguf": "export",
    "rich": "export",
    "transformers": "export",
    "huggingface_hub": "export",
    "matplotlib": "plot",
}


class Parser(argparse.ArgumentParser):
    """argparse with a user error in one line on stderr, and flags in full: a script's words stay good."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def add_commands(commands: Any) -> None:
    """Add run, chat, bench and info to a parser's subcommands."""
    run = commands.add_parser(
        "run", help="answer one prompt", description="Answer one prompt on the host, as the board will."
    )
    run.add_argument("bundle", metavar="BUNDLE", help="folder that `rollkv export` wrote")
    prompt = run.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="F", help="read the prompt from a UTF-8 file; - is standard input")
    run.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    run.add_argument("--check", action="store_true", help="compare the hash of every file of the bundle first")
    run.add_argument("--json", action="store_true", help="print one JSON object: text, ids, counts and how it ended")
    run.add_argument(
        "--logprobs",
        metavar="K",
        type=number(0),
        help="with --json: the log-probability of each token, and of the K likeliest in its place",
    )
    run.add_argument(
        "--save-prefix",
        metavar="FILE",
        help="when the answer has ended, save the state after the prompt, for --load-prefix",
    )
    add_generation_flags(run)
    run.set_defaults(main=_run)

    chat = commands.add_parser(
        "chat", help="talk turn by turn", description="Talk turn by turn; /reset starts anew, /exit or Ctrl-D ends."
    )
    chat.add_argument("bundle", metavar="BUNDLE", help="folder that `rollkv export` wrote")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    add_generation_flags(chat)
    chat.set_defaults(main=_chat)

    bench = commands.add_parser(
        "bench",
        help="time a bundle on this machine",
        description="Time a bundle on this machine: prompts, decode steps, the host's share, memory. Run it alone.",
    )
    bench.add_argument("bundle", metavar="BUNDLE", help="folder that `rollkv export` wrote")
    bench.add_argument(
        "--prompts",
        metavar="N,N",
        type=sizes,
        help="tokens of the prompts (default c, L / 2, L, as far as they fit)",
    )
    bench.add_argument(
        "--steps", metavar="N", type=number(1), default=32, help="decode steps after each prompt (default 32)"
    )
    bench.add_argument("--rounds", metavar="N", type=number(1), default=3, help="repetitions (default 3)")
    add_engine_flags(bench)
    bench.add_argument("--plot", metavar="FILE", help="draw the times into a .png or .svg file")
    bench.add_argument("--json", action="store_true", help="print the report as JSON, in seconds and bytes")
    bench.set_defaults(main=_bench)

    info = commands.add_parser("info", help="say what a bundle holds", description="Say what a bundle holds.")
    info.add_argument("bundle", metavar="BUNDLE", help="folder that `rollkv export` wrote")
    info.add_argument("--json", action="store_true", help="the manifest, as JSON")
    info.set_defaults(main=_info)


def run_commands(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Parse, run the command, and turn what it raises into a line and an exit code."""
    # A stream that the caller closed is None, and print would take the other one for it.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a console without emoji prints a mark instead of crashing
            stream.reconfigure(errors="replace")
    try:
        options = parser.parse_args(arguments)
        code: int = options.main(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        # One that came through exec of a string (torch does that) makes CPython kill itself by SIGINT at the end, its
        # own exit code lost, unless another exec clears the mark.
        exec("")
        return 130
    except BrokenPipeError:
        _discard_output()
        return 0
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(module)
        if extra is None:
            traceback.print_exc()
            return UNEXPECTED
        return _fail(f"this command needs {module}, which the extra brings: pip install 'rollkv[{extra}]'", 2)
    except OSError as error:
        _discard_output()
        return _fail(_describe(error), 1)
    except Exception as error:
        code = getattr(error, "exit_code", UNEXPECTED)
        if code == UNEXPECTED:
            traceback.print_exc()
            return UNEXPECTED
        return _fail(str(error), code)


def _discard_output() -> None:
    """Let what stdout still holds go nowhere: Python would try to write it once more at the end, and fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    from rollkv.runtime.cli_run import run_command

    return run_command(options)


def _chat(options: argparse.Namespace) -> int:
    from rollkv.runtime.cli_run import chat_command

    return chat_command(options)


def _bench(options: argparse.Namespace) -> int:
    from rollkv.runtime.bench import bench_command

    return bench_command(options)


def _info(options: argparse.Namespace) -> int:
    from rollkv.runtime.info import info_command

    return info_command(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """The runtime's commands alone: `python -m rollkv.runtime.cli`."""
    parser = Parser(prog="rollkv", description="Run a bundle on the host.")
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_commands(parser, arguments)


def _describe(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _fail(message: str, code: int) -> int:
    print(f"rollkv: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
