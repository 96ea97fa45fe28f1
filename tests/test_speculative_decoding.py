"""Drafts verified on a graph with the logits of every row: the tokens of plain decoding, in fewer runs."""

import numpy as np
import pytest
from conftest import Recorder
from toy_model import ToyBackend, V, close, some_ids, toy_bundle, whole_pass

from rollkv.runtime.align import PromptError
from rollkv.runtime.backend import BackendError
from rollkv.runtime.sampling import NonFiniteLogits, SamplingOptions
from rollkv.runtime.session import Session
from rollkv.runtime.speculation import DraftModel, PromptLookup

C = 40


def session(**settings):
    bundle = toy_bundle(**{"c": 8, "C": C, "speculate": 4, **settings})
    recorder = Recorder(ToyBackend(bundle))
    return Session(bundle, backend=recorder), recorder


class Fixed:
    """Proposes what it was told to, by how many tokens there are."""

    def __init__(self, answer, prompt):
        self.answer, self.prompt, self.asked = answer, prompt, []

    def propose(self, tokens, count):
        self.asked.append((list(tokens), count))
        done = len(tokens) - self.prompt
        return self.answer[done : done + count]


def plain(ids, count, **options):
    fresh, _ = session(**{k: options.pop(k) for k in ("window", "layout", "eos") if k in options})
    return list(fresh.generate(ids, max_new_tokens=count, **options))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
def test_right_drafts_give_the_tokens_of_plain_decoding_four_to_a_run(layout, window):
    ids = some_ids(9)
    want = plain(ids, 17, layout=layout, window=window)
    fast, recorder = session(layout=layout, window=window)
    generation = fast.generate(ids, max_new_tokens=17, speculate=Fixed(want, len(ids)))
    assert list(generation) == want
    report = generation.speculation
    assert (report.drafted, report.accepted, report.runs, report.steps) == (12, 12, 4, 0)
    assert [graph.rows for graph, _ in recorder.runs][-4:] == [4] * 4
    assert fast.tokens == ids + want[:-1]


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_a_wrong_draft_costs_no_token_and_leaves_nothing_behind(wrong):
    ids = some_ids(9)
    want = plain(ids, 14)
    spoilt = [token if i % 4 != wrong else (token + 1) % V for i, token in enumerate(want)]
    fast, _ = session()
    generation = fast.generate(ids, max_new_tokens=14, speculate=Fixed(spoilt, len(ids)))
    assert list(generation) == want
    assert 0 < generation.speculation.accepted < generation.speculation.drafted
    close(fast.decode(want[-1]), whole_pass(ids + want)[-1])


def test_tokens_that_were_found_but_not_given_out_are_no_part_of_the_session():
    ids = some_ids(9)
    want = plain(ids, 12)
    fast, _ = session()
    generation = fast.generate(ids, max_new_tokens=12, speculate=Fixed(want, len(ids)))
    got = [next(generation) for _ in range(3)]
    assert got == want[:3]
    assert fast.tokens == ids + want[:2]
    assert fast.position == 11
    close(fast.prefill([5, 6]), whole_pass([*ids, *want[:2], 5, 6])[-1])
    with pytest.raises(PromptError, match="the session is at token 13, this generation continues at 11"):
        next(generation)


def test_a_snapshot_in_the_middle_of_a_run_takes_back_what_ran_ahead_and_the_generation_goes_on():
    ids = some_ids(9)
    want = plain(ids, 12)
    fast, _ = session()
    generation = fast.generate(ids, max_new_tokens=12, speculate=Fixed(want, len(ids)))
    got = [next(generation) for _ in range(3)]
    assert fast.snapshot().tokens == (*ids, *want[:2])
    assert got + list(generation) == want
    assert fast.tokens == ids + want[:-1]


def test_a_run_of_c_rows_is_used_only_while_it_drops_nothing():
    ids = some_ids(C - 8)
    want = plain(ids, 9)
    fast, recorder = session()
    generation = fast.generate(ids, max_new_tokens=20, speculate=Fixed([*want, *want], len(ids)))
    assert list(generation) == want
    assert generation.finish_reason == "length"
    after = [(graph.rows, int(feeds["position_ids"].max())) for graph, feeds in recorder.runs if graph.rows in (1, 4)]
    assert all(rows == 1 or last < C for rows, last in after)
    assert generation.speculation.runs == 2
    assert fast.position == C


def test_an_eos_among_accepted_drafts_ends_the_answer_there():
    ids = some_ids(9)
    want = plain(ids, 12)
    at = next(i for i in range(2, 12) if want[i] not in want[:i])
    fast, _ = session(eos=(want[at],))
    generation = fast.generate(ids, max_new_tokens=12, speculate=Fixed(want, len(ids)))
    assert list(generation) == want[:at]
    assert generation.finish_reason == "stop"
    assert fast.tokens == ids + want[:at]


@pytest.mark.parametrize("options", [{"temperature": 0.9, "seed": 4}, {"repetition_penalty": 1.7}])
def test_sampled_and_penalised_tokens_are_those_of_plain_decoding_too(options):
    ids = some_ids(9)
    sampling = SamplingOptions(**options)
    want = plain(ids, 16, sampling=sampling)
    spoilt = [token if i % 3 else (token + 1) % V for i, token in enumerate(want)]
    fast, _ = session()
    generation = fast.generate(ids, max_new_tokens=16, sampling=sampling, speculate=Fixed(spoilt, len(ids)))
    assert list(generation) == want
    assert generation.speculation.accepted > 0


def test_a_drafter_is_asked_for_no_more_than_can_be_used_and_may_answer_anything():
    ids = some_ids(9)
    want = plain(ids, 6)

    class Careless:
        def __init__(self):
            self.counts = []

        def propose(self, tokens, count):
            self.counts.append(count)
            return [*want[len(tokens) - len(ids) :][:1], V, -5, 99999]

    fast, _ = session()
    careless = Careless()
    assert list(fast.generate(ids, max_new_tokens=6, speculate=careless)) == want
    assert max(careless.counts) == 3
    assert careless.counts[-1] == min(careless.counts)


def test_logprobs_and_callbacks_see_every_token_once():
    ids = some_ids(9)
    heard = []
    fast, _ = session()
    want = plain(ids, 10)
    generation = fast.generate(
        ids, max_new_tokens=10, speculate=Fixed(want, len(ids)), logprobs=2, on_token=heard.append
    )
    assert list(generation) == heard == want
    rows = whole_pass(ids + want)[len(ids) - 1 : -1]
    for noted, token, row in zip(generation.logprobs, want, rows, strict=True):
        assert noted.token == token
        shifted = row - row.max()
        assert noted.logprob == pytest.approx(float(shifted[token] - np.log(np.exp(shifted).sum())), abs=1e-3)
        assert len(noted.top) == 2


def test_prompt_lookup_on_a_text_that_repeats_itself_needs_fewer_runs():
    ids = [3, 4, 5, 6, 7, 8] * 3
    fast, _ = session()
    generation = fast.generate(ids, max_new_tokens=12, speculate=PromptLookup())
    assert list(generation) == plain(ids, 12)
    assert generation.speculation.drafted > 0


def test_a_draft_model_with_the_same_weights_is_always_right():
    ids = some_ids(11)
    draft = DraftModel(session()[0])
    fast, _ = session()
    draft.check(fast.manifest)
    generation = fast.generate(ids, max_new_tokens=16, speculate=draft)
    assert list(generation) == plain(ids, 16)
    assert generation.speculation.accepted == generation.speculation.drafted > 0


def test_a_draft_model_goes_on_beyond_its_own_l():
    ids = some_ids(11)
    reports = []
    for length in (12, C):
        fast, _ = session()
        generation = fast.generate(ids, max_new_tokens=16, speculate=DraftModel(session(L=length)[0]))
        list(generation)
        reports.append((generation.speculation.drafted, generation.speculation.runs))
    assert reports[0] == reports[1]


def test_a_bundle_without_such_a_graph_is_refused_with_the_cure():
    bare, recorder = session(speculate=None)
    with pytest.raises(PromptError, match=r"no graph that gives the logits of every row.*--speculate 8"):
        bare.generate([1, 2], speculate=PromptLookup())
    assert not recorder.runs


@pytest.mark.parametrize("error", [BackendError("the engine stopped"), NonFiniteLogits("3 of 9 logits are not finite")])
def test_a_draft_model_that_fails_costs_no_token_and_says_so_once(error):
    ids = some_ids(9)
    want = plain(ids, 12)
    broken, _ = session()

    def fails(*_):
        raise error

    broken.prefill = fails
    fast, _ = session()
    generation = fast.generate(ids, max_new_tokens=12, speculate=DraftModel(broken))
    with pytest.warns(UserWarning, match=f"the draft .* cannot guess: {error}") as caught:
        tokens = list(generation)
    assert (tokens, len(caught)) == (want, 1)
    assert (generation.speculation.drafted, generation.finish_reason) == (0, "length")


def test_a_draft_model_over_the_session_itself_is_refused_before_anything_runs():
    one, _ = session()
    drafter = DraftModel(one)
    with pytest.raises(PromptError, match="give it a session of its own"):
        one.generate([1, 2, 3], speculate=drafter)
    assert one.position == 0
