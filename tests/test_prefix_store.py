"""Snapshots in memory: which position one can be rewound to, which one is found, which one goes."""

import random
import threading

import numpy as np
import pytest

from rollkv.runtime.prefix import PrefixError
from rollkv.runtime.prefix_store import PrefixStore
from rollkv.runtime.snapshot import CachePart, Snapshot


def snap(tokens, *, bundle="b", known=None, first=0, window=None, unit=4):
    data = np.zeros((2, 1, len(tokens) - first, unit), np.float32)
    known = len(tokens) if known is None else known
    return Snapshot(bundle, tuple(tokens), known, (), (CachePart(first, window, data),))


def usable_by_hand(snapshot, position):
    """Whether the query at `position` finds every token that it sees, in a cache that reaches down to it."""
    if not 1 <= position <= len(snapshot.tokens):
        return False
    for part in snapshot.parts:
        if part.first > position:
            return False
        for k in range(position):
            if (part.window is None or position - k < part.window) and k < part.first:
                return False
    return True


@pytest.mark.parametrize("seed", range(30))
def test_a_snapshot_is_usable_where_the_next_query_finds_all_that_it_sees(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 20)
    parts = tuple(
        CachePart(rng.randint(0, n - 1) if rng.random() < 0.6 else 0, window, np.zeros((1, 1, 1, 1), np.float32))
        for window in rng.choices([None, 1, 2, 3, 8, 30], k=2)
    )
    snapshot = Snapshot("b", tuple(range(n)), n, (), parts)
    for position in range(-1, n + 2):
        assert snapshot.usable(position) == usable_by_hand(snapshot, position), (position, parts)


def test_the_longest_common_prefix_is_found():
    store = PrefixStore(1 << 20)
    short, long, other = snap([1, 2]), snap([1, 2, 3, 4]), snap([9, 9])
    for item in (short, long, other):
        assert store.add(item)
    assert store.find([1, 2, 3, 7, 8], "b") == (long, 3)
    assert store.find([9], "b") == (other, 1)
    assert store.find(list(long.tokens), "b") == (long, 4)
    assert store.find([2, 1], "b") is None
    assert store.find([], "b") is None
    assert store.find([1, 2], "another bundle") is None


def test_of_equally_long_ones_the_smallest_is_found():
    store = PrefixStore(1 << 20)
    short, long = snap([1, 2]), snap([1, 2, 3, 4])
    store.add(short)
    store.add(long)
    assert store.find([1, 2, 8], "b") == (short, 2)


def test_only_tokens_that_came_by_id_alone_are_matched():
    store = PrefixStore(1 << 20)
    snapshot = snap([1, 2, -1, 3], known=2)
    store.add(snapshot)
    assert store.find([1, 2, -1, 3], "b") == (snapshot, 2)
    assert not store.add(snap([-1, 2], known=0))


def test_a_shorter_one_serves_where_the_longer_has_forgotten_its_beginning():
    store = PrefixStore(1 << 20)
    short, long = snap([1, 2, 3]), snap(range(1, 11), first=2, window=4)
    store.add(short)
    store.add(long)
    assert store.find(range(1, 9), "b") == (long, 8)
    assert store.find([1, 2, 3, 4, 50], "b") == (short, 3)
    assert len(store) == 2


def test_the_one_not_used_for_longest_goes_first():
    one = snap([1, 1]).nbytes
    store = PrefixStore(3 * one + one // 2)
    for token in (1, 2, 3):
        store.add(snap([token, token]))
    assert store.nbytes == 3 * one
    assert store.find([1], "b") is not None
    store.add(snap([4, 4]))
    assert [store.find([token], "b") is not None for token in (1, 2, 3, 4)] == [True, False, True, True]
    assert (len(store), store.nbytes) == (3, 3 * one)


def test_the_same_tokens_of_the_same_bundle_replace_what_was_there():
    store = PrefixStore(1 << 20)
    store.add(snap([1, 2]))
    newer, elsewhere = snap([1, 2]), snap([1, 2], bundle="c")
    store.add(newer)
    store.add(elsewhere)
    assert (len(store), store.nbytes) == (2, 2 * newer.nbytes)
    assert store.find([1, 2], "b") == (newer, 2)
    assert store.find([1, 2], "c") == (elsewhere, 2)


def test_one_larger_than_the_budget_changes_nothing():
    kept = snap([1, 2])
    store = PrefixStore(kept.nbytes)
    assert store.add(kept)
    assert not store.add(snap([1, 2, 3]))
    assert not store.add(snap([1, 2], unit=64))
    assert store.find([1, 2], "b") == (kept, 2)
    assert not PrefixStore(0).add(kept)


def test_clear_forgets_all():
    store = PrefixStore(1 << 20)
    store.add(snap([1, 2]))
    store.clear()
    assert (len(store), store.nbytes, store.find([1], "b")) == (0, 0, None)


@pytest.mark.parametrize("bad", [-1, 1.5, "1G", None])
def test_a_budget_that_is_no_number_of_bytes_is_refused(bad):
    with pytest.raises(PrefixError, match=r"max_bytes is .*, allowed: whole numbers from 0"):
        PrefixStore(bad)


def test_bytes_are_the_datas_and_some_for_the_tokens():
    snapshot = snap(range(100))
    data = snapshot.parts[0].data.nbytes
    assert data + 8 * 100 <= snapshot.nbytes <= data + 64 * 100


def test_threads_share_a_store():
    one = snap([1, 1, 1]).nbytes
    store, errors = PrefixStore(5 * one), []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(300):
                store.add(snap([rng.randint(1, 9), rng.randint(1, 3), seed]))
                found = store.find([rng.randint(1, 9), 1, seed], "b")
                assert found is None or 1 <= found[1] <= 3
                assert store.nbytes <= 5 * one
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.nbytes == len(store) * one
