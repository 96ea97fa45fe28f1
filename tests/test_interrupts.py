"""Ctrl-C at every line of the driver: a session is then as it was, or as it would be, or empty; and it goes on right.

Each line is tried once; what it leaves is held against sessions that nothing stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_model import ToyBackend, close, some_ids, toy, toy_bundle, whole_pass

from rollkv.runtime.session import Session

IDS = some_ids(40, seed=3)
WATCHED = ("sequence.py", "kv.py", "cache.py", "feeds.py")


def stopped_at(number: int, work: Callable[[], Any]) -> bool:
    """Do the work, with a KeyboardInterrupt at the line of this number in WATCHED; whether it came to that line."""
    left = number

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in WATCHED or "runtime" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def lines() -> Iterator[int]:
    """1, 2, 3, ... ; a test ends with the first that is not reached."""
    yield from range(1, 5000)
    raise AssertionError("the work never ended")


SINKS, ROLL = {"on_limit": "sinks", "sinks": 2}, {"on_limit": "roll"}
WORK: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {  # limit policy, tokens before, how the bundle is made
    "prefill": ({}, 8, {}),
    "first roll": (ROLL, 24, {}),
    "roll": (ROLL, 26, {}),
    "first sinks": (SINKS, 24, {}),
    "sinks": (SINKS, 28, {"window": 5}),
    "next length": ({}, 8, {"layout": "bksd", "buckets": (8, 12)}),
}


@pytest.mark.parametrize("step", ["run", "decode"])
@pytest.mark.parametrize("name", WORK)
def test_an_interrupted_run_leaves_the_session_as_it_was_or_empty(name: str, step: str) -> None:
    policy, past, settings = WORK[name]
    new = IDS[past : past + (4 if step == "run" else 1)]

    def session(*turns: list[int]) -> Session:
        made, _ = toy(c=4, C=24, **settings)
        for turn in turns:
            made.prefill(turn, **policy)
        return made

    after = {  # position -> logits of a token more, where nothing was stopped
        past: session(IDS[:past]).decode(7, **policy),
        past + len(new): session(IDS[:past], new).decode(7, **policy),
        0: session().decode(7, **policy),
    }
    for number in lines():
        stopped = session(IDS[:past])
        if not stopped_at(number, lambda: stopped.prefill(new, **policy)):  # noqa: B023
            break
        assert len(stopped.tokens) == stopped.position
        want = after[stopped.position]
        close(stopped.decode(7, **policy), want)
    assert number > 30


@pytest.mark.parametrize("layout", ["bskd", "bksd"])
@pytest.mark.parametrize("name", ["reset", "restore", "rewind", "reuse"])
def test_an_interrupted_change_leaves_the_session_as_it_was_or_empty(name: str, layout: str) -> None:
    def session() -> tuple[Session, Callable[[], Any]]:
        made, _ = toy(c=4, C=24, layout=layout, window=5, buckets=(8,))
        made.prefill(IDS[:6])
        saved = made.snapshot()
        forgets = name in ("reset", "restore")
        made.prefill(IDS[6:30] if forgets else IDS[6:12], **(ROLL if forgets else {}))
        return made, {
            "reset": made.reset,
            "restore": lambda: made.restore(saved),
            "rewind": lambda: made.rewind(10),
            "reuse": lambda: made.prefill([*IDS[:11], 3, 3], reuse=True),
        }[name]

    for number in lines():
        made, work = session()
        if not stopped_at(number, work):
            break
        if made.position == 30:  # as it was: it has forgotten tokens
            made.decode(7, **ROLL)
            continue
        tokens = [*made.tokens, 7]
        close(made.decode(7), whole_pass(tokens, 5)[-1])
        assert made.snapshot().tokens == tuple(tokens)


class Rebinding(ToyBackend):
    """Binds, and fails in one of its rebinds."""

    left = 0

    def bind(self, graph: Any, arrays: Any) -> Any:
        backend, bound = self, dict(arrays)

        class Bound:
            def rebind(self, names: Any, arrays: Any) -> None:
                backend.left -= 1
                if backend.left == 0:
                    raise RuntimeError("the board is gone")
                bound.update(zip(names, arrays, strict=True))

            def run(self) -> None:
                for name, array in backend.run(
                    graph, {value.name: bound[value.name] for value in graph.inputs}
                ).items():
                    bound[name][...] = array

        return Bound()


@pytest.mark.parametrize("at", [1, 2])
def test_a_rebind_that_fails_is_done_again_whatever_happens_next(at: int) -> None:
    bundle = toy_bundle(c=4, C=24, window=5)  # two groups of caches
    backend = Rebinding(bundle)
    session = Session(bundle, backend=backend)
    session.prefill(IDS[:6])
    session.decode(2)
    session.decode(6)
    backend.left = at
    with pytest.raises(RuntimeError, match="the board is gone"):
        session.decode(7)
    session.rewind(7)  # back to where the inputs were bound last
    close(session.decode(8), whole_pass([*IDS[:6], 2, 8], 5)[-1])
    assert np.isfinite(session.decode(1)).all()
