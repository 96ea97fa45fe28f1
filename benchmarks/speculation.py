"""Prompt lookup against plain greedy decoding on texts that repeat their prompt: the same tokens, how much faster.

    python -m benchmarks.speculation [ROWS]

Qwen2.5-Coder-0.5B edits code, SmolLM2-135M summarises letters and quotes them; c = 128, and a graph of ROWS rows
(default 8) with the logits of every row. Plain and speculative decoding take turns, in one process on one loaded
bundle; speeds are tokens per second after the first token, medians of the turns.
"""

from __future__ import annotations

import statistics
import sys
import time

from benchmarks.bundles import FOLDER, preset
from rollkv.export.pipeline import export_bundle
from rollkv.export.signature import resolve
from rollkv.runtime import LoadedBundle, PromptLookup, Session, open_bundle
from rollkv.runtime.text import Tokenizer

TURNS = 3
CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
"""
EDIT = f"Rename the parameter `amount` to `cents` in this class. Answer with the whole class only.\n\n{CODE}"
REPORT = (
    'The harbour office wrote: "All ships leave the inner basin before noon on Friday, because the lock gates are '
    'repaired until Sunday evening." The captain of the Marianne answered: "We cannot leave the inner basin before '
    'noon on Friday, because our engine is repaired until Saturday morning." '
)
QUOTE = f"Summarise these letters and quote each of them word for word.\n\n{REPORT}"
CASES = (("qwen2.5-coder-0.5b", "code edit", EDIT), ("smollm2-135m", "summary with quotes", QUOTE))


def main(arguments: list[str]) -> int:
    rows = int(arguments[0]) if arguments else 8
    slowest = float("inf")
    for name, what, text in CASES:
        checkpoint = preset(name)
        options = resolve(checkpoint.config, max_lm_input_len=512, chunk_size=128, max_kvcache_len=1024, speculate=rows)
        folder = FOLDER / f"{name}-speculate-{rows}"
        export_bundle(checkpoint, options, folder, lambda *_: None)
        loaded = LoadedBundle(open_bundle(folder), threads=2)
        ids = Tokenizer(folder).chat_ids([{"role": "user", "content": text}])
        speeds: dict[str, list[float]] = {"plain": [], "lookup": []}
        answers, report = {}, None
        for turn in range(TURNS + 1):
            for way in speeds:
                session = Session(loaded)
                drafter = PromptLookup() if way == "lookup" else None
                generation = session.generate(ids, max_new_tokens=256, speculate=drafter)
                next(generation)
                start = time.perf_counter()
                count = sum(1 for _ in generation)
                if turn:
                    speeds[way].append(count / (time.perf_counter() - start))
                answers[way], report = generation.generated, generation.speculation or report
        assert report is not None
        plain, fast = (statistics.median(speeds[way]) for way in speeds)
        same = answers["plain"] == answers["lookup"]
        slowest = min(slowest, fast / plain if same else 0.0)
        print(
            f"{name}, {what}: prompt of {len(ids)}, {len(answers['plain'])} tokens, {'the same' if same else 'OTHERS'}"
        )
        print(f"  plain {plain:.1f} tokens/s, lookup {fast:.1f}: {fast / plain:.2f}x (bound 1.5x)")
        print(f"  {report.summary()}", flush=True)
    return 0 if slowest >= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
