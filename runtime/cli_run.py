"""What `rollkv run` and `rollkv chat` do. Text and messages in, an answer on stdout, remarks on stderr.

Session, tokenizer and drafters are imported when a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollkv.runtime.cli_options import UsageError, generation_options, session_options

if TYPE_CHECKING:
    from rollkv.runtime.chat import Reply
    from rollkv.runtime.session import Session
    from rollkv.runtime.speculation import Drafter


def run_command(options: argparse.Namespace) -> int:
    """`rollkv run`."""
    from rollkv.runtime.align import read_span
    from rollkv.runtime.chat import Chat

    prompt = options.prompt if options.prompt_file is None else _read_prompt(options.prompt_file)
    generation = generation_options(options)
    if options.logprobs is not None:
        if not options.json:
            raise UsageError("--logprobs goes with --json")
        generation["logprobs"] = options.logprobs
    if options.save_prefix is not None:
        _check_output("--save-prefix", options.save_prefix)
    session = _open_session(options)
    chat = Chat(session)
    keep = None if options.save_prefix is None else _PrefixKeeper(session, options.save_prefix)
    if keep is not None:
        generation["on_token"] = keep
    generation["speculate"] = _drafter(options, session)
    if options.chat:
        reply = chat.reply([{"role": "user", "content": prompt}], **generation)
    else:
        reply = chat.complete(prompt, **generation)
    if options.protect is not None:
        read_span(options.protect, reply.prompt_tokens)  # a conversation of one turn grows no further
    if options.json or keep is not None:  # that the prompt can be saved is known before a word is printed
        reply.text()
    if keep is not None and not keep.saved:
        keep(None)
    if options.json:
        print(json.dumps(_answer(reply)))
    else:
        for piece in reply if keep is None else [reply.text()]:
            print(piece, end="", flush=True)
        print()
    _remark(reply)
    return 0


def chat_command(options: argparse.Namespace) -> int:
    """`rollkv chat`."""
    from rollkv.runtime.align import LimitError, PromptError
    from rollkv.runtime.chat import Chat
    from rollkv.runtime.text import TextError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing)
    generation = generation_options(options)
    session = _open_session(options)
    chat = Chat(session)
    generation["speculate"] = _drafter(options, session)
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


def _open_session(options: argparse.Namespace) -> Session:
    from rollkv.runtime.align import PromptError
    from rollkv.runtime.prefix import name_fault
    from rollkv.runtime.session import Session

    prefix = options.load_prefix
    if prefix is not None and not os.path.isfile(prefix):
        why = name_fault(prefix) or ("not a file" if os.path.exists(prefix) else "no such file")
        raise UsageError(f"--load-prefix {prefix or repr(prefix)}: {why}; give one that run --save-prefix wrote")
    try:
        session = Session(options.bundle, **session_options(options))
    except PromptError as error:
        if options.chunk_size is None:
            raise
        raise UsageError(f"--chunk-size {options.chunk_size}: {error}") from None
    m = session.manifest
    if options.sinks is not None and options.sinks >= m.max_kvcache_len:
        raise UsageError(f"--sinks is {options.sinks}, allowed: 1 .. {m.max_kvcache_len - 1}, less than C")
    for token, _ in options.logit_bias:
        if token >= m.vocab_size:
            raise UsageError(f"--logit-bias names token id {token}, allowed: 0 .. {m.vocab_size - 1}")
    if getattr(options, "check", False):
        session.bundle.check()
    if options.measure:
        measured = sorted(session.loaded.measure().items())
        times = ", ".join(f"{seconds * 1000:.1f} ms with {rows}" for rows, seconds in measured)
        print(f"rollkv: measured for a run by its rows: {times}", file=sys.stderr)
    if prefix is not None:
        session.load_prefix(prefix)
    return session


def _drafter(options: argparse.Namespace, target: Session) -> Drafter | None:
    if options.speculate is None:
        return None
    from rollkv.runtime.session import Session
    from rollkv.runtime.speculation import DraftModel, PromptLookup

    if options.speculate == "lookup":
        return PromptLookup()
    draft = Session(options.speculate, threads=options.threads, memory=options.memory)
    return DraftModel(draft, target.manifest)


class _PrefixKeeper:
    """Saves the state after the prompt: when the first token is there, and so before an answer can make it forget."""

    def __init__(self, session: Session, name: str) -> None:
        self.saved = False
        self._session, self._name = session, name

    def __call__(self, token: int | None) -> None:
        from rollkv.runtime.align import LimitError

        if self.saved:
            return
        try:
            self._session.save(self._name)
        except LimitError as error:
            raise UsageError(f"--save-prefix {self._name}: {error}") from None
        self.saved = True
        tokens = self._session.position
        print(f"rollkv: saved the state after the {tokens} tokens of the prompt in {self._name}", file=sys.stderr)


def _answer(reply: Reply) -> dict[str, Any]:
    """What --json prints."""
    logprobs, speculation = reply.logprobs, reply.speculation
    return {
        "text": reply.text(),
        "finish_reason": reply.finish_reason,
        "stop_string": reply.stop_string,
        "prompt_tokens": reply.prompt_tokens,
        "reused_tokens": reply.reused_tokens,
        "truncated": reply.truncated,
        "generated_tokens": reply.generated_tokens,
        "tokens": reply.tokens,
        "logprobs": logprobs and [{"id": e.token, "logprob": e.logprob, "top": e.top} for e in logprobs],
        "speculation": speculation and asdict(speculation),
    }


def _check_output(flag: str, name: str) -> None:
    """Refuse a name that `save` would refuse after the run."""
    from rollkv.runtime.prefix import in_bundle, name_fault

    target, shown = Path(name), f"{flag} {name or repr(name)}"
    if fault := name_fault(name):
        raise UsageError(f"{shown}: {fault}")
    if not name or target.is_dir():
        raise UsageError(f"{shown}: is a folder; give the name of a file")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{shown}: no such folder")
    if target.exists() and not target.is_file():
        raise UsageError(f"{shown}: exists and is no file that could be replaced")
    if in_bundle(target):
        raise UsageError(f"{shown}: lies in a bundle, into which nothing is written; give another folder")


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
        count = reply.generated_tokens
        print(f"rollkv: ended by length after {count} token{'' if count == 1 else 's'}", file=sys.stderr)
    if reply.speculation is not None:
        print(f"rollkv: {reply.speculation.summary()}", file=sys.stderr)
