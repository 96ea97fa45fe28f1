"""A backend that fails, a cache that holds NaN, an interrupt: what the session says and does after it."""

import numpy as np
import pytest
from toy_model import Failing, ToyBackend, close, some_ids, toy, toy_bundle, whole_pass

from rollkv.runtime.sampling import NonFiniteLogits
from rollkv.runtime.session import Session


@pytest.mark.parametrize("at", [1, 2, 3])
def test_after_a_failure_the_tokens_say_what_went_through_and_the_session_goes_on(at):
    bundle = toy_bundle(c=4)
    session = Session(bundle, backend=Failing(bundle, at))
    ids = some_ids(11)
    with pytest.raises(RuntimeError, match="the board is gone"):
        session.prefill(ids)
    done = [0, 3, 7][at - 1]
    assert session.tokens == ids[:done]
    close(session.prefill(ids[done:]), whole_pass(ids)[-1])
    session.reset()
    close(session.prefill(ids), whole_pass(ids)[-1])


def test_a_run_with_new_keys_that_are_not_finite_stops_and_leaves_no_trace():
    class Poisoned(ToyBackend):
        poison = True

        def run(self, graph, feeds):
            outputs = super().run(graph, feeds)
            for name, array in outputs.items():
                if self.poison and name != "logits":
                    array[:] = np.nan
            return outputs

    bundle = toy_bundle()
    backend = Poisoned(bundle)
    session = Session(bundle, backend=backend)
    with pytest.raises(NonFiniteLogits, match=r"new keys or values of graph prefill\.onnx are not finite"):
        session.prefill(some_ids(20))
    assert session.tokens == []
    backend.poison = False
    ids = some_ids(9, seed=4)
    close(session.prefill(ids), whole_pass(ids)[-1])


def test_an_interrupt_between_two_rolls_forgets_everything_rather_than_half(monkeypatch):
    session, _ = toy(c=4, L=12, window=16)
    session.prefill(range(5))
    second = session.sequence.cache.groups[1].buffer
    with monkeypatch.context() as patch:
        patch.setattr(second, "roll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.decode(5)
    assert session.tokens == []
    close(session.prefill(range(6)), whole_pass(range(6))[-1])


def interrupted(*_):
    raise KeyboardInterrupt
