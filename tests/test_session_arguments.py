"""What a caller may say to a session, and what comes back wrong from those that it asks."""

import numpy as np
import pytest
from toy_model import ToyBackend, close, some_ids, toy_bundle, whole_pass

from rollkv.runtime.align import LimitError, PromptError
from rollkv.runtime.backend import BackendError
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.session import Session


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_sizes": 4}, "chunk_sizes is 4, allowed: several whole numbers"),
        ({"chunk_sizes": [5]}, "chunk size 5 is not in this bundle; it has 4"),
        ({"chunk_sizes": []}, "no chunk size is given; this bundle has 4"),
        ({"addresses": "ring"}, "addresses 'ring' is unknown; allowed: moving, fixed"),
        ({"slack": 0}, r"slack is 0, allowed: 1 \.\. 16777216"),
    ],
)
def test_settings_of_a_session_that_are_not_allowed_are_refused(settings, message):
    bundle = toy_bundle(c=4)
    with pytest.raises(PromptError, match=message):
        Session(bundle, backend=ToyBackend(bundle), **settings)


def test_what_belongs_to_the_loaded_bundle_is_not_a_sessions_to_say():
    bundle = toy_bundle(c=4)
    loaded = LoadedBundle(bundle, backend=ToyBackend(bundle))
    with pytest.raises(PromptError, match="belong to the LoadedBundle that is given"):
        Session(loaded, threads=2)
    with pytest.raises(PromptError, match="on_limit 'forget' is unknown"):
        Session(loaded).room("forget")


def test_a_policy_that_has_forgotten_cannot_be_exchanged():
    bundle = toy_bundle(c=4)
    session = Session(bundle, backend=ToyBackend(bundle))
    session.prefill(some_ids(30), on_limit="sinks", sinks=2)
    for other in ({"on_limit": "roll"}, {"on_limit": "sinks", "sinks": 3}):
        with pytest.raises(LimitError, match="has forgotten tokens by sinks of 2 and cannot go on by"):
            session.decode(1, **other)
    with pytest.raises(PromptError, match=r"sinks is 24, allowed: 1 \.\. 23, less than C"):
        session.decode(1, on_limit="sinks", sinks=24)
    with pytest.raises(LimitError, match="has forgotten its first tokens; only a whole prefix can be saved"):
        session.snapshot()


@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
@pytest.mark.parametrize(("C", "window"), [(8, None), (24, 4)])
def test_a_snapshot_is_a_copy_also_of_a_cache_that_is_full(layout, C, window):
    bundle = toy_bundle(c=4, C=C, window=window, layout=layout)
    session = Session(bundle, backend=ToyBackend(bundle))
    ids = some_ids(8)
    session.prefill(ids)
    kept = session.snapshot()
    for part in kept.parts:
        for group in session.sequence.cache.groups:
            assert not np.shares_memory(part.data, group.buffer.window())
    session.reset()
    session.prefill(some_ids(7, 3))
    session.restore(kept)
    session.rewind(7)
    close(session.decode(9), whole_pass([*ids[:7], 9], window)[-1])


def test_a_window_of_one_can_be_saved_after_a_rewind_that_leaves_it_nothing(tmp_path):
    bundle = toy_bundle(c=2, C=8, window=1)
    session = Session(bundle, backend=ToyBackend(bundle))
    session.prefill([1, 2, 3, 4])
    session.rewind(2)
    session.save(tmp_path / "two.kv")
    other = Session(bundle, backend=ToyBackend(bundle))
    other.load_prefix(tmp_path / "two.kv")
    assert other.tokens == [1, 2]
    close(other.decode(9), whole_pass([1, 2, 9], 1)[-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out: {**out, "logits": np.zeros(1, np.float32)}, r"output logits got shape \(1,\), want \(1, 1, 23\)"),
        (lambda out: {**out, "logits": out["logits"].astype("f8")}, "output logits got float64, want float32"),
        (lambda out: {k: v for k, v in out.items() if k != "new_key_1"}, "output new_key_1 is not given"),
        (lambda out: None, "output logits is not given"),
    ],
)
def test_what_a_backend_gives_is_checked_and_a_fault_leaves_no_trace(spoil, message):
    class Odd(ToyBackend):
        def run(self, graph, feeds):
            return spoil(super().run(graph, feeds))

    bundle = toy_bundle(c=4)
    session = Session(bundle, backend=Odd(bundle))
    with pytest.raises(BackendError, match=rf"graph prefill\.onnx: {message}; the backend must give it so"):
        session.prefill([1, 2])
    assert session.tokens == []


def test_an_exception_in_a_callback_ends_the_generation():
    bundle = toy_bundle(c=4)
    session = Session(bundle, backend=ToyBackend(bundle))

    def stop(token):
        raise ValueError("enough")

    generation = session.generate([4], on_token=stop)
    with pytest.raises(ValueError, match="enough"):
        next(generation)
    assert generation.finish_reason == "error"
    assert list(generation) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.generate([1], on_token=5), "on_token is 5, allowed: a function of an id"),
        (lambda s: s.generate([1], sampling=1.0), "sampling is 1.0, allowed: SamplingOptions"),
        (lambda s: s.prefill([1], on_limit=np.array(["stop", "roll"])), "on_limit array.* is unknown"),
        (lambda s: s.prefill([True]), "token ids must be whole numbers"),
        (lambda s: s.restore(None), "snapshot is None, allowed: what Session.snapshot gave"),
        (lambda s: Session(s.bundle, backend=s.backend, slack=10**30), "slack is 10+, allowed: 1 .. 16777216"),
        (lambda s: Session(s.bundle, backend=s.backend, prefixes=5), "prefixes is 5, allowed: a PrefixStore"),
        (lambda s: Session(None), "bundle is None, allowed: the folder that"),
        (lambda s: s.load_prefix(3), "path is 3, allowed: the name of a file"),
        (lambda s: s.rewind(4), r"position is 4, allowed: 0 \.\. 3"),
        (lambda s: s.rewind(1.5), "position is 1.5, allowed: a whole number"),
        (lambda s: s.generate([1], min_new_tokens=9, max_new_tokens=3), r"min_new_tokens is 9, allowed: 0 \.\. 3"),
        (lambda s: s.generate([1], logprobs=-1), "logprobs is -1, must be at least 0"),
    ],
)
def test_what_is_not_allowed_is_refused_with_code_2_and_changes_nothing(call, message):
    bundle = toy_bundle(c=4)
    session = Session(bundle, backend=ToyBackend(bundle))
    session.prefill([1, 2, 3])
    with pytest.raises(ValueError, match=message) as caught:
        call(session)
    assert caught.value.exit_code == 2
    assert session.tokens == [1, 2, 3]


@pytest.mark.parametrize("answer", [None, 5, [1.7], ["a"]])
def test_a_drafter_that_gives_no_ids_is_named(answer):
    class Odd:
        def propose(self, tokens, count):
            return answer

    bundle = toy_bundle(c=8, speculate=4)
    generation = Session(bundle, backend=ToyBackend(bundle)).generate([1, 2], speculate=Odd())
    next(generation)
    with pytest.raises(PromptError, match=r"the drafter gave|a drafted token is"):
        next(generation)


@pytest.mark.parametrize("memory", ["", "Fast", 1])
def test_an_unknown_kind_of_memory_is_refused(memory):
    with pytest.raises(PromptError, match=r"memory .* is unknown; allowed: fast, low"):
        Session(toy_bundle(), memory=memory)
