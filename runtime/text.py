"""Text and token ids: the tokenizer of a bundle, and the detokenizer that streams.

Knows neither session nor graph. tokenizers is imported when a `Tokenizer` is made, jinja2 when a chat template is
rendered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollkv.runtime.template import ChatTemplate, TextError, check_text

__all__ = ["TextError", "TextStream", "Tokenizer"]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder puts for bytes that are not, or not yet, a character
_HELD_IDS = 16  # so many ids may wait before the stream looks for a place to cut among them


class Tokenizer:
    """The tokenizer of a bundle, with its chat template.

    Reads tokenizer.json, and if they are there tokenizer_config.json and chat_template.jinja (which goes before a
    template in tokenizer_config.json). Raises `TextError` when tokenizer.json is missing or a file is damaged.
    """

    def __init__(self, bundle_path: Path | str) -> None:
        import tokenizers

        self.path = Path(bundle_path)
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise TextError(
                f"{self.path} has no tokenizer.json, so text cannot become tokens; token ids can be given instead"
            )
        content = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises no narrower class
            raise TextError(
                f"{file} is not a tokenizer that tokenizers {tokenizers.__version__} reads: {error}"
            ) from None
        # A tokenizer.json may carry the truncation and padding of a training run.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._skipped = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._config = _read_object(self.path / "tokenizer_config.json")
        self.special_tokens = {
            name: token for name in _SPECIAL_TOKENS if (token := self._special_token(name)) is not None
        }
        self._template: ChatTemplate | None = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids. With `special`, BOS and others are added as the tokenizer's post-processor says.

        Special tokens written in the text become their ids either way. Raises `TextError` for text with lone
        surrogates, naming the position.
        """
        check_text(text, "the prompt")
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out. Ids that the tokenizer does not have give nothing."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def stream(self, context: Sequence[int] = ()) -> TextStream:
        """A new incremental detokenizer. `context` holds ids before the text, whose own text is not given out."""
        return TextStream(self.decode, self._is_text, context)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the conversation up to where the assistant's answer starts.

        The template writes BOS itself where the model wants one, so none is added. Raises as `render` does.
        """
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as the bundle's chat template writes it.

        Raises `TextError` when the bundle has no template, and as `ChatTemplate.render` does.
        """
        if self._template is None:
            self._template = self._read_template()
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, special_tokens=self.special_tokens
        )

    def _is_text(self, token: int) -> bool:
        return token >= 0 and token not in self._skipped and self._tokenizer.id_to_token(token) is not None

    def _special_token(self, name: str) -> str | None:
        value = self._config.get(name)
        if isinstance(value, Mapping):  # an AddedToken as transformers serialises it
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise TextError(f"{self.path / 'tokenizer_config.json'}: {name} is {value!r}; allowed: a string or null")
        return value

    def _read_template(self) -> ChatTemplate:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            try:
                return ChatTemplate(file.read_text(encoding="utf-8"), str(file))
            except UnicodeDecodeError as error:
                raise TextError(f"{file} is not UTF-8: {error}") from None
        file = self.path / "tokenizer_config.json"
        source = self._config.get("chat_template")
        if source is None:
            raise TextError(f"{self.path} has no chat template; leave --chat out and give the prompt as it is")
        if isinstance(source, list):
            named = {str(t.get("name")): t.get("template") for t in source if isinstance(t, Mapping)}
            if "default" not in named:
                raise TextError(f"{file}: chat_template has the names {sorted(named)}; allowed: one named 'default'")
            source = named["default"]
        if not isinstance(source, str):
            got = type(source).__name__
            raise TextError(f"{file}: chat_template is a {got}; allowed: a string or a list of name and template")
        return ChatTemplate(source, str(file))


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:  # JSON's and UTF-8's errors are ValueErrors
        raise TextError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TextError(f"{file} holds a {type(value).__name__}; allowed: a JSON object")
    return value


class TextStream:
    """Turns ids into text one at a time, in whole characters.

    What `push` and `flush` return, joined, is the decoding of all ids. A decoder cannot work id by id: a character may
    be spread over several ids, and a SentencePiece decoder drops the first space it meets. So a short window of ids
    is decoded each time and only what is new in its text is given out. The window begins one step back, with the ids
    given out last, so that a space at the start of the new ones is not the first of all; it moves on whenever its text
    ends in a whole character. Text that ends in U+FFFD may be half a character, so the U+FFFD waits for the next id,
    or for `flush`. The window stays short whatever comes: in a long run of bytes that are no characters it is cut
    where its two halves decode to the same as the whole.

    One case differs from decoding all ids at once. In a tokenizer with byte tokens (`<0xE2>`) the decoder replaces a
    whole run of them if one character in it is broken; characters of the run that were whole and already given out
    stay.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_text: Callable[[int], bool], context: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._is_text = is_text  # false: a special token, or an id that the tokenizer does not have
        self._window = [token for token in context if is_text(token)]
        self._start = len(self._window)  # window[:start] was given out before this step: only there for context
        self._given = len(decode(self._window))  # characters of the window's text that were given out
        self._limit = _HELD_IDS

    def push(self, token: int) -> str:
        """The text that this id completes; empty for a special token, and within a character."""
        if not self._is_text(token):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(_INCOMPLETE)
        piece = whole[self._given :]
        if len(whole) == len(text):
            self._move(self._start)
        else:
            self._given = max(self._given, len(whole))
            if len(self._window) - self._start > self._limit:
                piece += self._cut(text)
        return piece

    def flush(self) -> str:
        """What was held back, an incomplete character as U+FFFD. The stream starts anew after it."""
        piece = self._decode(self._window)[self._given :]
        self._window, self._start, self._given, self._limit = [], 0, 0, _HELD_IDS
        return piece

    def _move(self, start: int) -> None:
        self._window = self._window[start:]
        self._start = len(self._window)
        self._given = len(self._decode(self._window))
        self._limit = _HELD_IDS

    def _cut(self, text: str) -> str:
        # A character has at most 4 bytes and an id here at least one, so an incomplete last character starts within
        # the last 3 ids, and what lies before them is final. A split inside a character decodes to more U+FFFD than the
        # whole does, so equality proves the split clean.
        last = len(self._window) - 3
        for split in range(last, max(last - 8, self._start), -1):
            head = self._decode(self._window[:split])
            if head + self._decode(self._window[split:]) == text:
                piece = head[self._given :]
                self._window = self._window[split:]
                self._start, self._given = 0, max(0, self._given - len(head))
                self._limit = _HELD_IDS
                return piece
        self._limit *= 2  # every boundary lies inside a character: look again when twice as much waits
        return ""
