"""The flags of run and chat that say how an answer is generated, and what they mean for `Chat` and `Session`.

Imports only what parsing needs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from rollkv.runtime.limits import ADDRESSES, DEFAULT_NEW_TOKENS, DEFAULT_SINKS, MEMORIES, ON_LIMIT


class UsageError(ValueError):
    """A flag that is wrong, or wrong together with another."""

    exit_code = 2


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add what run and chat share: how the answer is generated, and how the session runs."""
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=number(1),
        help="tokens to generate (default: 256, or what the cache has room for)",
    )
    parser.add_argument(
        "--min-new-tokens", metavar="N", type=number(0), default=0, help="no EOS before N tokens (default 0)"
    )
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end the answer before this text; repeatable, taken as it is (\\n is two characters)",
    )
    parser.add_argument("--temperature", metavar="T", type=_decimal, default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--top-k", metavar="K", type=number(), default=0, help="sample from the K best only (default 0: off)"
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
    parser.add_argument(
        "--logit-bias",
        metavar="ID:BIAS",
        type=_bias,
        action="append",
        default=[],
        help="add BIAS to the logit of token ID; repeatable",
    )
    parser.add_argument("--seed", metavar="S", type=number(), help="makes sampling repeatable")
    parser.add_argument(
        "--truncate",
        choices=("none", "left", "middle"),
        default="none",
        help="a prompt longer than L is refused (none, default), or keeps its end (left) or head and end (middle)",
    )
    parser.add_argument(
        "--keep-head",
        metavar="N",
        type=number(0),
        help="tokens that --truncate middle keeps at the head (default L // 4, or what --protect needs)",
    )
    parser.add_argument(
        "--protect",
        metavar="A:B",
        type=_span,
        help="tokens A .. B - 1 of the prompt that truncation must keep; it is refused where it cannot. "
        "--on-limit roll or sinks may forget them later",
    )
    parser.add_argument(
        "--on-limit",
        choices=ON_LIMIT,
        default="stop",
        help="when the cache is full: end the answer (stop, default), forget the oldest tokens (roll), or the oldest "
        "after the first S (sinks)",
    )
    parser.add_argument(
        "--sinks",
        metavar="S",
        type=number(1),
        help=f"first tokens that --on-limit sinks keeps (default {DEFAULT_SINKS})",
    )
    parser.add_argument(
        "--chunk-size", metavar="C", type=number(1), help="use only the prefill graph of C rows (default: all)"
    )
    parser.add_argument(
        "--measure", action="store_true", help="time the graphs first, and choose among chunk sizes by that"
    )
    parser.add_argument(
        "--speculate",
        metavar="lookup|FOLDER",
        help="guess tokens and check several in one run, the answer being the same: guesses from the text so far "
        "(lookup), or by the smaller model of another bundle",
    )
    parser.add_argument(
        "--load-prefix",
        metavar="FILE",
        help="start from a state that run --save-prefix wrote; what the prompt has in common with it is not run again",
    )
    parser.add_argument(
        "--addresses",
        choices=ADDRESSES,
        help="the cache's window moves through a larger buffer (moving, default), or stays where it is (fixed)",
    )
    add_engine_flags(parser)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """How the engine is set up."""
    parser.add_argument(
        "--threads",
        metavar="N",
        type=number(1, 256),
        help="threads of ONNX Runtime (default: the cores of this process)",
    )
    parser.add_argument(
        "--memory",
        choices=MEMORIES,
        default="fast",
        help="fast: ONNX Runtime keeps a packed copy of the weights for each graph; low: none, and slower "
        "(default: fast)",
    )


def number(least: int | None = None, most: int | None = None) -> Callable[[str], int]:
    """What reads a whole number within these limits, as a type for argparse."""

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


def size(text: str) -> int:
    """A whole number, as a type for argparse."""
    if not re.fullmatch("-?[0-9]{1,18}", text):  # int() takes digits of any script
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def sizes(text: str) -> list[int]:
    """Whole numbers with commas between them, as a type for argparse."""
    try:
        return [size(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; allowed: a whole number, or several with commas between them, such as 32,128"
        ) from None


def _decimal(text: str) -> float:
    if not text.isascii() or "_" in text:
        raise ValueError
    return float(text)


_decimal.__name__ = "float"  # what argparse calls it


def _bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"([0-9]{1,18}):([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no bias; allowed: ID:BIAS, a token id and a number")
    return int(found[1]), float(found[2])


def _span(text: str) -> tuple[int, int]:
    found = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no span; allowed: A:B, whole numbers with A < B")
    return int(found[1]), int(found[2])


def generation_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `Chat.reply` from the flags, checked against each other; raises UsageError."""
    from rollkv.runtime.sampling import SamplingError, SamplingOptions

    if options.keep_head is not None and options.truncate != "middle":
        raise UsageError("--keep-head goes with --truncate middle")
    if options.protect is not None and options.truncate == "none":
        raise UsageError("--protect goes with --truncate left or middle")
    if options.sinks is not None and options.on_limit != "sinks":
        raise UsageError("--sinks goes with --on-limit sinks")
    if options.max_new_tokens is not None and options.min_new_tokens > options.max_new_tokens:
        raise UsageError(
            f"--min-new-tokens {options.min_new_tokens} is more than --max-new-tokens {options.max_new_tokens}"
        )
    if options.max_new_tokens is None and options.min_new_tokens > DEFAULT_NEW_TOKENS:
        raise UsageError(
            f"--min-new-tokens {options.min_new_tokens} is more than {DEFAULT_NEW_TOKENS}, the default of "
            "--max-new-tokens; raise that too"
        )
    if options.speculate == "":
        raise UsageError("--speculate is empty; allowed: lookup, or the folder of a bundle")
    if "" in options.stop:
        raise UsageError("--stop is empty; allowed: at least one character")
    bias: dict[int, float] = {}
    for token, value in options.logit_bias:
        if token in bias:
            raise UsageError(f"--logit-bias is given twice for token id {token}; allowed: once for each")
        bias[token] = value
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    try:
        sampling = SamplingOptions(**{name: getattr(options, name) for name in names}, logit_bias=bias)
    except SamplingError as error:
        name, _, said = str(error).partition(" ")
        raise UsageError(f"--{name.replace('_', '-')} {said.removesuffix(', or None')}") from None
    return {
        "max_new_tokens": options.max_new_tokens,
        "min_new_tokens": options.min_new_tokens,
        "sampling": sampling,
        "stop": options.stop,
        "truncate": options.truncate,
        "keep_head": options.keep_head,
        "protect": options.protect,
        "on_limit": options.on_limit,
        "sinks": DEFAULT_SINKS if options.sinks is None else options.sinks,
    }


def session_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `Session` from the flags; what has a default there only where it is given."""
    given: dict[str, Any] = {"threads": options.threads, "memory": options.memory}
    if options.chunk_size is not None:
        given["chunk_sizes"] = (options.chunk_size,)
    if options.addresses is not None:
        given["addresses"] = options.addresses
    return given
