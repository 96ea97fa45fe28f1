"""Backends that fail before, in and after a run, or give what is no number; many sessions, and many threads."""

import hashlib
import threading
import time

import numpy as np
import pytest
from toy_embeds import embeds_manifest, save_bundle
from toy_model import ToyBackend, close, some_ids, toy_bundle, whole_pass
from toy_reference import Record

from rollkv.runtime.bundle import open_bundle
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.sampling import NonFiniteLogits
from rollkv.runtime.session import Session

WAYS = [{"addresses": "moving"}, {"addresses": "fixed"}, {"addresses": "moving", "slack": 8}]


class Faulty(ToyBackend):
    """In the run of the number `at`, once, does what `fault` says; copies of the feeds of all others are kept."""

    def __init__(self, bundle, at=0, fault=None, error=RuntimeError):
        super().__init__(bundle)
        self.left, self.fault, self.error = at, fault, error
        self.fed = []

    def run(self, graph, feeds):
        self.left -= 1
        now = self.fault if self.left == 0 else None
        if now == "before":
            raise self.error("the board is gone")
        if now == "during":  # some of the outputs are there
            for value in graph.outputs[1:4]:
                self.arrays[graph.file][value.name][:] = np.nan
            raise self.error("the board is gone")
        outputs = super().run(graph, feeds)
        if now == "after":
            raise self.error("the board is gone")
        if now in ("nan", "inf"):
            outputs["logits"][..., -1, 3] = float(now)
        elif now is not None:  # a name of an output
            outputs[now][0, -1] = np.nan
        if now is None:
            self.fed.append({name: array.copy() for name, array in feeds.items()})
        return outputs


def faulty(at, fault, error=RuntimeError, way=WAYS[0], **settings):
    bundle = toy_bundle(**{"c": 4, "window": 5, **settings})
    backend = Faulty(bundle, at, fault, error)
    return Session(LoadedBundle(bundle, backend=backend), **way), backend


def check_goes_on(session, ids):
    """The tokens are a part of ids from their start, and the rest gives what a cold prefill gives."""
    done = session.position
    assert session.tokens == ids[:done]
    close(session.prefill(ids[done:]), whole_pass(ids, 5)[-1])
    session.reset()
    close(session.prefill(ids[:9]), whole_pass(ids[:9], 5)[-1])


# One run fails


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("fault", ["before", "during", "after"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_run_that_fails_leaves_the_tokens_of_those_before_it(at, fault, error, way):
    session, _ = faulty(at, fault, error, way)
    ids = some_ids(16)
    with pytest.raises(error, match="the board is gone"):
        session.prefill(ids[:15])
    assert session.position in (0, [0, 3, 7, 11][at - 1])
    check_goes_on(session, ids)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("fault", ["before", "during", "after"])
def test_a_decode_step_that_fails_can_be_done_again(fault, way):
    session, _ = faulty(4, fault, way=way)
    ids = some_ids(12)
    session.prefill(ids[:10])
    with pytest.raises(RuntimeError, match="the board is gone"):
        session.decode(ids[10])
    assert session.position in (0, 10)
    check_goes_on(session, ids)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("fault", ["before", "during", "after", "nan", "new_key_0"])
@pytest.mark.parametrize("policy", ["roll", "sinks"])
@pytest.mark.parametrize("back", [0, 2, 23])
def test_a_run_that_would_have_evicted_and_fails_has_evicted_nothing(back, policy, fault, way):
    session, backend = faulty(7, fault, way=way, window=None)
    ids, limit = some_ids(24), {"on_limit": policy, **({"sinks": 2} if policy == "sinks" else {})}
    session.prefill(ids)  # six runs
    with pytest.raises((RuntimeError, NonFiniteLogits)):
        session.prefill([5, 6, 7, 8], **limit)
    assert session.tokens in ([], ids)
    if session.tokens:
        session.rewind(24 - back)
    for seed, n in enumerate((1, 4, 23, 1)):  # up to C, and past it
        logits = session.prefill(some_ids(n, seed), **limit)
        record = Record()
        for feeds in backend.fed:
            record.take(feeds, limit.get("sinks", 0))
        assert session.tokens == record.tokens
        close(logits, record.logits(session.bundle)[-1])


# What comes back is no number


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("fault", ["nan", "inf", "new_key_0", "new_value_1"])
@pytest.mark.parametrize("at", [3, 4])
def test_what_is_not_finite_is_refused_and_leaves_no_trace_in_the_cache(at, fault, way):
    """NaN in a slot that no mask shows would still reach every row: 0 x NaN."""
    session, backend = faulty(at, fault, way=way)
    ids = some_ids(16)
    if at == 4:
        session.prefill(ids[:11])
    with pytest.raises(NonFiniteLogits) as caught:
        session.decode(ids[11]) if at == 4 else session.prefill(ids[:11])
    assert caught.value.exit_code == 1
    assert session.position in (0, [7, 11][at - 3])
    done = session.position
    session.decode(ids[done])
    for name, array in backend.fed[-1].items():
        assert np.isfinite(array).all(), name
    past = backend.fed[-1]["past_key_0"][0]
    assert not past[: 24 - done].any()  # never written, or zeroed
    assert past[24 - done :].any(axis=(1, 2)).all()
    check_goes_on(session, ids)


@pytest.mark.parametrize("fault", ["nan", "new_key_0"])
def test_a_generation_ends_with_what_is_not_finite_and_the_next_one_goes_on(fault):
    session, _ = faulty(5, fault)
    ids = some_ids(9)
    reply = session.generate(ids, max_new_tokens=6)
    with pytest.raises(NonFiniteLogits):
        list(reply)
    assert reply.finish_reason == "error"
    assert len(reply.generated) in (1, 2)
    kept = session.tokens
    assert kept in ([], [*ids, reply.generated[0]])
    more = list(session.generate([*kept, 3] if not kept else [3], max_new_tokens=3))
    whole = [*kept, 3]
    assert more == whole_pass([*whole, *more[:-1]], 5)[len(whole) - 1 :].argmax(-1).tolist()


# Many sessions


class Keeping(ToyBackend):
    """Keeps the arrays that it is fed, themselves."""

    def __init__(self, bundle):
        super().__init__(bundle)
        self.fed = []

    def run(self, graph, feeds):
        self.fed.append(dict(feeds))
        return super().run(graph, feeds)


@pytest.mark.parametrize("ways", [(0, 0), (1, 1), (0, 1)], ids=str)
def test_two_sessions_of_one_bundle_share_no_array_and_do_not_meet(ways):
    bundle = toy_bundle(c=(2, 4), window=5)
    backend = Keeping(bundle)
    loaded = LoadedBundle(bundle, backend=backend)
    sessions = [Session(loaded, **WAYS[way]) for way in ways]
    texts, fed = [some_ids(23, seed=1), some_ids(23, seed=2)], [[], []]
    at = 0
    for n in (5, 1, 6, 3, 1, 4, 2, 1):
        for i, session in enumerate(sessions):
            backend.fed.clear()
            close(session.prefill(texts[i][at : at + n]), whole_pass(texts[i][: at + n], 5)[-1])
            fed[i] += backend.fed
        at += n
    for one in fed[0]:
        for other in fed[1]:
            for array in one.values():
                assert not any(np.may_share_memory(array, its) for its in other.values())


def test_a_bundle_that_is_opened_twice_gives_the_same(tmp_path):
    folder = tmp_path / "b"
    save_bundle(folder, embeds_manifest(tokens="ids", c=4, window=5))
    ids = some_ids(20)
    opened = [open_bundle(folder), open_bundle(folder)]
    sessions = [Session(LoadedBundle(bundle, backend=ToyBackend(bundle))) for bundle in opened]
    for session in sessions:
        session.prefill(ids[:11])
    for session in reversed(sessions):
        close(session.prefill(ids[11:]), whole_pass(ids, 5)[-1])
    snapshot = sessions[0].snapshot()
    sessions[1].reset()
    sessions[1].restore(snapshot)
    close(sessions[1].decode(4), whole_pass([*ids, 4], 5)[-1])


# Many threads


class Hashing(ToyBackend):
    """Slow, and sees whether anyone changes the feeds while it runs."""

    def __init__(self, bundle):
        super().__init__(bundle)
        self.changed = []

    def run(self, graph, feeds):
        before = {name: digest(array) for name, array in feeds.items()}
        time.sleep(0.0005)  # others run
        outputs = super().run(graph, feeds)
        self.changed += [name for name, array in feeds.items() if digest(array) != before[name]]
        return outputs


def digest(array):
    return hashlib.sha256(array.tobytes()).digest()


def in_threads(*calls):
    """Run them at once; the first error, if there is one, is raised here."""
    errors, start = [], threading.Barrier(len(calls))

    def guarded(call):
        start.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_sessions_of_one_bundle_run_in_threads_of_their_own(way):
    bundle = toy_bundle(c=(2, 4), window=5)
    backend = Hashing(bundle)
    loaded = LoadedBundle(bundle, backend=backend)

    def talk(seed):
        ids = some_ids(22, seed=seed)
        want = whole_pass(ids, 5)
        session = Session(loaded, **way)
        for _ in range(3):
            session.reset()
            at = 0
            for n in (7, 1, 1, 6, 1, 5):
                at += n
                close(session.prefill(ids[at - n : at]), want[at - 1])
            reply = list(session.generate(ids[at : at + 1], max_new_tokens=2))
            assert reply[0] == want[at].argmax()

    in_threads(*(lambda seed=seed: talk(seed) for seed in range(4)))
    assert not backend.changed


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_session_that_is_used_from_two_threads_takes_whole_prompts(way):
    bundle = toy_bundle(c=4, C=48, window=5)
    backend = Hashing(bundle)
    session = Session(LoadedBundle(bundle, backend=backend), **way)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15]]
    got = [[], []]

    def take(i):
        for _ in range(4):
            got[i].append(session.prefill(prompts[i]))

    in_threads(lambda: take(0), lambda: take(1))
    tokens, at, turn = session.tokens, 0, [0, 0]
    assert len(tokens) == 4 * 12
    want = whole_pass(tokens, 5)
    while at < len(tokens):
        i = 0 if tokens[at] == 1 else 1
        assert tokens[at : at + len(prompts[i])] == prompts[i]
        at += len(prompts[i])
        close(got[i][turn[i]], want[at - 1])
        turn[i] += 1
    assert not backend.changed


def test_the_caller_may_change_what_it_gave_and_got():
    bundle = toy_bundle(c=4)
    session = Session(LoadedBundle(bundle, backend=ToyBackend(bundle)))
    ids = some_ids(12)
    given = np.array(ids[:7])
    logits = session.prefill(given)
    given[:] = 0
    logits[:] = np.nan
    close(session.prefill(ids[7:]), whole_pass(ids)[-1])
