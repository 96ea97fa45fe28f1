"""The tokenizer of a GGUF file, written out as Hugging Face's tokenizer.json and tokenizer_config.json.

Knows two kinds of tokenizer: byte-level BPE ("gpt2", whose pre-tokenizer the file only names) and SentencePiece BPE
("llama"). Does not know chat templates or models. What each name stands for: llama.cpp, src/llama-vocab.cpp; where
that approximates the tokenizer.json of the model (no NFC, hand-written classes), tokenizer.json is followed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from rollkv.models.config import CheckpointError
from rollkv.models.gguf_header import Metadata, quoted

_TURNS = ("eot", "eom")  # tokens that end a turn and a message, beside the end of the text
_TURN_ENDS = ("<end_of_turn>", "<|end|>")  # of gemma and phi: their files may not say so, llama.cpp goes by the text
_NO_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")  # of phi3's marks; the others take the white space that follows them
_SHORT = {"unknown": "unk", "padding": "pad"}  # GGUF's word -> Hugging Face's, where they differ

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (  # of cl100k and its descendants; {digits} at a time
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_WORDS = (  # of tekken and o200k, which cut where case changes; {digits} at a time, words with their {endings}
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{endings}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{endings}"
    r"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_MARKS = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)  # cut out of a text before anything else


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is cut before byte-level BPE.

    Each of `splits` in turn cuts what the one before left into its matches and the text between them.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False  # first, every digit stands alone
    nfc: bool = False  # text is normalised to NFC
    whole_words: bool = False  # a word that is a token is taken without merging
    add_bos: bool = False  # what a file without tokenizer.ggml.add_bos_token means


_GPT2 = PreTokenizer(splits=(_GPT2_WORDS,))
_SINGLE_DIGITS = PreTokenizer(splits=(_GPT2_WORDS,), digits=True)
_LLAMA3 = PreTokenizer(splits=(_WORDS.format(digits="{1,3}"),), whole_words=True, add_bos=True)

PRE_TOKENIZERS = {  # tokenizer.ggml.pre -> what it stands for
    "gpt-2": _GPT2,
    # what llama.cpp falls back to; no model was trained with it
    "default": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "qwen2": PreTokenizer(splits=(_WORDS.format(digits=""),), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "tekken": PreTokenizer(splits=(_CASED_WORDS.format(digits="", endings=""),), whole_words=True, add_bos=True),
    "dbrx": PreTokenizer(splits=(_WORDS.format(digits="{1,3}"),)),  # phi-4
    "gpt-4o": PreTokenizer(splits=(_CASED_WORDS.format(digits="{1,3}", endings=_ENDINGS),)),  # phi-4-mini
}


def special_ids(metadata: Metadata) -> dict[str, int]:
    """Token ids of "bos", "eos", "unknown" and "padding", those that the file has.

    A SentencePiece file that does not say has bos 1, eos 2 and unknown 0, as llama.cpp reads it.
    """
    defaults: dict[str, int] = {}
    if "tokenizer.ggml.model" in metadata and metadata.text("tokenizer.ggml.model") == "llama":
        count = len(metadata.strings("tokenizer.ggml.tokens"))
        defaults = {name: token for name, token in (("bos", 1), ("eos", 2), ("unknown", 0)) if token < count}
    found = {name: metadata.token(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    return defaults | {name: token for name, token in found.items() if token is not None}


def end_ids(metadata: Metadata) -> list[int]:
    """Ids of the tokens that end a generation: of a text, a turn and a message, each once, those that the file has."""
    found = [special_ids(metadata).get("eos"), *(metadata.token(f"tokenizer.ggml.{name}_token_id") for name in _TURNS)]
    if "tokenizer.ggml.tokens" in metadata:
        tokens = metadata.strings("tokenizer.ggml.tokens")
        types = _token_types(metadata, len(tokens))
        found += [i for i, token in enumerate(tokens) if token in _TURN_ENDS and types[i] in _MARKS]
    return list(dict.fromkeys(token for token in found if token is not None))


def tokenizer_files(metadata: Metadata) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json of the tokenizer in the metadata; the same bytes every time.

    Raises CheckpointError, naming the file, for a kind of tokenizer or of pre-tokenizer that is not known, and for
    tokens and merges that contradict one another.
    """
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.model is {quoted(kind)}; supported: 'gpt2', 'llama'")
    tokens = _tokens(metadata)
    types = _token_types(metadata, len(tokens))
    special = special_ids(metadata)
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata)
        tokenizer, add_bos = _byte_level(metadata, tokens, pre), pre.add_bos
    else:
        tokens, types = _as_merged(tokens, types)
        tokenizer, add_bos = _sentencepiece(metadata, tokens, types, special.get("unknown")), True
    strips = kind == "llama" and metadata.text("general.architecture") == "phi3"
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=mark != TokenType.USER_DEFINED,
                normalized=False,
                rstrip=strips and token not in _NO_RSTRIP,
            )
            for token, mark in zip(tokens, types, strict=True)
            if mark in _MARKS
        ]
    )
    add_bos = metadata.flag("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    for name, added in (("bos", add_bos), ("eos", add_eos)):
        if added and name not in special:
            metadata.value(f"tokenizer.ggml.{name}_token_id")  # is absent, and says so
    before, after = [special["bos"]] if add_bos else [], [special["eos"]] if add_eos else []
    if before or after:
        tokenizer.post_processor = _template(tokens, before, after)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        **{f"{_SHORT.get(name, name)}_token": tokens[index] for name, index in special.items()},
    }
    length = metadata.text("general.architecture") + ".context_length"
    if length in metadata:
        config["model_max_length"] = metadata.integer(length)
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n").encode(),
    }


def _tokens(metadata: Metadata) -> list[str]:
    """The text of every token, by id; no two are equal."""
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(metadata.strings("tokenizer.ggml.tokens"))]
    seen: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if seen.setdefault(token, index) != index:
            raise CheckpointError(f"{metadata.path}: tokens {seen[token]} and {index} are both {quoted(token)}")
    return tokens


def _token_types(metadata: Metadata, count: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return [int(TokenType.NORMAL)] * count
    return [int(kind) for kind in metadata.array(key, count, "iu")]


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        allowed = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.pre is {quoted(name)}, which is not known; known: {allowed}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: Metadata, tokens: list[str], pre: PreTokenizer) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for number, merge in enumerate(metadata.strings("tokenizer.ggml.merges")):
        left, _, right = merge[1:].partition(" ")  # the first character is never the separator
        left = merge[:1] + left
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(
                f"{metadata.path}: merge {number}, {quoted(merge)}, does not join two tokens to a third"
            )
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _as_merged(tokens: list[str], types: list[int]) -> tuple[list[str], list[int]]:
    """Tokens and types of a SentencePiece file by which merging finds what SentencePiece finds.

    Runs of spaces of type USER_DEFINED are written "▁▁", as merging sees them; converters after 2024 write spaces. A
    byte of ASCII whose character has no token, though longer ones have it (gemma's tab), becomes that character.
    """
    tokens, types, ids = [*tokens], [*types], {token: index for index, token in enumerate(tokens)}
    inside = {character for i, token in enumerate(tokens) if types[i] == TokenType.NORMAL for character in token}
    for index, token in enumerate(tokens):
        if types[index] == TokenType.USER_DEFINED and not token.strip(" ") and token.replace(" ", "▁") not in ids:
            tokens[index] = token.replace(" ", "▁")
    for character in sorted(inside - ids.keys()):
        byte = ids.get(f"<0x{ord(character):02X}>", -1) if character.isascii() else -1
        if byte >= 0 and types[byte] == TokenType.BYTE:
            tokens[byte], types[byte] = character, int(TokenType.NORMAL)
    return tokens, types


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int], unknown: int | None) -> Tokenizer:
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        value = metadata.value(f"tokenizer.ggml.{key}") if f"tokenizer.ggml.{key}" in metadata else False
        if value is not False:
            raise CheckpointError(f"{metadata.path}: tokenizer.ggml.{key} is not supported for tokenizer 'llama'")
    scores = metadata.array("tokenizer.ggml.scores", len(tokens), "f")
    if not np.isfinite(scores).all():
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.scores has values that are not finite")
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(tokens, types, scores.tolist()),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of SentencePiece BPE, which keeps none: it joins whatever gives the token of the highest score.

    Every way to cut a normal token into two is a merge with its score. Those of one score come with the longer left
    part first, then by the ids of the parts; converters of SentencePiece models to tokenizer.json order them so too.
    Runs of "▁" that the user defined come before all: SentencePiece takes them whole.
    """
    runs = {
        index for index, token in enumerate(tokens) if types[index] == TokenType.USER_DEFINED and not token.strip("▁")
    }
    ids = {token: i for i, token in enumerate(tokens) if types[i] == TokenType.NORMAL or i in runs}
    scores = [math.inf if index in runs else score for index, score in enumerate(scores)]
    ranked: list[tuple[float, int, int, int, int, int]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], -cut, cut - len(token), index, left, right))
    return [(tokens[left], tokens[right]) for *_, left, right in sorted(ranked)]


def _template(tokens: list[str], before: list[int], after: list[int]) -> processors.PostProcessor:
    """The post-processor that puts tokens around a text.

    It is read from JSON, since the constructor's little language cannot say a token with a colon or a space.
    """

    def piece(name: str, token: str) -> dict[str, object]:
        return {name: {"id": token, "type_id": 0}}

    around = [[piece("SpecialToken", tokens[index]) for index in side] for side in (before, after)]
    single = [*around[0], piece("Sequence", "A"), *around[1]]
    processor = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *around[0], piece("Sequence", "B"), *around[1]],
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]} for index in before + after
        },
    }
    empty = json.loads(Tokenizer(BPE()).to_str())
    loaded = Tokenizer.from_str(json.dumps(empty | {"post_processor": processor})).post_processor
    assert isinstance(loaded, processors.PostProcessor)
    return loaded
