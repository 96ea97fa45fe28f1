"""64 greedy tokens of each preset against transformers' argmax, and the logits of every step.

    python -m benchmarks.greedy [smollm2-135m | qwen2.5-coder-0.5b]

The reference is transformers' float32 eager model with weights that transformers reads itself: one unchunked pass over
the prompt, then token by token. rollkv runs the bundle through `Session`: chunked prefill, then decode. Both take the
reference's tokens, so that every step is compared; the bound is the contract's, 3e-5 x max |logit|.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.bundles import preset, preset_bundle
from rollkv.export.reference import Reference
from rollkv.runtime import Session
from rollkv.runtime.text import Tokenizer

BOUND = 3e-5
TOKENS = 64
LENGTH, CHUNK, SLOTS = 1216, 128, 1344

CODE = '''def quicksort(items):
    """Sort a list of numbers."""
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
'''
TEXTS = {
    "one token": "The",
    "English question": "What is the capital of France, and what is it known for?",
    "Chinese": "请用三句话介绍一下北京的历史，并说明它为什么重要。",
    "code": CODE,
    "numbers, emoji": "1 + 2 = 3; 1024 * 768 = ? Answer with a number 🙂 and then explain:\n",
    "128 tokens": "The river ran through the valley, past the mill and the old stone bridge, to the sea. " * 12,
    "257 tokens": "In 1969 the first message was sent between two computers. " * 40,
    "L tokens": "A long report about rivers, bridges, mills, harbours and the people who lived beside them. " * 120,
}
CUT = {"one token": 1, "128 tokens": 128, "257 tokens": 257, "L tokens": LENGTH}


def main(names: list[str]) -> int:
    failed = 0
    for name in names or ["smollm2-135m", "qwen2.5-coder-0.5b"]:
        bundle = preset_bundle(name, LENGTH, CHUNK, SLOTS)
        tokenizer, reference, session = (
            Tokenizer(bundle.path),
            Reference(preset(name), bundle.manifest.max_kvcache_len),
            Session(bundle),
        )
        print(f"\n{name}: L = {LENGTH}, c = {CHUNK}, C = {SLOTS}, {TOKENS} greedy tokens a prompt")
        print(f"{'prompt':20} {'n':>5} {'n mod c':>7} {'tokens equal':>12} {'near ties':>9} {'worst relative':>14}")
        for title, text in TEXTS.items():
            ids = tokenizer.encode(text)[: CUT.get(title, LENGTH)]
            wanted, tokens = reference.greedy(ids, TOKENS - 1)
            tokens.append(int(wanted.logits[-1].argmax()))
            session.reset()
            got = [session.prefill(ids)] + [session.decode(token) for token in tokens[:-1]]
            worst = max(np.abs(a - b).max() / np.abs(a).max() for a, b in zip(wanted.logits, got, strict=True))
            equal = sum(int(b.argmax()) == token for b, token in zip(got, tokens, strict=True))
            ties = sum(
                int(b.argmax()) != t and a.max() - a[b.argmax()] < BOUND * np.abs(a).max()
                for a, b, t in zip(wanted.logits, got, tokens, strict=True)
            )
            failed += equal + ties < TOKENS or not worst <= BOUND
            print(f"{title:20} {len(ids):5} {len(ids) % CHUNK:7} {equal:9}/{TOKENS} {ties:9} {worst:14.1e}")
    print("\nall within the bound" if not failed else f"\n{failed} prompts outside of the bound")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
