"""Tiny tokenizers, made in the test run, and the bundle folders that hold them. Knows no session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from rollkv.runtime.text import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
    "pad_token": "<|pad|>",
    "unk_token": None,
}
TEXTS = [
    "the quick brown fox",
    "hello, how are you?",
    "grüße aus köln",
    "你好世界",
    "🙂🙃 emoji 👩‍🚀",
    "don't stop\n\nnow",
]
CHATML = """{% if messages[0].role != 'system' %}
<|im_start|>system
Be kind.<|im_end|>
{% endif %}
{% for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}"""


def byte_level() -> HfTokenizer:
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def with_byte_tokens() -> HfTokenizer:
    """A SentencePiece-type BPE: spaces are marked, unknown characters fall back to byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁"]
    pieces += [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["▁t", "▁a", "he", "▁▁"]
    merges = [("▁", "t"), ("▁", "a"), ("h", "e"), ("▁", "▁")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = HfTokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> HfTokenizer:
    tokenizer = HfTokenizer(
        models.Unigram([("<unk>", 0.0), *((p, -1.0) for p in ["▁", "▁▁", "▁a", "▁b", "a", "b", "c"])], 0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def write(folder: Path, tokenizer: HfTokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def templated(bundle: Path, template: Any) -> Tokenizer:
    (bundle / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": template}), encoding="utf-8")
    return Tokenizer(bundle)
