"""The prompts that a bundle is proved on: text in the bundle's own tokens, or random ids where it has no tokenizer.

Text, because a random sequence of ids is badly conditioned on a trained model: on such prompts transformers' own
float32 logits of Qwen2.5-0.5B are off by 5e-5 of the largest from its float64 logits, on text by 1e-6. A bound
tight enough to show a fault needs prompts on which float32 itself is exact enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollkv.runtime.bundle import Bundle, Manifest

SEED = 20240229
_PASSAGES = (
    "A river begins as a spring between stones. It gathers rain and snow, turns the wheels of mills, carries boats "
    "past villages, and at last it opens into the sea, where fresh water and salt water meet and mix.",
    "def rolling_mean(values, width):\n    total = sum(values[:width])\n    means = [total / width]\n"
    "    for old, new in zip(values, values[width:]):\n        total += new - old\n"
    "        means.append(total / width)\n    return means\n",
    "清晨，老人沿着河边散步。桥下的水流得很慢，几只鸭子停在岸边。他想起年轻的时候，这里还没有公路，人们都坐船去城里。",
    "Question: A train leaves at 9:40 and arrives at 12:05. How long does the journey take? Answer: from 9:40 to 12:00 "
    "it is 2 hours and 20 minutes, and 5 minutes more make 2 hours and 25 minutes.",
    "Der Markt öffnet um sieben Uhr. Zuerst kommen die Bäcker, dann die Bauern mit Äpfeln, Käse und Honig; gegen "
    "Mittag ist alles verkauft, und der Platz wird wieder still.",
    '{"name": "sensor-7", "unit": "°C", "values": [21.5, 21.7, 22.0, 21.9], "ok": true, "note": null}\n',
)


def proof_prompts(bundle: Bundle, c: int) -> list[list[int]]:
    """Prompts of n tokens for every n mod c of {0, 1, c - 1}, one chunk and several, up to n = L.

    c: rows of the prefill graph that is proved. Prompts of the same n are the same for every c.
    """
    length = bundle.manifest.max_lm_input_len
    sizes = {1, c - 1, c, c + 1, 2 * c - 1, 2 * c, 2 * c + 1, 4 * c + 1, length}
    return [proof_ids(bundle, n, start=n) for n in sorted(size for size in sizes if 1 <= size <= length)]


def proof_ids(bundle: Bundle, n: int, start: int) -> list[int]:
    """n ids, with BOS before them where the tokenizer writes it. start: varies which text it is."""
    if not (bundle.path / "tokenizer.json").is_file():
        return _random_ids(bundle.manifest, n, start)
    from rollkv.runtime.text import Tokenizer

    tokenizer = Tokenizer(bundle.path)
    text = ""
    for paragraph in _paragraphs(start):
        text += paragraph
        if len(text) > 8 * n:  # a token is seldom longer
            ids = [i for i in tokenizer.encode(text) if i < bundle.manifest.vocab_size]
            if len(ids) >= n:
                return ids[:n]
            if len(text) > 1000 * (n + 10):
                break  # a tokenizer that makes next to nothing of text
    return _random_ids(bundle.manifest, n, start)


def _paragraphs(start: int) -> Iterator[str]:
    count = 0
    while True:
        yield f"{count + 1}. {_PASSAGES[(start + count) % len(_PASSAGES)]}\n\n"
        count += 1


def _random_ids(m: Manifest, n: int, start: int) -> list[int]:
    ids: list[int] = np.random.default_rng((SEED, start)).integers(0, m.vocab_size, n).tolist()
    return ids if m.bos_token_id is None else [m.bos_token_id, *ids[1:]]
