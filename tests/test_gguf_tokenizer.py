import itertools
import json
import random
import re

import pytest
from tiny_gguf import metadata, random_tensors, shapes, write_gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from rollkv.models.config import CheckpointError
from rollkv.models.gguf_file import read_gguf
from rollkv.models.gguf_tokenizer import PRE_TOKENIZERS

BOS, END, TOOL = "<|begin:of text|>", "<|im_end|>", "<tool_call>"
TEXTS = [
    *("", " ", "   ", "\n", "\n\n ", "\r\n", "\t\tx", "a", " a", "a  b", "Hello world", "  Hello   world  "),
    *("1", "12", "1234567", "3.14159", "1,234", "a1b2c3", "٣٤٥", "①②", "½", "x²", "2024-11-29"),
    *("你好，世界", "日本語", "한국어", "русский", "עברית", "हिन्दी", "😀", "👩‍👧", "a😀b", "naïve", "e\u0301te\u0301"),
    *(
        "don't",
        "I'LL we'Ve",
        "'s't",
        "CamelCase",
        "snake_case",
        "HTTPServer",
        "x^2+y~z|w",
        "$100 €20",
        "!!!",
        "a-b/c\n",
    ),
    *("def f(x):\n    return x ** 2\n", "for (;;) {\n\ti += 1;\n}", "\u00a0x", "\u3000x", "\x00\x01", "\ufeffx", "▁a"),
    *(f"{END}", f"a{END}b", f" {END} ", f"{BOS}x{TOOL}1 2{TOOL}", "<|im_", f"{END}{END}", "<s>", "</s> x"),
]
CHANCE = random.Random(0)
TEXTS += ["".join(CHANCE.choices([*"aB1 '\n\té你😀्(/", "23", "  ", "'LL", "word", END, TOOL], k=9)) for _ in range(150)]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LAYOUTS = {  # tokenizer.ggml.pre -> normalizer and pre-tokenizer as the models' own tokenizer.json has them
    "gpt-2": (None, GPT2),
    "smollm": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])),
    "llama-bpe": (None, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES])),
    "qwen2": (
        normalizers.NFC(),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES]),
    ),
}


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE trained without any cut, so that its merges cross every border a pre-tokenizer can set."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTES
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=sorted(alphabet), show_progress=False)
    texts = [re.sub("|".join(map(re.escape, (BOS, END, TOOL))), "", text) for text in TEXTS]
    tokenizer.train_from_iterator([text for text in texts for _ in range(3)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def original(trained, pre: str) -> Tokenizer:
    vocab, merges = trained
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    normalizer, tokenizer.pre_tokenizer = LAYOUTS[pre]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, normalized=False), AddedToken(END, normalized=False)])
    tokenizer.add_tokens([AddedToken(TOOL, normalized=False)])
    return tokenizer


@pytest.fixture
def text_files(tmp_path):
    """Write a GGUF file with a tokenizer and read its text files back."""

    def write(values):
        values = metadata() | values
        tensors = random_tensors(shapes(vocab=len(values["tokenizer.ggml.tokens"])))
        path = write_gguf(tmp_path / "tiny.gguf", values, tensors)
        files = read_gguf(path).text_files()
        assert files == read_gguf(path).text_files()
        return files

    return write


def byte_level(trained, pre: str, **extra) -> dict[str, object]:
    vocab, merges = trained
    return {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*sorted(vocab, key=vocab.get), BOS, END, TOOL, "[PAD]"],
        "tokenizer.ggml.token_type": [1] * len(vocab) + [3, 3, 4, 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": len(vocab),
        "tokenizer.ggml.eos_token_id": len(vocab) + 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def loaded(files) -> Tokenizer:
    return Tokenizer.from_str(files["tokenizer.json"].decode())


@pytest.mark.parametrize("pre", LAYOUTS)
def test_byte_level_ids_and_text_are_those_of_the_original(text_files, trained, pre):
    ours, theirs = loaded(text_files(byte_level(trained, pre, add_bos_token=False))), original(trained, pre)
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(text_files, trained, pre):
    ours = loaded(text_files(byte_level(trained, pre, add_bos_token=False)))
    for text in TEXTS:
        expected = text.replace("e\u0301", "é") if pre == "qwen2" else text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == expected


def pieces(text_files, trained, pre: str, text: str) -> list[str]:
    """The cut of an ASCII text, with Ġ for a space."""
    return [piece for piece, _ in loaded(text_files(byte_level(trained, pre))).pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["HTTPServer", "Ġa", "/", "Ġ12345", "Ċ", "x"]),
        ("default", ["HTTPServer", "Ġa", "/", "Ġ", "123", "45", "Ċ", "x"]),
        ("starcoder", ["HTTPServer", "Ġa", "/", "Ġ", "1", "2", "3", "4", "5", "Ċ", "x"]),
        ("qwen2", ["HTTPServer", "Ġa", "/", "Ġ", "1", "2", "3", "4", "5", "Ċ", "x"]),
        ("llama3", ["HTTPServer", "Ġa", "/", "Ġ", "123", "45", "Ċ", "x"]),
        ("tekken", ["HTTPServer", "Ġa", "/", "Ġ", "1", "2", "3", "4", "5", "Ċ", "x"]),
        ("dbrx", ["HTTPServer", "Ġa", "/", "Ġ", "123", "45", "Ċ", "x"]),
        ("gpt-4o", ["HTTPServer", "Ġa", "/", "Ġ", "123", "45", "Ċ", "x"]),
    ],
)
def test_a_pre_tokenizer_cuts_where_its_name_says(text_files, trained, pre, expected):
    assert pieces(text_files, trained, pre, "HTTPServer a/ 12345\nx") == expected


def test_tekken_cuts_between_a_lower_and_an_upper_letter(text_files, trained):
    assert pieces(text_files, trained, "tekken", "camelCase'S") == ["camel", "Case", "'S"]


def test_gpt_4o_keeps_an_ending_with_its_word(text_files, trained):
    assert pieces(text_files, trained, "gpt-4o", "camelCase'S don't") == ["camel", "Case'S", "Ġdon't"]


@pytest.mark.parametrize(
    ("pre", "flags", "bos", "eos"),
    [
        ("smollm", {}, False, False),
        ("qwen2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("tekken", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_ends_are_added_when_the_file_or_its_kind_says_so(text_files, trained, pre, flags, bos, eos):
    files = text_files(byte_level(trained, pre, **flags))
    ids, size = loaded(files).encode("a").ids, len(trained[0])
    assert ids == [size] * bos + [trained[0]["a"]] + [size + 1] * eos
    assert loaded(files).encode("a", add_special_tokens=False).ids == [trained[0]["a"]]
    config = json.loads(files["tokenizer_config.json"])
    assert (config["add_bos_token"], config["add_eos_token"]) == (bos, eos)


def test_transformers_reads_the_files_to_the_same_ids(text_files, trained, tmp_path):
    files = text_files(byte_level(trained, "llama-bpe", **{"padding_token_id": len(trained[0]) + 3}))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), loaded(files)
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == (BOS, END, "[PAD]")
    assert theirs.model_max_length == 128
    for text in TEXTS:
        assert theirs(text).input_ids == ours.encode(text).ids


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), END]


@pytest.fixture(scope="module")
def sentencepiece():
    """The tokens of a SentencePiece-like BPE by id; a merged token ranks by when it was merged, as there."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    known = [text.replace(" ", "▁") for text in TEXTS if text.isascii() and "\x00" not in text]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=PIECES, show_progress=False)
    tokenizer.train_from_iterator([text for text in known for _ in range(3)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get)


def sentencepiece_values(tokens, **extra) -> dict[str, object]:
    plain = len(tokens) - len(PIECES)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 4] + [1] * plain,
        "tokenizer.ggml.scores": [0.0] * len(PIECES) + [-float(rank) for rank in range(plain)],
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": None,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def by_scores(text: str, tokens: list[str]) -> list[int]:
    """SentencePiece's own rule, spelled out: join the neighbours that give the best token, the leftmost at a tie."""
    ids = {token: index for index, token in enumerate(tokens) if index >= len(PIECES)}
    symbols = list(text)
    while True:
        joined = [(ids.get(a + b, len(tokens)), at) for at, (a, b) in enumerate(itertools.pairwise(symbols))]
        best, at = min(joined, default=(len(tokens), 0))
        if best == len(tokens):
            break
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    fallback = [[ids[s]] if s in ids else [3 + byte for byte in s.encode()] for s in symbols]
    return [token for part in fallback for token in part]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_follow_the_scores(text_files, sentencepiece, prefix):
    ours = loaded(text_files(sentencepiece_values(sentencepiece, add_space_prefix=prefix)))
    for text in TEXTS:
        if "<s>" in text or "</s>" in text:
            continue
        expected = [1]
        for number, part in enumerate(text.split(END)):
            expected += [PIECES.index(END)] if number else []
            spaced = ("▁" if prefix and part else "") + part.replace(" ", "▁")
            expected += by_scores(spaced, sentencepiece)
        assert ours.encode(text).ids == expected, text


def test_sentencepiece_ids_turn_back_into_the_text(text_files, sentencepiece):
    files = text_files(sentencepiece_values(sentencepiece))
    ours = loaded(files)
    for text in TEXTS:
        if not any(mark in text for mark in (END, "<s>", "</s>", "▁")):
            assert ours.decode(ours.encode(text).ids) == text
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert config["add_bos_token"] is True
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": [2]}


def test_control_tokens_are_special_and_user_defined_ones_are_not(text_files, sentencepiece):
    added = json.loads(text_files(sentencepiece_values(sentencepiece))["tokenizer.json"])["added_tokens"]
    assert {token["content"]: token["special"] for token in added} == {
        "<unk>": True,
        "<s>": True,
        "</s>": True,
        END: False,
    }


def test_a_token_without_text_gets_a_name(text_files):
    files = text_files({"tokenizer.ggml.tokens": ["", "", "a", "b", "ab", "Ġ", "Ġa"]})
    assert loaded(files).id_to_token(1) == "[EMPTY_1]"


def test_a_file_without_token_types_has_normal_tokens(text_files):
    files = text_files({"tokenizer.ggml.token_type": None})
    assert json.loads(files["tokenizer.json"])["added_tokens"] == []


NO_SCORES = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, float("nan")] + [0.0] * 5}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; supported: 'gpt2', 'llama'"),
        ({"tokenizer.ggml.model": None}, "the metadata has no key 'tokenizer.ggml.model'"),
        ({"tokenizer.ggml.pre": "klingon"}, "pre is 'klingon', which is not known; known: gpt-2, default, smollm, .*"),
        ({"tokenizer.ggml.pre": None}, "the metadata has no key 'tokenizer.ggml.pre'"),
        ({"tokenizer.ggml.merges": None}, "the metadata has no key 'tokenizer.ggml.merges'"),
        ({"tokenizer.ggml.merges": ["a b", "a a"]}, "merge 1, 'a a', does not join two tokens to a third"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merge 0, 'ab', does not join two tokens to a third"),
        ({"tokenizer.ggml.tokens": list("aabcdef")}, "tokens 0 and 1 are both 'a'"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type' is an array of 1 x int32, not an array of 7 integers"),
        ({"tokenizer.ggml.token_type": [1.0] * 7}, "is an array of 7 x float32, not an array of 7 integers"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "no key '.*ggml.bos_token_id'"),
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.add_eos_token": True}, "no key '.*ggml.eos_token_id'"),
        ({"tokenizer.ggml.add_bos_token": 1}, "metadata key 'tokenizer.ggml.add_bos_token' is 1, not true or false"),
        ({"tokenizer.ggml.model": "llama"}, "the metadata has no key 'tokenizer.ggml.scores'"),
        (NO_SCORES, "tokenizer.ggml.scores has values that are not finite"),
        (
            NO_SCORES | {"tokenizer.ggml.remove_extra_whitespaces": True},
            "tokenizer.ggml.remove_extra_whitespaces is not supported for tokenizer 'llama'",
        ),
    ],
)
def test_a_tokenizer_that_is_not_understood_is_refused(text_files, values, message):
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: .*{message}"):
        text_files(values)
