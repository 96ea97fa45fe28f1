"""Random sessions: whatever is done to one, its logits are those of one pass over the tokens that it says it holds.

The expectation is `toy_reference.py`: the tokens, and the ends of the runs that took them, are read from what the
backend was fed. Every feed is held to the contract, and every refusal must come exactly when the contract says so.
`make test` takes 360 examples, always the same; `make test-properties` takes thousands of others.
"""

import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from random_cases import Case, cases, tokens_of
from toy_model import V, close, toy_bundle, whole_pass
from toy_reference import Record, pads_of
from watched_runs import Watching, check_run

from rollkv.runtime.align import LimitError, PromptError
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.session import Session
from rollkv.runtime.speculation import PromptLookup

COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("suite", max_examples=60, derandomize=True, database=None, **COMMON)
settings.register_profile("nightly", max_examples=600, **COMMON)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE") or "suite")

BOUNDS = {"float32": 1e-4, "float16": 3e-2}  # relative to the largest logit


# What is checked


@dataclass
class Held:
    """What a session must hold: its record, and how far it has been since the last reset.

    low and high differ only by drafts that were run and rejected: a cache may or may not have taken them in.
    """

    record: Record = field(default_factory=Record)
    low: int = 0
    high: int = 0

    def copy(self):
        return Held(self.record.copy(), self.low, self.high)

    def may_rewind(self, bundle, position: int, far: int) -> bool:
        """Whether every layer still has what the token at `position` sees, after `far` tokens."""
        if position == len(self.record.tokens):
            return True
        rows = max(graph.rows for graph in bundle.manifest.graphs)
        for layer in bundle.manifest.layers:
            if far <= layer.kv_len:
                continue  # nothing was evicted
            if layer.window is None or far - position > layer.kv_len - (layer.window - 1):
                return False
            assert layer.kv_len in (bundle.manifest.max_kvcache_len, layer.window - 1 + rows)
        return True


class Drafts:
    """Proposes what the model itself would say, or that with a wrong token in it: both must make no difference."""

    def __init__(self, bundle, right: int):
        layers = bundle.manifest.layers
        self.window, self.full, self.right = layers[1].window, layers[0].window is None, right

    def propose(self, tokens, count):
        ids = list(tokens)
        for i in range(count):
            best = int(whole_pass(ids, self.window, full=self.full)[-1].argmax())
            ids.append(best if i < self.right else (best + 1) % V)
        return ids[len(tokens) :]


class Driver:
    """Does the operations to a session, and knows what must come of them."""

    def __init__(self, case: Case, folder: str):
        self.case, self.folder = case, folder
        self.bundle = toy_bundle(**case.bundle)
        self.m = self.bundle.manifest
        self.C, self.L = self.m.max_kvcache_len, self.m.max_lm_input_len
        self.backend = Watching(self.bundle)
        loaded = LoadedBundle(self.bundle, backend=self.backend, costs=case.costs)
        self.session = Session(loaded, **case.session)
        self.held = Held()
        self.kept: dict[str, list[tuple[Any, Held]]] = {"snapshot": [], "save": []}

    def run(self) -> None:
        for name, *rest in [*self.case.operations, ("decode", 5, True)]:
            self.policy = self.case.policy if rest[-1] else "stop"
            getattr(self, name)(*rest[:-1])
            assert self.session.tokens == self.held.record.tokens
            assert self.session.position == len(self.held.record.tokens)
            for on_limit in ("stop", self.case.policy):
                assert self.session.room(on_limit) == self.room(on_limit)

    @property
    def past(self) -> int:
        return len(self.held.record.tokens)

    def room(self, on_limit: str) -> int:
        return min(self.C if on_limit == "stop" else 10**6, self.m.max_position) - self.past

    def limit(self) -> dict[str, Any]:
        return {"on_limit": self.policy, **({"sinks": self.case.sinks} if self.policy == "sinks" else {})}

    def new(self, count: int | str, seed: int) -> list[int]:
        rows = self.case.bundle["speculate"] or self.m.chunk_size
        named = {"full": 0, "over": 1, "but one": -1, "run": -rows, "run over": 1 - rows}
        return tokens_of(max(1, self.C - self.past + named[count] if isinstance(count, str) else count), seed)

    def before(self, back: int | str) -> int:
        """The position that is so far back."""
        layer = self.m.layers[1]
        if isinstance(back, str):
            spare = 1 if layer.window is None else layer.kv_len - (layer.window - 1) - (self.held.high - self.past)
            back = spare + (back == "too far")
        return min(self.past, max(0, self.past - back))

    def refused(self, given: int, new: int, past: int) -> tuple[bool, tuple[type[Exception], ...]]:
        """Whether a prompt may run, and by which errors it may be refused. given: n; new: those that would run."""
        errors: list[type[Exception]] = []
        if self.policy == "stop" and given > self.L:
            errors.append(PromptError)
        must = self.policy == "stop" and new > self.L
        if (self.policy == "stop" and past + new > self.C) or past + new > self.m.max_position:
            errors.append(LimitError)
            must = True
        return not must, tuple(errors)

    def call(self, allowed: bool, errors: tuple[type[Exception], ...], do: Any) -> Any:
        """What `do` gives, or None where it was refused, rightly and without a trace."""
        self.backend.runs.clear()
        if not errors:
            return do()
        refusal: Any = None
        try:
            result = do()
        except errors as error:
            refusal = error
        if refusal is not None:
            assert refusal.exit_code == 2
            assert not self.backend.runs
            return None
        assert allowed, f"not refused; expected {errors}"
        return result

    def follow(self, start: int | None = None, speculative: bool = False) -> None:
        """Take what was run into the record. start: where the first run must begin, if it is known."""
        for i, (graph, feeds) in enumerate(self.backend.runs):
            past = int(feeds["position_ids"][0, pads_of(feeds)])
            if i == 0 and start is not None:
                assert past == start
            assert speculative or i == 0 or pads_of(feeds) == 0
            if past == 0:
                self.held = Held()
            assert self.held.may_rewind(self.bundle, past, self.held.low)
            self.held.low = max(self.held.low, past)
            check_run(self.bundle, graph, feeds, past)
            self.held.record.take(feeds, self.case.sinks if self.policy == "sinks" else 0)
            self.held.high = max(self.held.high, len(self.held.record.tokens))
            if self.policy == "stop":
                assert self.past <= self.C
        if speculative:
            assert self.session.tokens == self.held.record.tokens[: self.session.position]
            self.held.record.rewind(self.session.position)
        self.held.low = max(self.held.low, self.past)

    def compare(self, logits: np.ndarray) -> None:
        want = self.held.record.logits(self.bundle)[-1]
        assert logits.shape == (V,)
        close(logits, want, BOUNDS[self.m.dtype])

    # Operations

    def prefill(self, count: int | str, seed: int) -> None:
        ids, past = self.new(count, seed), self.past
        logits = self.call(*self.refused(len(ids), len(ids), past), lambda: self.session.prefill(ids, **self.limit()))
        if logits is not None:
            self.follow(past)
            assert self.held.record.tokens[past:] == ids
            self.compare(logits)

    def reuse(self, back: int | str, count: int | str, seed: int) -> None:
        """The whole sequence: a part of what is held, and then others."""
        ids = self.held.record.tokens[: self.before(back)]
        ids += self.new(count, seed)[: 2 * self.C]
        common = next((i for i, (a, b) in enumerate(zip(ids, self.held.record.tokens, strict=False)) if a != b), None)
        common = min(len(ids) - 1, self.past) if common is None else common  # one must run: for its logits
        low, high = (self.held.may_rewind(self.bundle, common, far) for far in (self.held.low, self.held.high))
        keep = common if high else 0
        logits = self.call(
            *self.refused(len(ids), len(ids) - (common if low else 0), common if low else 0),
            lambda: self.session.prefill(ids, reuse=True, **self.limit()),
        )
        if logits is not None:
            self.follow(keep if low == high else None)
            assert self.held.record.tokens == ids
            self.compare(logits)

    def decode(self, seed: int) -> None:
        token, past = seed % V, self.past
        logits = self.call(*self.refused(1, 1, past), lambda: self.session.decode(token, **self.limit()))
        if logits is not None:
            self.follow(past)
            assert self.held.record.tokens[past:] == [token]
            assert [graph.rows for graph, _ in self.backend.runs] == [1]
            self.compare(logits)

    def rewind(self, back: int | str) -> None:
        position = self.before(back)
        low, high = (self.held.may_rewind(self.bundle, position, far) for far in (self.held.low, self.held.high))
        errors = () if high else (LimitError,)
        done = self.call(low or position == 0, errors, lambda: [self.session.rewind(position)])
        assert not self.backend.runs
        if done is not None:
            self.held.record.rewind(position)
            if position == 0 and not high:
                self.held = Held()

    def reset(self) -> None:
        self.session.reset()
        self.held = Held()

    def state(self, do: Any) -> Any:
        """A saved state has every token, at least where a layer sees them all."""
        forgot = self.m.layers[0].window is None and self.held.high > self.C
        return self.call(False, (LimitError,) if forgot or not self.past else (), do)

    def snapshot(self) -> None:
        if snapshot := self.state(self.session.snapshot):
            self.kept["snapshot"].append((snapshot, self.held.copy()))

    def restore(self, which: int) -> None:
        if kept := self.kept["snapshot"]:
            snapshot, held = kept[which % len(kept)]
            self.session.restore(snapshot)
            self.held = held.copy()

    def save(self) -> None:
        path = os.path.join(self.folder, f"{len(self.kept['save'])}.prefix")
        if self.state(lambda: [self.session.save(path)]):
            self.kept["save"].append((path, self.held.copy()))

    def load(self, which: int) -> None:
        if kept := self.kept["save"]:
            path, held = kept[which % len(kept)]
            self.session.load_prefix(path)
            self.held = held.copy()

    def generate(self, count: int | str, seed: int, most: int, drafter: str | None) -> None:
        """Greedy, drafted or not: each token is the best of the reference; as many as there is room for and one."""
        ids, past = self.new(count, seed), self.past
        speculate: Any = None
        if self.case.bundle["speculate"] is not None and drafter is not None:
            right = {"right": 99, "wrong later": seed % 3}
            speculate = PromptLookup() if drafter == "lookup" else Drafts(self.bundle, right[drafter])

        def do() -> Any:
            reply = self.session.generate(ids, max_new_tokens=most, speculate=speculate, **self.limit())
            return list(reply), reply

        given = self.call(*self.refused(len(ids), len(ids), past), do)
        if given is None:
            return
        tokens, reply = given
        self.follow(past, speculative=speculate is not None)
        assert self.held.record.tokens[past:] == ids + tokens[:-1]
        room = self.room(self.policy) + len(tokens) - 1  # when the first was chosen
        assert len(tokens) == min(most, room + 1)
        assert reply.generated == tokens
        assert reply.finish_reason == "length"
        assert (reply.speculation is None) == (speculate is None)
        want = self.held.record.logits(self.bundle)[past + len(ids) - 1 :]
        near = BOUNDS[self.m.dtype] * np.abs(want).max()
        for token, logits in zip(tokens, want, strict=True):
            assert logits[token] >= logits.max() - near


def hold(cases: Any) -> None:
    @PROFILE
    @given(cases)
    def every(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Driver(case, folder).run()

    every()


@pytest.mark.parametrize("policy", ["stop", "roll", "sinks"])
def test_whatever_is_done_to_a_session_its_logits_are_those_of_one_pass_over_its_tokens(policy):
    hold(cases(policy))


@pytest.mark.parametrize("policy", ["stop", "roll", "sinks"])
def test_drafted_tokens_are_those_of_greedy_decoding_and_leave_the_session_as_it_leaves_it(policy):
    hold(cases(policy, drafted=True))
