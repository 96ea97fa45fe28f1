import numpy as np
import pytest
from toy_model import Failing, ToyBackend, run_ends, some_ids, toy, toy_bundle, whole_pass

from rollkv.runtime.align import PromptError
from rollkv.runtime.sampling import NonFiniteLogits, SamplingError, SamplingOptions
from rollkv.runtime.session import Session

C = 24


class Scripted:
    """A backend whose best next token follows a script; it keeps the ids that went in."""

    def __init__(self, script):
        self.script, self.graphs = list(script), []

    def run(self, graph, feeds):
        self.graphs.append(graph.role)
        outputs = {value.name: np.zeros(value.shape, value.dtype) for value in graph.outputs}
        if graph.role == "decode" or len(self.graphs) == 1:
            outputs["logits"][0, -1, self.script.pop(0)] = 1
        return outputs


@pytest.mark.parametrize("c", [1, 4, 5])
@pytest.mark.parametrize("n", [1, 4, 5, C - 1, C])
def test_under_stop_a_prompt_of_n_gives_as_many_tokens_as_the_cache_has_room_and_one_more(n, c):
    session, _ = toy(c=c)
    ids = some_ids(n)
    reply = session.generate(ids, max_new_tokens=10**6)
    tokens = list(reply)
    assert len(tokens) == C - n + 1
    assert reply.finish_reason == "length"
    assert session.tokens == ids + tokens[:-1]  # the last one is never fed back
    assert list(reply) == []
    want = whole_pass(ids + tokens[:-1])[n - 1 :].argmax(-1)
    assert tokens == want.tolist()


def test_nothing_runs_until_the_first_token_is_asked_for():
    session, recorder = toy(c=4)
    reply = session.generate([1, 2, 3])
    assert (reply.finish_reason, reply.prompt_tokens, reply.truncated, recorder.runs) == (None, 3, 0, [])
    next(reply)
    assert len(recorder.runs) == 1


def test_max_new_tokens_ends_with_length_without_a_further_run():
    session, recorder = toy(c=4)
    reply = session.generate([1, 2, 3], max_new_tokens=3)
    assert len(list(reply)) == 3
    assert reply.finish_reason == "length"
    assert len(recorder.runs) == 3


def test_without_a_number_at_most_256_tokens_are_generated():
    session, _ = toy(c=4, most=1024)
    assert len(list(session.generate([1], on_limit="roll"))) == 256


def test_an_eos_ends_with_stop_and_is_not_given_out():
    backend = Scripted([9, 8, 7, 2, 5])
    session = Session(toy_bundle(eos=[4, 2]), backend=backend)
    reply = session.generate([1, 2, 4])
    assert list(reply) == [9, 8, 7]
    assert reply.finish_reason == "stop"
    assert reply.generated == [9, 8, 7]
    assert session.tokens == [1, 2, 4, 9, 8, 7]


def test_with_ignore_eos_an_eos_is_a_token_like_others():
    session = Session(toy_bundle(eos=[2]), backend=Scripted([9, 2, 5]))
    reply = session.generate([1], max_new_tokens=3, ignore_eos=True)
    assert list(reply) == [9, 2, 5]
    assert reply.finish_reason == "length"


def test_under_roll_generation_goes_on_to_the_models_last_position():
    session, _ = toy(c=4, most=40)
    ids = some_ids(10)
    reply = session.generate(ids, max_new_tokens=1000, on_limit="roll")
    tokens = list(reply)
    assert len(tokens) == 40 - 10 + 1
    assert reply.finish_reason == "length"
    forgets = run_ends([10] + [1] * 30, 4, C) - C
    assert tokens == whole_pass(ids + tokens[:-1], forgets=forgets)[9:].argmax(-1).tolist()


def test_a_generation_continues_after_one_that_was_left_early():
    session, _ = toy(c=4)
    reply = session.generate([1, 2, 3])
    first, _ = next(reply), next(reply)
    got = next(session.generate([7, 8]))
    assert session.tokens == [1, 2, 3, first, 7, 8]
    assert got == whole_pass(session.tokens)[-1].argmax()


def test_a_generation_whose_session_went_on_without_it_is_refused():
    session, recorder = toy(c=4)
    waiting = session.generate(some_ids(20))
    session.prefill([1, 2, 3, 4, 5])
    recorder.runs.clear()
    with pytest.raises(PromptError, match="the session is at token 5, this generation continues at 0"):
        next(waiting)
    assert not recorder.runs
    assert session.tokens == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", [0, -3])
def test_fewer_than_one_new_token_is_refused(number):
    session, recorder = toy()
    with pytest.raises(PromptError, match=f"max_new_tokens is {number}, must be at least 1"):
        session.generate([1], max_new_tokens=number)
    assert not recorder.runs


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_generation_that_failed_is_over_and_feeds_nothing_twice(at):
    bundle = toy_bundle(c=4)
    session = Session(bundle, backend=Failing(bundle, at))
    ids = some_ids(11)
    reply = session.generate(ids)
    with pytest.raises(RuntimeError, match="the board is gone"):
        list(reply)
    went = session.tokens
    assert went == ids[: [0, 3, 7, 11][at - 1]]
    assert list(reply) == []
    assert session.tokens == went
    assert reply.finish_reason == "error"


def test_logits_that_are_not_finite_stop_a_generation_with_a_message():
    class Broken(ToyBackend):
        def run(self, graph, feeds):
            outputs = super().run(graph, feeds)
            outputs["logits"][..., 3] = np.nan
            return outputs

    bundle = toy_bundle()
    with pytest.raises(NonFiniteLogits, match=r"1 of 23 logits of graph prefill\.onnx are not finite"):
        next(Session(bundle, backend=Broken(bundle)).generate([1]))


def test_a_generation_that_has_given_its_last_token_ends_with_length_whatever_the_session_did_then():
    session, _ = toy()
    reply = session.generate(some_ids(3), max_new_tokens=2)
    tokens = [next(reply), next(reply)]
    session.decode(5)
    assert (list(reply), len(tokens), reply.finish_reason) == ([], 2, "length")


def test_a_bias_of_an_id_outside_of_the_vocabulary_is_refused_before_anything_runs():
    session, _ = toy()
    with pytest.raises(SamplingError, match=r"logit_bias holds token id 1000000; allowed: 0 \.\. "):
        session.generate([1, 2, 3], sampling=SamplingOptions(logit_bias={10**6: 1.0}))
    assert session.position == 0
