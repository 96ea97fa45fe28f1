"""Drafters: what they propose, and the account of how it went."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from rollkv.runtime.align import LimitError, PromptError
from rollkv.runtime.speculation import DraftModel, PromptLookup, SpeculationError, SpeculationReport


def looked_up(tokens, count, sizes):
    """The plain search that an index must agree with."""
    for n in sizes:
        tail = list(tokens[len(tokens) - n :])
        if n > len(tokens) or -1 in tail:
            continue
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == tail and tokens[end] != -1:
                follows = []
                for token in tokens[end : end + count]:
                    if token == -1:
                        break
                    follows.append(token)
                return follows
    return []


@pytest.mark.parametrize("seed", range(40))
def test_the_index_agrees_with_a_plain_search_while_the_sequence_grows_shrinks_and_changes(seed):
    rng = random.Random(seed)
    largest = rng.randint(1, 4)
    smallest = rng.randint(1, largest)
    lookup, tokens = PromptLookup(largest, smallest), []
    for _ in range(60):
        kind = rng.random()
        if kind < 0.7:
            tokens = tokens + [rng.randint(-1, 3) for _ in range(rng.choice([1, 1, 1, 5, 40]))]
        elif kind < 0.9:
            tokens = tokens[: rng.randint(0, len(tokens))]
        else:  # other tokens at the end, and perhaps more of them
            kept = rng.randint(max(0, len(tokens) - 30), len(tokens))
            tokens = tokens[:kept] + [rng.randint(-1, 3) for _ in range(rng.randint(0, 40))]
        count = rng.randint(0, 6)
        assert lookup.propose(tuple(tokens), count) == (looked_up(tokens, count, range(largest, smallest - 1, -1)))


def test_the_longest_match_wins_and_of_equal_ones_the_latest():
    lookup = PromptLookup(max_ngram=2)
    assert lookup.propose([1, 2, 7, 9, 2, 8, 1, 2], 2) == [7, 9]
    assert lookup.propose([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]
    assert lookup.propose([1, 2, 3], 4) == []
    assert lookup.propose([], 4) == []


def test_nothing_beyond_the_end_of_the_sequence_is_proposed():
    assert PromptLookup().propose([5, 6, 7, 5, 6], 10) == [7, 5, 6]


def test_embeddings_are_neither_matched_nor_proposed():
    assert PromptLookup().propose([4, -1, -1, 9, -1, -1], 3) == []
    assert PromptLookup().propose([4, 5, -1, 6, 4], 3) == [5]
    assert PromptLookup().propose([4, -1, 6, 4], 3) == []


def test_an_earlier_match_serves_where_an_embedding_follows_the_latest():
    assert PromptLookup().propose([4, 8, 4, -1, 4], 1) == [8]


def test_one_more_token_reads_only_the_last_tokens():
    class Counting(list):
        read = 0

        def __getitem__(self, index):
            found = super().__getitem__(index)
            Counting.read += len(found) if isinstance(index, slice) else 1
            return found

        def __iter__(self):
            raise AssertionError("walks over the whole sequence")

    lookup = PromptLookup()
    tokens = Counting(i % 1000 for i in range(20_000))
    lookup.propose(tokens, 4)
    for _ in range(10):
        tokens.append(len(tokens) % 1000)
        Counting.read = 0
        assert lookup.propose(tokens, 4) == [(len(tokens) + i) % 1000 for i in range(4)]
        assert Counting.read < 100


@pytest.mark.parametrize(("largest", "smallest"), [(0, 0), (2, 3), (3, 0), (2.0, 1), (True, 1)])
def test_sizes_that_make_no_sense_are_refused(largest, smallest):
    with pytest.raises(
        SpeculationError, match=r"min_ngram is .* and max_ngram .*1 <= min_ngram <= max_ngram"
    ) as caught:
        PromptLookup(largest, smallest)
    assert caught.value.exit_code == 2


def manifest(name="draft", vocab=32, tokenizer=None, **changes):
    files = {} if tokenizer is None else {"tokenizer.json": SimpleNamespace(size=1, sha256=tokenizer * 64)}
    settings = {"vocab_size": vocab, "files": files, "max_kvcache_len": 16, "max_position": 64}
    return SimpleNamespace(source=SimpleNamespace(id=name), **{**settings, **changes})


class CountingUp:
    """A session whose best next id is the sum of what it took, modulo the vocabulary."""

    def __init__(self, limit=12, refuses=None, **changes):
        self.manifest, self.limit, self.refuses = manifest(**changes), limit, refuses
        self.tokens, self.fed = [], 0

    def reset(self):
        self.tokens = []

    def rewind(self, position):
        del self.tokens[position:]

    def prefill(self, ids):
        if self.refuses is not None:
            raise self.refuses
        self.fed += len(ids)
        self.tokens += ids
        return self.logits()

    def decode(self, token):
        assert self.room() >= 1
        self.tokens.append(token)
        return self.logits()

    def room(self):
        return self.limit - len(self.tokens)

    def logits(self):
        logits = np.zeros(self.manifest.vocab_size, np.float32)
        logits[sum(self.tokens) % self.manifest.vocab_size] = 1
        return logits


def test_a_draft_model_proposes_its_own_greedy_continuation():
    assert DraftModel(CountingUp()).propose([1, 2, 4], 4) == [7, 14, 28, 56 % 32]
    assert DraftModel(CountingUp()).propose([1, 2, 4], 1) == [7]


def test_a_draft_model_is_asked_again_with_what_was_accepted():
    draft = DraftModel(CountingUp())
    draft.propose([1, 2, 4], 4)
    assert draft.propose([1, 2, 4, 7, 1], 2) == [15, 30]


@pytest.mark.parametrize(("tokens", "want"), [(10, 3), (11, 2), (12, 1), (17, 0)])
def test_a_draft_ends_where_the_drafts_cache_does(tokens, want):
    assert len(DraftModel(CountingUp()).propose([1] * tokens, 8)) == want


@pytest.mark.parametrize("error", [LimitError("full"), PromptError("longer than L")])
def test_a_prompt_that_the_draft_bundle_does_not_take_gives_no_draft(error):
    assert DraftModel(CountingUp(refuses=error)).propose([1, 2], 3) == []


def test_a_fault_of_the_draft_bundle_is_not_hidden():
    with pytest.raises(RuntimeError, match="the board is gone"):
        DraftModel(CountingUp(refuses=RuntimeError("the board is gone"))).propose([1, 2], 3)


@pytest.mark.parametrize(("tokens", "count"), [([], 3), ([1, -1, 2], 3), ([1, 2], 0), ([1] * 20, 3)])
def test_no_draft_is_tried_where_there_can_be_none(tokens, count):
    session = CountingUp(max_position=18, max_kvcache_len=40)
    assert DraftModel(session).propose(tokens, count) == []
    assert session.fed == 0


def test_a_draft_with_another_vocabulary_is_refused():
    with pytest.raises(
        SpeculationError, match="the draft small has 32 ids, the target big has 48; both must have the same"
    ) as caught:
        DraftModel(CountingUp(name="small"), manifest("big", 48))
    assert caught.value.exit_code == 2


def test_a_draft_with_another_tokenizer_is_refused_and_an_unknown_one_is_not():
    with pytest.raises(SpeculationError, match=r"the draft small has another tokenizer.json \(sha256 aaaaaaaaaaaa\)"):
        DraftModel(CountingUp(name="small", tokenizer="a"), manifest("big", tokenizer="b"))
    DraftModel(CountingUp(tokenizer="a"), manifest(tokenizer="a"))
    DraftModel(CountingUp(tokenizer="a"), manifest())
    DraftModel(CountingUp(), manifest(tokenizer="a"))


def test_the_account_of_a_generation_that_was_sped_up():
    report = SpeculationReport(drafted=120, accepted=96, runs=31, steps=4, tokens=127 + 4, step_seconds=0.4)
    report.run_seconds = 31 * 0.2
    assert report.acceptance == pytest.approx(0.8)
    assert report.tokens_per_run == pytest.approx(127 / 31)
    assert report.speed_up == pytest.approx(131 * 0.1 / (31 * 0.2 + 0.4))  # every token a step, over what it took
    assert report.summary() == (
        "drafted 120 tokens, 96 accepted (80 %); 31 runs gave 4.1 tokens each; "
        "about 2.0 times as fast as plain decoding"
    )


def test_what_was_not_measured_is_not_claimed():
    report = SpeculationReport()
    assert (report.acceptance, report.tokens_per_run, report.speed_up) == (None, None, None)
    assert report.summary() == "nothing drafted; 0 plain steps"
    report = SpeculationReport(drafted=1, accepted=0, runs=1, tokens=1, run_seconds=0.1)
    assert report.speed_up is None
    assert report.summary() == "drafted 1 token, 0 accepted (0 %); 1 run gave 1.0 tokens each"
    json.dumps(vars(report))
