"""How fast a bundle is on this machine: `rollkv bench`. Times the driver as it is used, and what of it is the engine's.

Against: the driver that most have, which concatenates past and new tokens of every cache at every step, and, where the
model is given, transformers. Knows no text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rollkv.runtime.align import PromptError
from rollkv.runtime.backend import Array, Binding, OrtBackend, available_threads
from rollkv.runtime.bench_plot import check_plot, draw
from rollkv.runtime.bundle import SLOT_AXES, GraphInfo, Manifest, open_bundle
from rollkv.runtime.cover import Run
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.manifest import HEAD_ROLES
from rollkv.runtime.session import Session

SEED = 7
Rival = Callable[[Sequence[int], int], tuple[float, list[float]]]  # ids, steps -> seconds to the first token, of steps


@dataclass(frozen=True)
class Times:
    """Of one kind of work, repeated: seconds, and the share that passes outside of the engine."""

    p50: float
    p90: float
    host_share: float

    @staticmethod
    def of(samples: Sequence[tuple[float, float]]) -> Times:
        """samples: seconds, and the engine's part of them."""
        whole = sorted(seconds for seconds, _ in samples)
        share = statistics.median(1 - engine / seconds for seconds, engine in samples)
        return Times(statistics.median(whole), whole[min(len(whole) - 1, int(0.9 * len(whole)))], share)


@dataclass(frozen=True)
class PromptTimes:
    """What a prompt of n tokens and the steps after it take."""

    n: int
    first_token: Times  # from the prompt to its first token: all runs, and the choice
    decode: Times  # a step
    concatenating: float  # seconds of a step of the concatenating driver, median
    transformers: tuple[float, float] | None = None  # seconds to its first token, of a step; medians

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.n / self.first_token.p50

    @property
    def decode_rate(self) -> float:
        """Tokens a second."""
        return 1 / self.decode.p50


@dataclass
class BenchReport:
    """Everything that `rollkv bench` measures. Times in seconds, memory in bytes."""

    bundle: str
    threads: int
    memory: str
    load: float
    prompts: list[PromptTimes] = field(default_factory=list)
    peak_rss: int = 0  # of the process, with all that it was compared with
    weights: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the rates."""
        prompts = [
            asdict(p) | {"prefill_tokens_per_second": p.prefill_rate, "decode_tokens_per_second": p.decode_rate}
            for p in self.prompts
        ]
        return asdict(self) | {"prompts": prompts}

    def lines(self) -> list[str]:
        """The table."""
        memory = f"peak {self.peak_rss / 1e6:.0f} MB resident for {self.weights / 1e6:.0f} MB of weights"
        told = [f"{self.bundle}: {self.threads} threads, loaded in {self.load:.2f} s, {memory}"]
        told.append("     n  first token  tok/s     p90    host |     step   tok/s     p90    host   concatenating")
        for p in self.prompts:
            told.append(
                f"{p.n:6} {p.first_token.p50 * 1e3:9.0f} ms {p.prefill_rate:6.0f} {p.first_token.p90 * 1e3:7.0f} "
                f"{100 * p.first_token.host_share:5.2f} % | {p.decode.p50 * 1e3:5.1f} ms {p.decode_rate:7.1f} "
                f"{p.decode.p90 * 1e3:7.1f} {100 * p.decode.host_share:5.2f} % {p.concatenating * 1e3:12.1f} ms"
            )
        for p in self.prompts:
            if p.transformers is not None:
                first, step = p.transformers
                told.append(
                    f"transformers, n = {p.n}: first token {first * 1e3:.0f} ms ({first / p.first_token.p50:.2f}x), "
                    f"step {step * 1e3:.1f} ms ({step / p.decode.p50:.2f}x)"
                )
        return told


class TimedBackend:
    """An engine that adds up how long its runs take."""

    def __init__(self, inner: OrtBackend) -> None:
        self._inner = inner
        self.seconds = 0.0

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run."""
        return self._inner.run(graph, feeds)

    def bind(self, graph: GraphInfo, arrays: Mapping[str, Array]) -> Binding:
        """See BindingBackend.bind."""
        return _TimedBinding(self, self._inner.bind(graph, arrays))


class _TimedBinding:
    def __init__(self, owner: TimedBackend, inner: Binding) -> None:
        self._owner, self._inner = owner, inner
        self.rebind = inner.rebind

    def run(self) -> None:
        """See Binding.run."""
        start = time.perf_counter()
        self._inner.run()
        self._owner.seconds += time.perf_counter() - start


def bench(
    folder: str,
    *,
    prompts: Sequence[int] | None = None,
    steps: int = 32,
    rounds: int = 3,
    threads: int | None = None,
    memory: str = "fast",
    rival: Rival | None = None,
) -> BenchReport:
    """Measure a bundle. prompts: numbers of tokens, by default c, L / 2 and L, as far as `steps` fit after them.

    rival: takes turns with the bundle, so that what else the machine does meets both.
    Raises PromptError for a prompt that does not fit with its steps, or a bundle that takes embeddings without a table,
    BundleError when the folder holds no bundle.
    """
    bundle = open_bundle(folder)
    m = bundle.manifest
    most = min(m.max_lm_input_len, min(m.max_kvcache_len, m.max_position) - steps)
    if prompts is None:
        prompts = sorted({n for n in (m.chunk_size, m.max_lm_input_len // 2, most) if 1 <= n <= most})
    if most < 1:
        raise PromptError(f"{steps} steps leave no room for a prompt in C = {m.max_kvcache_len}; time fewer steps")
    prompts = list(dict.fromkeys(prompts))
    for n in prompts or [0]:
        if not 1 <= n <= most:
            raise PromptError(f"a prompt of {n} tokens and {steps} steps after it do not fit; allowed: 1 .. {most}")
    start = time.perf_counter()
    engine = OrtBackend(bundle, threads, memory)
    timed = TimedBackend(engine)
    session = Session(LoadedBundle(bundle, backend=timed))
    report = BenchReport(folder, threads or available_threads(), memory, time.perf_counter() - start)
    ids = np.random.default_rng(SEED).integers(0, m.vocab_size, max(prompts)).tolist()

    def timing(work: Any) -> tuple[float, float]:
        timed.seconds, start = 0.0, time.perf_counter()
        work()
        return time.perf_counter() - start, timed.seconds

    for n in prompts:
        firsts: list[tuple[float, float]] = []
        decodes: list[tuple[float, float]] = []
        others: list[tuple[float, float]] = []  # of the rival
        for number in range(rounds + 1):  # the first one warms up
            session.reset()
            answer = session.generate(ids[:n], max_new_tokens=steps + 1, ignore_eos=True)
            samples = [timing(lambda: next(answer)) for _ in range(steps + 1)]  # noqa: B023
            if number:
                firsts.append(samples[0])
                decodes += samples[1:]
            if rival is not None:
                first, each = rival(ids[:n], steps)
                others += [(first, statistics.median(each))] if number else []
        concatenating = _concatenating(m, session, engine, ids[:n], min(8, steps))
        theirs = (statistics.median(f for f, _ in others), statistics.median(s for _, s in others)) if others else None
        report.prompts.append(PromptTimes(n, Times.of(firsts), Times.of(decodes), concatenating, theirs))
    report.weights = m.weights.unique_bytes
    report.peak_rss = _peak_rss()
    return report


def _peak_rss() -> int:
    """Most bytes that this process had in memory; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _concatenating(m: Manifest, session: Session, engine: OrtBackend, ids: list[int], steps: int) -> float:
    """Median seconds of a decode step whose caches are made anew by concatenation, as most drivers do."""
    session.reset()
    session.prefill(ids)
    graph = session.loaded.serving(session.loaded.decode, session.position + steps - 1, session.sequence.cache.kv_len)
    new_of = dict(m.kv_pairs)
    axes = {v.name: SLOT_AXES[m.kv_layout][v.role == "past_value"] for v in graph.inputs if v.name in new_of}
    choose, samples = _chooser(session), []
    feeds = {name: np.array(array) for name, array in session.feeds(graph, Run(1, 0), [0]).items()}
    for _ in range(steps):
        start = time.perf_counter()
        outputs = engine.run(graph, feeds)
        for name, axis in axes.items():
            joined = np.concatenate((feeds[name], outputs[new_of[name]]), axis)
            feeds[name] = np.ascontiguousarray(np.take(joined, range(1, joined.shape[axis]), axis))
        choose(outputs)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _chooser(session: Session) -> Callable[[Mapping[str, Array]], int]:
    """What finds the likeliest token by the last row of what a graph of the session gave."""
    end = next(value for value in session.loaded.decode.outputs if value.role in HEAD_ROLES)
    head = session.loaded.head
    if head is None:
        return lambda outputs: int(np.argmax(outputs[end.name][0, -1]))
    logits, scratch = np.empty(session.manifest.vocab_size, np.float32), head.scratch()

    def choose(outputs: Mapping[str, Array]) -> int:
        head.logits(outputs[end.name][0, -1], logits, scratch)
        return int(np.argmax(logits))

    return choose


def checked_plot(options: argparse.Namespace) -> None:
    """Raise as `check_plot`, where a plot is asked for."""
    if options.plot is not None:
        check_plot(options.plot)


def bench_command(options: argparse.Namespace, rival: Rival | None = None) -> int:
    """`rollkv bench`."""
    checked_plot(options)
    report = bench(
        options.bundle,
        prompts=options.prompts,
        steps=options.steps,
        rounds=options.rounds,
        threads=options.threads,
        memory=options.memory,
        rival=rival,
    )
    print(json.dumps(report.to_dict(), indent=2) if options.json else "\n".join(report.lines()), flush=True)
    if options.plot is not None:
        draw(report, options.plot)
    return 0
