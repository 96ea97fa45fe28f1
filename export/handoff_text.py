"""The user's text as token ids, for the samples of a handoff: a .txt file or a .jsonl file of records.

Knows the tokenizer and L, no graph. A text file is one long stream of tokens; of a .jsonl file, and of a text file
under `--chat`, every line is a prompt of its own.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkv.runtime.bundle import Bundle
from rollkv.runtime.text import TextError, Tokenizer

KEYS = ("prompt", "text", "messages", "ids")  # of a record, one of them
LONGEST_LIST = 5  # line numbers that a remark names


class HandoffError(ValueError):
    """What a handoff cannot be made of: the text, the target, the place to write to."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All tokens one after another, and where a sequence may begin among them."""

    stream: Sequence[int]
    starts: Sequence[int]  # ascending; every token of a text file, the first token of every record otherwise
    prefix: tuple[int, ...] = ()  # what the tokenizer puts before a text, BOS
    remarks: tuple[str, ...] = ()  # what was done with text longer than L

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return len(self.prefix) + len(self.stream)

    def start(self, need: int, index: int, of: int) -> int:
        """The start of sequence `index` of `of`, spread evenly over those that `need` tokens follow; or the first."""
        enough = max(1, bisect_right(self.starts, len(self) - need))
        return self.starts[index * enough // of]

    def take(self, start: int, count: int) -> list[int]:
        """At most `count` tokens of the sequence that begins there, its prefix included."""
        return [*self.prefix, *self.stream[start : start + count]][:count]


def read_corpus(file: Path, bundle: Bundle, chat: bool) -> Corpus:
    """The tokens of a file. chat: put every record, or every line of a text file, into the bundle's chat template.

    Raises HandoffError: no such file, neither .txt nor .jsonl, empty, not UTF-8, a line that is no record (the line's
    number is named). Raises TextError when the bundle has no tokenizer, or no chat template.
    """
    text = _read(file)
    if file.suffix == ".txt" and not chat:
        return _stream(file, text, Tokenizer(bundle.path), bundle.manifest.max_lm_input_len)
    encode = _RecordEncoder(bundle, chat)
    records: list[tuple[int, list[int]]] = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON's strings may hold U+2028
        if not line.strip():
            continue
        try:
            ids = encode.line(line) if file.suffix == ".txt" else encode.record(line)
        except (TextError, HandoffError) as error:
            raise HandoffError(f"{file}, line {number}: {error}") from None
        if not ids:
            raise HandoffError(f"{file}, line {number}: has no tokens; allowed: at least one")
        records.append((number, ids))
    return _joined(records, bundle.manifest.max_lm_input_len)


def _read(file: Path) -> str:
    if file.suffix not in (".txt", ".jsonl"):
        raise HandoffError(f"--data {file}: ends in {file.suffix or 'nothing'!r}; allowed: a .txt or a .jsonl file")
    if not file.is_file():
        why = "is not a file" if file.exists() else "no such file"
        raise HandoffError(f"--data {file}: {why}; give a text file of what the model will be asked")
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise HandoffError(
            f"--data {file}: not UTF-8: byte 0x{data[error.start]:02x} in line {line}; convert it to UTF-8"
        ) from None
    if not text.strip():
        raise HandoffError(f"--data {file}: is empty; give a text of what the model will be asked")
    return text


def _stream(file: Path, text: str, tokenizer: Tokenizer, length: int) -> Corpus:
    bare, whole = tokenizer.encode(text, special=False), tokenizer.encode(text)
    before = len(whole) - len(bare)
    prefix = tuple(whole[:before]) if before > 0 and whole[before:] == bare else ()
    if not bare:
        raise HandoffError(f"--data {file}: the text has no tokens; allowed: at least one")
    remarks = []
    if len(prefix) + len(bare) > length:
        remarks.append(f"the text has {len(bare)} tokens, more than L = {length}: it goes in, in turns of at most L")
    return Corpus(stream=bare, starts=range(len(bare)), prefix=prefix, remarks=tuple(remarks))


def _joined(records: Sequence[tuple[int, list[int]]], length: int) -> Corpus:
    stream: list[int] = []
    starts = []
    for _, ids in records:
        starts.append(len(stream))
        stream += ids[:length]
    cut = [(number, len(ids)) for number, ids in records if len(ids) > length]
    remarks = []
    if cut:
        lines = ", ".join(str(number) for number, _ in cut[:LONGEST_LIST]) + (", ..." if cut[LONGEST_LIST:] else "")
        remarks.append(
            f"{len(cut)} of {len(records)} lines are longer than L = {length} tokens (lines {lines}, up to "
            f"{max(count for _, count in cut)} tokens): of each the first L are used"
        )
    return Corpus(stream=stream, starts=starts, remarks=tuple(remarks))


class _RecordEncoder:
    """Ids of one line."""

    def __init__(self, bundle: Bundle, chat: bool) -> None:
        self._bundle, self._chat = bundle, chat
        self._tokenizer: Tokenizer | None = None  # records of ids need none

    def line(self, text: str) -> list[int]:
        """A line of a text file under --chat: what a user says."""
        return self._text(text.rstrip("\r"))

    def record(self, line: str) -> list[int]:
        """A line of a .jsonl file."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise HandoffError(f"not JSON: {error}") from None
        if not isinstance(record, dict) or len(found := [key for key in KEYS if key in record]) != 1:
            got = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise HandoffError(f"holds {str(got)[:80]}; allowed: an object with one of {', '.join(KEYS)}")
        value = record[found[0]]
        if found == ["ids"]:
            return self._ids(value)
        if found == ["messages"]:
            if not self._chat:
                raise HandoffError("holds messages, which need the chat template; pass --chat")
            return self._read_tokenizer().chat_ids(value)
        if not isinstance(value, str):
            raise HandoffError(f"{found[0]} is {str(value)[:60]!r}; allowed: a string")
        return self._text(value)

    def _text(self, text: str) -> list[int]:
        tokenizer = self._read_tokenizer()
        return tokenizer.chat_ids([{"role": "user", "content": text}]) if self._chat else tokenizer.encode(text)

    def _ids(self, value: Any) -> list[int]:
        most = self._bundle.manifest.vocab_size - 1
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i <= most for i in value):
            raise HandoffError(f"ids is {str(value)[:60]}; allowed: a list of whole numbers 0 .. {most}")
        return value

    def _read_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._bundle.path)
        return self._tokenizer
