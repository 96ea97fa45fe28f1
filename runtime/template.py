"""A chat template: messages in, the text of a conversation out.

The template comes with the checkpoint and is foreign code, so it runs in jinja2's immutable sandbox and sees copies of
plain data only. The sandbox keeps it from Python's internals; it does not limit its time or memory. Nothing here knows
token ids, the tokenizer or the session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes
    from jinja2.parser import Parser


class TextError(ValueError):
    """Text that cannot become tokens, or a tokenizer or chat template that cannot be used."""

    exit_code = 2


def check_text(text: str, where: str) -> None:
    """Raise `TextError`, naming `where` and the position, for text that no UTF-8 can hold.

    Bytes on a command line that are not UTF-8 arrive as lone surrogates (PEP 383): byte b is U+DC00 + b.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"the lone surrogate U+{code:04X}"
        raise TextError(f"{where} holds {what} at position {error.start}; allowed: valid UTF-8") from None


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the messages in plain dicts, lists, strings and numbers, without the keys whose value is None.

    Raises `TextError` for an empty conversation, a message without a role or a content (only one with `tool_calls` may
    go without content), a value of another type, and text that is not valid UTF-8.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or len(messages) == 0:
        raise TextError(f"the conversation is {messages!r}; allowed: a list of at least one message")
    copies = []
    for index, message in enumerate(messages):
        where = f"message {index}"
        if not isinstance(message, Mapping):
            raise TextError(f"{where} is a {type(message).__name__}; allowed: a mapping with role and content")
        copy = {key: _plain(value, f"{where}, {key}") for key, value in message.items() if value is not None}
        if not isinstance(copy.get("role"), str):
            raise TextError(f"{where} has the keys {sorted(copy)} and no role; allowed: role, a string, and content")
        if "content" not in copy and "tool_calls" not in copy:
            raise TextError(f"{where} ({copy['role']}) has no content; allowed: content, a string or a list of parts")
        if not isinstance(copy.get("content", ""), (str, list)):
            got = type(copy["content"]).__name__
            raise TextError(f"{where} ({copy['role']}) has content of type {got}; allowed: a string or a list of parts")
        copies.append(copy)
    return copies


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, str):
        check_text(value, where)
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}, {key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if value is None or type(value) in (bool, int, float):
        return value
    raise TextError(f"{where} has type {type(value).__name__}; allowed: strings, numbers, lists, mappings, None")


class ChatTemplate:
    """One chat template, compiled when it is first rendered.

    Rendered as transformers' `apply_chat_template` does: block tags swallow their line's white space and newline;
    `break` and `continue` work; `raise_exception(text)`, `strftime_now(format)` and an unescaped `tojson` exist;
    `{% generation %}` marks an answer and changes nothing.
    """

    def __init__(self, source: str, origin: str) -> None:
        self.source = source
        self.origin = origin  # where the template was found, for messages
        self._compiled: jinja2.Template | None = None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, special_tokens: Mapping[str, str]
    ) -> str:
        """The conversation as text. `special_tokens` become variables: `bos_token`, `eos_token` and so on.

        Raises `TextError` for messages that `check_messages` refuses, for a template with a syntax error, and for
        whatever the template raises, with what it said.
        """
        import jinja2

        copies = check_messages(messages)
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
            return self._compiled.render(
                messages=copies,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
            )
        except jinja2.TemplateSyntaxError as error:
            raise TextError(f"{self.origin}: line {error.lineno} of the chat template: {error.message}") from None
        except _Refusal as error:
            raise TextError(f"{self.origin}: the chat template refuses this conversation: {error}") from None
        except Exception as error:  # foreign code may raise anything
            raise TextError(f"{self.origin}: the chat template fails: {type(error).__name__}: {error}") from error


class _Refusal(Exception):
    """What a template says with `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` ... `{% endgeneration %}`: the block's body, unchanged."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class PublicNamespace(Namespace):
        """A namespace without names that Python itself would call."""

        def __init__(*args: Any, **values: Any) -> None:  # no named `self`: a template may store that name
            for name in dict(*args[1:], **values):
                _check_public(name)
            Namespace.__init__(*args, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_public(name)
            super().__setitem__(name, value)

    def _check_public(name: object) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}; allowed: names without a leading underscore")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=PublicNamespace)
    return environment
