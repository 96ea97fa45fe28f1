"""The commands of a board engineer: run, chat, info. They need neither torch nor ONNX.

Also the frame for every command: one line for a user error, exit codes, closed pipes. Imports only what parsing needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rollkv.runtime.session import Session
    from rollkv.runtime.text import Reply

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
}


class UsageError(ValueError):
    """A flag that is wrong, or wrong together with another."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """argparse with a user error in one line on stderr, and flags in full: a script's words stay good."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def add_commands(commands: Any) -> None:
    """Add run, chat and info to a parser's subcommands."""
    run = commands.add_parser(
        "run", help="answer one prompt", description="Answer one prompt on the host, as the board will."
    )
    run.add_argument("bundle", metavar="BUNDLE", help="folder that `rollkv export` wrote")
    prompt = run.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="F", help="read the prompt from a UTF-8 file; - is standard input")
    run.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    run.add_argument("--check", action="store_true", help="compare the hash of every file of the bundle first")
    _add_generation(run)
    run.set_defaults(main=run_command)

    chat = commands.add_parser(
        "chat", help="talk turn by turn", description="Talk turn by turn; /reset starts anew, /exit or Ctrl-D ends."
    )
    chat.add_argument("bundle", metavar="BUNDLE", help="folder that `rollkv export` wrote")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_generation(chat)
    chat.set_defaults(main=chat_command)

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


def run_command(options: argparse.Namespace) -> int:
    """`rollkv run`."""
    from rollkv.runtime.align import read_span
    from rollkv.runtime.text import Chat

    prompt = options.prompt if options.prompt_file is None else _read_prompt(options.prompt_file)
    session = _open_session(options)
    if options.check:
        session.bundle.check()
    chat = Chat(session)
    generation = _generation_options(options)
    if options.chat:
        reply = chat.reply([{"role": "user", "content": prompt}], **generation)
    else:
        reply = chat.complete(prompt, **generation)
    if options.protect is not None:
        read_span(options.protect, reply.prompt_tokens)  # a conversation of one turn grows no further
    for piece in reply:
        print(piece, end="", flush=True)
    print()
    _remark(reply)
    return 0


def chat_command(options: argparse.Namespace) -> int:
    """`rollkv chat`."""
    from rollkv.runtime.align import LimitError, PromptError
    from rollkv.runtime.text import Chat, TextError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing)
    chat = Chat(_open_session(options))
    generation = _generation_options(options)
    start = [{"role": "system", "content": options.system}] if options.system else []
    chat.tokenizer.render([*start, {"role": "user", "content": ""}])  # no template, or one without a system role
    messages = list(start)
    while True:
        try:
            line = "/exit" if sys.stdin is None else input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input: not {error.encoding}, byte 0x{error.object[error.start]:02x}") from None
        if line.strip() == "/exit":
            return 0
        if line.strip() == "/reset":
            messages = list(start)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        pieces = []
        try:
            reply = chat.reply(messages, **generation)
            for piece in reply:
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
            _remark(reply)
        except KeyboardInterrupt:
            print(" [interrupted]")
        except (PromptError, LimitError, TextError) as error:
            messages.pop()
            print(f"rollkv: {error}; /reset starts anew", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _info(options: argparse.Namespace) -> int:
    from rollkv.runtime.info import info_command

    return info_command(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """The runtime's commands alone: `python -m rollkv.runtime.cli`."""
    parser = Parser(prog="rollkv", description="Run a bundle on the host.")
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_commands(parser, arguments)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=_number(1),
        help="tokens to generate (default: 256, or what the cache has room for)",
    )
    parser.add_argument("--temperature", metavar="T", type=_decimal, default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--top-k", metavar="K", type=_number(), default=0, help="sample from the K best only (default 0: off)"
    )
    parser.add_argument(
        "--top-p", metavar="P", type=_decimal, default=1.0, help="sample from the best that make up P (default 1: off)"
    )
    parser.add_argument(
        "--min-p",
        metavar="P",
        type=_decimal,
        default=0.0,
        help="drop tokens below P times the best one's probability (default 0: off)",
    )
    parser.add_argument(
        "--repetition-penalty",
        metavar="R",
        type=_decimal,
        default=1.0,
        help="above 1 makes tokens that occurred less likely (default 1: off)",
    )
    parser.add_argument("--seed", metavar="S", type=_number(), help="makes sampling repeatable")
    parser.add_argument(
        "--truncate",
        choices=("none", "left", "middle"),
        default="none",
        help="a prompt longer than L is refused (none, default), or keeps its end (left) or head and end (middle)",
    )
    parser.add_argument(
        "--keep-head",
        metavar="N",
        type=_number(0),
        help="tokens that --truncate middle keeps at the head (default L // 4, or what --protect needs)",
    )
    parser.add_argument(
        "--protect",
        metavar="A:B",
        type=_span,
        help="tokens A .. B - 1 of the prompt that truncation must keep; it is refused where it cannot. "
        "--on-limit roll may forget them later",
    )
    parser.add_argument(
        "--on-limit",
        choices=("stop", "roll"),
        default="stop",
        help="when the cache is full: end the answer (stop, default), or forget the oldest tokens (roll)",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=_number(1, 256),
        help="threads of ONNX Runtime (default: the cores of this process)",
    )
    parser.add_argument(
        "--low-memory",
        action="store_true",
        help="do not let ONNX Runtime keep a packed copy of the weights; slower prefill",
    )


def _number(least: int | None = None, most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch("[+-]?[0-9]+", text):  # int() takes digits of any script
            raise ValueError
        value = int(text)
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most}")
        return value

    read.__name__ = "whole number"
    return read


def _decimal(text: str) -> float:
    if not text.isascii() or "_" in text:
        raise ValueError
    return float(text)


_decimal.__name__ = "float"  # what argparse calls it


def _span(text: str) -> tuple[int, int]:
    found = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no span; allowed: A:B, whole numbers with A < B")
    return int(found[1]), int(found[2])


def _generation_options(options: argparse.Namespace) -> dict[str, Any]:
    from rollkv.runtime.sampling import SamplingError, SamplingOptions

    if options.keep_head is not None and options.truncate != "middle":
        raise UsageError("--keep-head goes with --truncate middle")
    if options.protect is not None and options.truncate == "none":
        raise UsageError("--protect goes with --truncate left or middle")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    try:
        sampling = SamplingOptions(**{name: getattr(options, name) for name in names})
    except SamplingError as error:
        name, _, said = str(error).partition(" ")
        raise UsageError(f"--{name.replace('_', '-')} {said}") from None
    return {
        "max_new_tokens": options.max_new_tokens,
        "sampling": sampling,
        "truncate": options.truncate,
        "keep_head": options.keep_head,
        "protect": options.protect,
        "on_limit": options.on_limit,
    }


def _open_session(options: argparse.Namespace) -> Session:
    from rollkv.runtime.session import Session

    return Session(options.bundle, threads=options.threads, low_memory=options.low_memory)


def _read_prompt(name: str) -> str:
    if name == "-" and sys.stdin is None:
        raise UsageError("--prompt-file -: standard input is closed")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"--prompt-file {name}: {error.strerror}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {name}: not UTF-8, byte {error.start} is 0x{data[error.start]:02x}") from None


def _remark(reply: Reply) -> None:
    """What a user should know of an answer besides its text, on stderr."""
    if reply.truncated:
        kept = reply.prompt_tokens - reply.truncated
        print(
            f"rollkv: the prompt was cut from {reply.prompt_tokens} to {kept} tokens ({reply.truncated} left out)",
            file=sys.stderr,
        )
    if reply.finish_reason == "length":
        print(f"rollkv: ended by length after {reply.generated_tokens} tokens", file=sys.stderr)


def _describe(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _fail(message: str, code: int) -> int:
    print(f"rollkv: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
