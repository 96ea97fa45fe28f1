"""Tokenizers of gemma and phi3 out of GGUF files, against transformers' and tokenizers' own of the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_gguf_tokenizer import TEXTS
from tiny_gguf import metadata, random_tensors, shapes, write_gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import GemmaTokenizer
from transformers.tokenization_utils_base import generate_merges

from rollkv.models.gguf_file import read_gguf

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
TURNS = ["<start_of_turn>", "<end_of_turn>"]
USER = ["<mask>", "\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁▁", "<h1>"]
CONTROL, BYTE, USER_DEFINED, UNKNOWN = 3, 6, 4, 2
PHI = ["<|endoftext|>", "<|assistant|>", "<|user|>", "<|end|>"]
MORE = [
    *(
        "a  b",
        "a   b    c     d      e       f",
        "  x",
        "x  ",
        "\n\n\n\n\nx",
        "a\n \n  b",
        "<h1> a</h1>  ",
        "▁▁x",
        "a▁▁▁b",
    ),
    *("\t", "\t\tx", "\t\t\t\t", " \t a\t", "<start_of_turn>user\nhello  there<end_of_turn>\n<start_of_turn>model\n"),
    *("<|user|>\nhello<|end|>\n<|assistant|>\n  x", "<|endoftext|> a <|end|>  b", "</s>  x <s> y <unk>  z"),
]


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    """Tokens of a BPE trained on the texts, in the order in which they were merged, without the characters' marks."""
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    tokenizer = Tokenizer(models.BPE())
    known = [text.replace(" ", "▁") for text in TEXTS + MORE if text.isascii() and "<" not in text and "\t" not in text]
    tokenizer.train_from_iterator([text for text in known for _ in range(3)], trainer)
    vocab = tokenizer.get_vocab()
    return [piece for piece in sorted(vocab, key=vocab.get) if piece not in USER and set(piece) != {"▁"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[..., tuple[Tokenizer, dict[str, Any]]]:
    """The tokenizer of a GGUF file, and its generation_config.json."""

    def make(architecture: str, tokens: list[str], types: list[int], scores: list[float], **more: Any) -> Any:
        values = metadata(architecture) | {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.add_bos_token": True,
            **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
        }
        path = write_gguf(tmp_path / "m", values, random_tensors(shapes(vocab=len(tokens))), architecture=architecture)
        files = read_gguf(path).text_files()
        return Tokenizer.from_buffer(files["tokenizer.json"]), json.loads(files["generation_config.json"])

    return make


@pytest.mark.parametrize("spaces", ["▁", " "])  # how converters before and after the end of 2024 write runs of them
def test_ids_of_gemma_are_those_of_transformers(tokenizer: Any, pieces: list[str], spaces: str) -> None:
    normal = ["▁", "\t\t", "\t\t\t", *pieces]  # and no token for one tab
    tokens = [*SPECIAL, *USER, *TURNS, *BYTES, *normal]
    scores = [0.0] * (len(tokens) - len(normal)) + [-float(rank) for rank in range(len(normal))]
    vocab = {token: index for index, token in enumerate(tokens)}
    vocab["\t"] = vocab.pop("<0x09>")  # as transformers' converter of gemma does
    ordered = {token: scores[index] for token, index in sorted(vocab.items(), key=lambda item: item[1])}
    theirs = GemmaTokenizer(vocab=vocab, merges=generate_merges(vocab, ordered))
    theirs.add_tokens([AddedToken(token, normalized=False, special=False) for token in USER])
    theirs.add_tokens([AddedToken(token, normalized=False, special=True) for token in TURNS], special_tokens=True)

    written = [token.replace("▁", spaces) if token in USER else token for token in tokens]
    types = [CONTROL] * 3 + [UNKNOWN] + [USER_DEFINED] * len(USER) + [CONTROL] * 2 + [BYTE] * 256 + [1] * len(normal)
    if spaces == " ":
        scores = [-1000.0 if kind in (CONTROL, USER_DEFINED) else s for s, kind in zip(scores, types, strict=True)]
    ends = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    ours, generation = tokenizer("gemma2", written, types, scores, add_space_prefix=False, **ends)
    assert generation["eos_token_id"] == [1, tokens.index("<end_of_turn>")]
    for text in TEXTS + MORE:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).ids == [2, *ids], text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_ids_of_phi3_are_those_of_a_tokenizer_whose_marks_take_the_white_space_after(
    tokenizer: Any, pieces: list[str]
) -> None:
    normal = ["▁", "\n", *pieces]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *normal, *PHI, "[PAD]"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(normal))] + [-1000.0] * 4 + [-10000.0]
    types = [UNKNOWN, CONTROL, USER_DEFINED, *[BYTE] * 256, *[1] * len(normal), *[CONTROL] * 4, 5]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = {token: scores[vocab[token]] for token in normal}
    merges = generate_merges({token: vocab[token] for token in normal}, ranked)
    theirs = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    theirs.decoder = decoders.Sequence(steps)
    theirs.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    plain = ("<unk>", "<s>", "<|endoftext|>")
    for token in ("<unk>", "<s>", "</s>", *PHI):
        theirs.add_tokens([AddedToken(token, normalized=False, rstrip=token not in plain, special=token != "</s>")])

    ends = {"bos_token_id": 1, "eos_token_id": vocab["<|endoftext|>"], "unknown_token_id": 0}
    ours, generation = tokenizer("phi3", tokens, types, scores, **ends)
    assert generation["eos_token_id"] == [vocab["<|endoftext|>"], vocab["<|end|>"]]
    for text in TEXTS + MORE:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids)


def test_marks_of_other_architectures_leave_the_white_space(tokenizer: Any, pieces: list[str]) -> None:
    normal = ["▁", "\n", *pieces]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *normal, "<|user|>", "<|end|>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[1] * len(normal), CONTROL, 1]
    ours, generation = tokenizer("llama", tokens, types, [0.0] * len(tokens), eos_token_id=2, bos_token_id=1)
    assert ours.encode("<|user|>\n").ids[1:] == [tokens.index("<|user|>"), tokens.index("▁"), tokens.index("\n")]
    assert generation["eos_token_id"] == [2]  # <|end|> is an ordinary token in this file
