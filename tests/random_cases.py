"""Bundles, ways to open them and what is done to a session, drawn at random for `test_properties.py`."""

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from toy_model import V


@dataclass
class Case:
    """One bundle, one way to open it, and what is done to the session."""

    bundle: dict[str, Any]
    session: dict[str, Any]
    costs: dict[int, float] | None
    policy: str
    sinks: int
    operations: list[tuple[Any, ...]]


def numbers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, max(low, high))


@st.composite
def cases(draw: st.DrawFn, policy: str, drafted: bool = False) -> Case:
    """drafted: with a graph for drafts, and most of what is done is to generate with it."""
    C = draw(st.one_of(numbers(4, 24), numbers(12, 24)))
    rows = st.one_of(numbers(1, min(4, C)), numbers(1, min(8, C)), st.just(C))
    sizes = draw(st.lists(rows, min_size=1, max_size=3, unique=True))
    speculate = draw(numbers(2, min(6, C)) if drafted else st.none() | numbers(2, min(6, C)))
    largest = max(*sizes, speculate or 1)
    window = draw(st.one_of(st.none(), numbers(1, min(5, C)), numbers(1, C)))
    most = draw(st.sampled_from([512, 512, C + 6, C]))
    addresses = draw(st.sampled_from(["moving", "fixed"]))
    costs = draw(st.none() | st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
    beside = [
        min(max(C - size + more, 1), C - 1) for size in sizes for more in (0, 1)
    ]  # runs that just see them, or not
    sinks = numbers(1, min(6, C - 1)) | st.sampled_from(beside)
    subset = speculate is None and draw(st.booleans())
    return Case(
        bundle={
            "C": C,
            "c": tuple(sizes),
            "L": draw(st.sampled_from([C, C, max(1, C - 3)])),
            "speculate": speculate,
            "window": window,
            "full": window is None or draw(st.booleans()),
            "layout": draw(st.sampled_from(["bskd", "bksd", "bksd-kt"])),
            "ids": draw(st.sampled_from(["int32", "int64"])),
            "dtype": draw(st.sampled_from(["float32", "float32", "float16"])),
            "most": most,
            "buckets": draw(st.lists(numbers(2, C - 1), max_size=2, unique=True)),
        },
        session={
            "addresses": addresses,
            "slack": draw(st.none() | numbers(largest, C + 3)) if addresses == "moving" else None,
            "chunk_sizes": draw(st.lists(st.sampled_from(sizes), min_size=1, unique=True)) if subset else None,
        },
        costs=costs and dict(zip(sorted({1, *sizes, speculate or 1}), costs, strict=False)),
        policy=policy,
        sinks=draw(sinks) if policy == "sinks" else 0,
        operations=draw(
            st.tuples(st.just("prefill"), numbers(1, C), st.integers(0, 999), st.just(True)).map(lambda x: [x])
        )
        + draw(st.lists(operations(C, drafted), min_size=3, max_size=12)),
    )


def operations(C: int, drafted: bool) -> st.SearchStrategy[tuple[Any, ...]]:
    """A name, what it needs, and last whether the limit policy is the case's own (else "stop")."""
    own = st.sampled_from([True, True, True, False])
    seed = st.integers(0, 999)
    # New tokens: a number, or up to one end of the cache or the other side of it, or so that one run of the draft
    # graph just fits after them, or does not.
    named = st.sampled_from(["full", "over", "but one", "run", "run over"])
    count = st.one_of(numbers(1, 9), numbers(1, 2 * C), named, named)
    # Tokens to go back: a number, or as far as the slots of a layer with a window go, or one more.
    back = st.one_of(numbers(0, 3), numbers(0, 24), st.sampled_from(["farthest", "too far"]))
    drafter = st.sampled_from([None, "lookup", "right", "wrong later"])
    often = [
        st.tuples(st.just("prefill"), count, seed, own),
        st.tuples(st.just("decode"), seed, own),
        st.tuples(st.just("reuse"), back, count, seed, own),
        st.tuples(st.just("rewind"), back, own),
        st.tuples(st.just("generate"), count, seed, numbers(1, 6), drafter, own),
    ]
    seldom = [
        st.tuples(st.just("reset"), own),
        st.tuples(st.just("snapshot"), own),
        st.tuples(st.just("restore"), numbers(0, 5), own),
        st.tuples(st.just("save"), own),
        st.tuples(st.just("load"), numbers(0, 5), own),
    ]
    return st.one_of(*often, *often, *(often[-1:] * 10 if drafted else seldom))


def tokens_of(n: int, seed: int) -> list[int]:
    """Few different ones, so that prompts repeat themselves and each other."""
    return random.Random(seed).choices(range(V if seed % 2 else 3), k=n)
