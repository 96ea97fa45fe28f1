"""One bundle in memory and several sessions: what they share, what they do not, threads, costs, memory."""

import hashlib
import threading
import tracemalloc

import numpy as np
import pytest
from conftest import Recorder
from toy_model import ToyBackend, close, some_ids, toy_bundle, whole_pass

from rollkv.runtime.align import PromptError
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.prefix_store import PrefixStore
from rollkv.runtime.session import Session
from rollkv.runtime.speculation import DraftModel, PromptLookup


class BindingBackend:
    """The toy model in the session's own memory, as ONNX Runtime has it; checks what it is given at every run."""

    def __init__(self, bundle, silent=False):
        self._inner, self._silent, self.runs, self.addresses = ToyBackend(bundle), silent, 0, {}

    def bind(self, graph, arrays):
        backend = self

        class Bound:
            def __init__(self):
                self.inputs = {value.name: arrays[value.name] for value in graph.inputs}
                self.outputs = {value.name: arrays[value.name] for value in graph.outputs}

            def rebind(self, names, arrays):
                self.inputs.update(zip(names, arrays, strict=True))

            def run(self):
                backend.runs += 1
                if backend._silent:
                    return
                for value in (*graph.inputs, *graph.outputs):
                    array = {**self.inputs, **self.outputs}[value.name]
                    assert list(array.shape) == value.shape
                    assert array.dtype == value.dtype
                    assert array.flags.c_contiguous
                    if value.role in ("past_key", "past_value"):
                        place = array.__array_interface__["data"][0]
                        backend.addresses.setdefault(value.name, set()).add(place)
                before = {name: hashlib.sha256(array.tobytes()).digest() for name, array in self.inputs.items()}
                made = backend._inner.run(graph, self.inputs)
                for name, array in self.outputs.items():
                    array[...] = made[name]
                for name, array in self.inputs.items():  # outputs lie nowhere in them
                    assert hashlib.sha256(array.tobytes()).digest() == before[name], name

        return Bound()


@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("addresses", ["moving", "fixed"])
def test_a_backend_that_works_in_the_sessions_memory_gives_the_same(layout, window, addresses):
    bundle = toy_bundle(c=(4, 7), window=window, layout=layout)
    backend = BindingBackend(bundle)
    session = Session(bundle, backend=backend, addresses=addresses)
    ids = some_ids(24)
    close(session.prefill(ids[:11]), whole_pass(ids[:11], window)[-1])
    session.rewind(6)
    close(session.prefill(ids, reuse=True), whole_pass(ids, window)[-1])
    assert len(backend.addresses["past_key_0"]) == 1 or addresses == "moving"


def test_a_step_allocates_no_arrays():
    """What stays the same however long the cache: views, the token, a generator's frame."""
    peaks = []
    for slots in (64, 1024):
        bundle = toy_bundle(c=8, C=slots, most=5000)
        session = Session(bundle, backend=BindingBackend(bundle, silent=True))
        generation = session.generate(some_ids(40), max_new_tokens=500, ignore_eos=True, on_limit="roll")
        for _ in range(50):
            next(generation)
        tracemalloc.start()
        for _ in range(20):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            next(generation)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
    assert max(peaks) < 6000, peaks


def test_sessions_of_one_loaded_bundle_run_at_once_on_onnx_runtime(bundle):
    loaded = LoadedBundle(bundle("llama", chunk_size=(4, 8)), threads=1)
    prompts = [some_ids(n, seed=n) for n in (9, 17, 30)]
    want = [list(Session(loaded).generate(ids, max_new_tokens=8, ignore_eos=True)) for ids in prompts]
    got = [[] for _ in prompts]
    start = threading.Barrier(len(prompts))

    def work(index):
        start.wait()
        session = Session(loaded)
        for _ in range(6):
            got[index].append(list(session.generate(prompts[index], reuse=True, max_new_tokens=8, ignore_eos=True)))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[answer] * 6 for answer in want]


def test_graphs_of_other_sizes_are_loaded_when_they_are_first_used(bundle):
    made = bundle("llama", chunk_size=(4, 8))
    loaded = LoadedBundle(made, threads=1, chunk_sizes=[8])
    session = Session(loaded, chunk_sizes=[8])
    want = session.prefill([5, 6, 7])
    assert isinstance(loaded.backend, OrtBackend)
    assert sorted(loaded.backend._engines) == ["decode_k48.onnx", "prefill_c8_k48.onnx"]
    got = Session(loaded, chunk_sizes=[4]).prefill([5, 6, 7])
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    assert len(loaded.backend._engines) == 3


# Costs


@pytest.mark.parametrize("costs", [{4: 1.0}, {1: 1.0}, {1: 1.0, 4: float("nan")}, {1: -1.0, 4: 2.0}, {1: 0, 4: 1}, [1]])
def test_costs_that_do_not_fit_the_graphs_are_refused(costs):
    bundle = toy_bundle(c=4)
    with pytest.raises(PromptError, match=r"costs is .*, allowed: a positive number for each of 1, 4, the rows"):
        LoadedBundle(bundle, backend=ToyBackend(bundle), costs=costs)


def test_measuring_times_every_graph_and_covers_go_by_it():
    bundle = toy_bundle(c=(4, 8))
    backend = Recorder(ToyBackend(bundle))
    loaded = LoadedBundle(bundle, backend=backend)
    measured = loaded.measure(repeats=2)
    assert sorted(measured) == [1, 4, 8]
    assert min(measured.values()) > 0
    assert loaded.costs == measured
    assert len(backend.runs) == 9
    loaded.costs = {1: 1.0, 4: 1000.0, 8: 1000.0}
    backend.runs.clear()
    Session(loaded).prefill(some_ids(5))
    assert [graph.rows for graph, _ in backend.runs] == [1] * 5
    with pytest.raises(PromptError, match="repeats is 0, must be at least 1"):
        loaded.measure(0)


# Stored prefixes


@pytest.mark.parametrize("window", [None, 6])
def test_a_shared_beginning_is_computed_once(window):
    bundle = toy_bundle(c=4, window=window)
    backend = Recorder(ToyBackend(bundle))
    loaded, store = LoadedBundle(bundle, backend=backend), PrefixStore(1 << 20)
    ids = some_ids(20)
    first = Session(loaded, prefixes=store)
    first.prefill(ids[:12])
    assert store.add(first.snapshot())
    for seed in (3, 4):
        asked = [*ids[:12], *some_ids(5, seed)]
        session = Session(loaded, prefixes=store)
        backend.runs.clear()
        close(session.prefill(asked, reuse=True), whole_pass(asked, window)[-1])
        assert sum(graph.rows for graph, _ in backend.runs) == 8  # five tokens and three pads
        generation = session.generate([*asked, 7], reuse=True, max_new_tokens=1)
        list(generation)
        assert generation.reused_tokens == 17


def test_the_store_serves_a_session_that_has_forgotten_its_beginning():
    bundle = toy_bundle(c=4)
    loaded, store = LoadedBundle(bundle, backend=ToyBackend(bundle)), PrefixStore(1 << 20)
    session, ids = Session(loaded, prefixes=store), some_ids(14)
    session.prefill(ids[:12])
    store.add(session.snapshot())
    session.prefill(some_ids(30, 1), on_limit="roll")
    close(session.prefill(ids, reuse=True), whole_pass(ids)[-1])
    assert session.tokens == ids


# What was wrong once


def test_a_generation_notices_other_tokens_even_where_there_are_as_many():
    for spoil in (lambda s: (s.reset(), s.prefill([7] * 5)), lambda s: (s.rewind(2), s.prefill([7, 7, 7]))):
        bundle = toy_bundle(c=4)
        session = Session(bundle, backend=ToyBackend(bundle))
        session.prefill([1, 2, 3, 4, 5])
        waiting = session.generate([1, 2, 3, 9], reuse=True)
        spoil(session)
        with pytest.raises(PromptError, match="went back or took other tokens since; start a new generation"):
            next(waiting)
        assert session.position == 5


def test_two_threads_on_one_generation_feed_nothing_twice():
    bundle = toy_bundle(c=4, eos=tuple(range(23)))
    session = Session(bundle, backend=ToyBackend(bundle))
    generation = session.generate([1, 2, 3])
    with session.lock:
        threads = [threading.Thread(target=lambda: list(generation)) for _ in range(2)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert session.tokens == [1, 2, 3]
    assert generation.finish_reason == "stop"


def test_a_drafter_on_the_session_that_it_drafts_for_is_refused():
    bundle = toy_bundle(c=8, speculate=4)
    session = Session(bundle, backend=ToyBackend(bundle))
    with pytest.raises(PromptError, match="the drafter uses the session that it drafts for"):
        session.generate([1, 2, 3], speculate=DraftModel(session))

    class Meddling:
        def propose(self, tokens, count):
            session.decode(tokens[-1])
            return [5]

    generation = session.generate([1, 2, 3], speculate=Meddling())
    next(generation)
    with pytest.raises(PromptError, match="the drafter used the session that it drafts for"):
        next(generation)
    with pytest.raises(PromptError, match=r"speculate is 'lookup', allowed: a drafter, such as PromptLookup\(\)"):
        session.generate([1, 2], speculate="lookup")


class Interrupting:
    """Stands for a buffer whose methods are interrupted."""

    def __init__(self, buffer, *names):
        self._buffer, self._names = buffer, names

    def __getattr__(self, name):
        if name in self._names:
            raise KeyboardInterrupt
        return getattr(self._buffer, name)


@pytest.mark.parametrize("what", ["reset", "restore", "rewind"])
def test_an_interrupt_within_a_reset_or_a_restore_leaves_no_token(what):
    bundle = toy_bundle(c=4, window=6)
    session = Session(bundle, backend=ToyBackend(bundle))
    session.prefill(some_ids(9))
    kept = session.snapshot()
    session.prefill(some_ids(4))
    group = session.sequence.cache.groups[1]
    object.__setattr__(group, "buffer", Interrupting(buffer := group.buffer, "reset", "load"))
    with pytest.raises(KeyboardInterrupt):
        {"reset": session.reset, "restore": lambda: session.restore(kept), "rewind": lambda: session.rewind(0)}[what]()
    object.__setattr__(group, "buffer", buffer)
    assert session.tokens == []
    ids = some_ids(11, 5)
    close(session.prefill(ids), whole_pass(ids, 6)[-1])


@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
def test_a_failure_while_pinned_tokens_are_written_leaves_the_cache_as_it_was(layout, monkeypatch):
    from rollkv.runtime import kv

    bundle = toy_bundle(c=4, layout=layout)
    session = Session(bundle, backend=ToyBackend(bundle))
    ids = some_ids(24)
    session.prefill(ids)
    right, calls = kv.KvCache._turned, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == len(session.sequence.cache.groups):
            raise MemoryError
        return right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(kv.KvCache, "_turned", failing)
        with pytest.raises(MemoryError):
            session.decode(5, on_limit="sinks", sinks=2)
    assert session.tokens == ids
    session.rewind(20)
    close(session.prefill(ids, reuse=True), whole_pass(ids)[-1])


def test_the_graph_that_verifies_drafts_is_loaded_before_the_answer_begins(bundle):
    made = bundle("llama", chunk_size=(8,), speculate=4)
    loaded = LoadedBundle(made, threads=1, chunk_sizes=[8])
    session = Session(loaded, chunk_sizes=[8])
    assert len(loaded.backend._engines) == 2
    session.generate([5, 6, 7], speculate=PromptLookup())
    assert len(loaded.backend._engines) == 3
