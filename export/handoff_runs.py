"""Runs of the real chunk loop over the user's text, recorded: which ones, and how a session gets there.

A session takes the text in turns of at most L tokens, as a conversation would, and stops where a run is wanted: a
first chunk with pads, a full chunk, a cache that is partly filled or full. Whatever inputs a graph declares are
recorded as the session fed them; nothing here knows their names. P, c, C, C' and L as in the contract.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from rollkv.export.handoff_text import Corpus
from rollkv.runtime.backend import Array, Backend
from rollkv.runtime.bundle import GraphInfo, Manifest
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.session import Session

GOLDEN_RUNS = 3


@dataclass(frozen=True)
class Stop:
    """One run that is wanted: `tokens` real tokens after P = `position` others.

    head: the graph that takes the hidden state of the run's last row, where that run is wanted in place of the other.
    """

    graph: GraphInfo
    position: int
    tokens: int
    number: int = 0  # among the golden runs of the wanted graph
    head: GraphInfo | None = None

    @property
    def wanted(self) -> GraphInfo:
        """The graph whose run is wanted."""
        return self.head or self.graph

    @property
    def end(self) -> int:
        """P after it."""
        return self.position + self.tokens


@dataclass(frozen=True)
class Recorded:
    """One run: what went in and what came out, copies, by name."""

    stop: Stop
    start: int  # of the sequence, in the corpus
    ids: tuple[int, ...]  # its real tokens
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]

    @property
    def pads(self) -> int:
        """Rows left of the real tokens; a head has none."""
        return 0 if self.stop.head is not None else self.stop.graph.rows - len(self.ids)


class Tap:
    """A backend that hands runs on, and keeps copies of them while `kept` is a list."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.kept: list[tuple[GraphInfo, dict[str, Array], dict[str, Array]]] | None = None

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run."""
        outputs = self.inner.run(graph, feeds)
        if self.kept is not None:
            self.kept.append((graph, _copies(feeds), _copies(outputs)))
        return outputs


def planned_calibration(m: Manifest, graph: GraphInfo, available: int, samples: int) -> list[Stop]:
    """At most `samples` different places: `calibration_stops`, of a head those of every graph before it, in turn."""
    if graph.role != "head":
        return calibration_stops(m, graph, available, samples)
    each = -(-samples // len(m.driven))
    turns = zip_longest(*(calibration_stops(m, other, available, each) for other in m.driven))
    return [replace(stop, head=graph) for turn in turns for stop in turn if stop is not None][:samples]


def planned_golden(m: Manifest, graph: GraphInfo, available: int) -> list[Stop]:
    """`golden_stops`; of a head those of the largest prefill run and of a decode step that see C slots."""
    if graph.role != "head":
        return golden_stops(m, graph, available)
    whole = [other for other in m.driven if other.kv_len == m.max_kvcache_len]
    last = max((other for other in whole if other.role == "prefill"), key=lambda other: other.rows)
    step = next(other for other in whole if other.role == "decode")
    stops = [*golden_stops(m, last, available), *golden_stops(m, step, available)]
    return [replace(stop, head=graph, number=number) for number, stop in enumerate(stops)]


def served(m: Manifest, graph: GraphInfo) -> tuple[int, int]:
    """The least and the greatest P of runs that this graph serves: a smaller visible length goes before it."""
    smaller = [
        other.kv_len
        for other in m.graphs
        if (other.role, other.rows) == (graph.role, graph.rows) and other.kv_len < graph.kv_len
    ]
    return max([0, *(kv_len - graph.rows + 1 for kv_len in smaller)]), graph.kv_len - graph.rows


def reach(m: Manifest, graph: GraphInfo, available: int) -> int:
    """The greatest P that `available` tokens of text reach with this graph; below its least P: it is not reached."""
    return min(served(m, graph)[1], available - _most_tokens(m, graph, available))


def calibration_stops(m: Manifest, graph: GraphInfo, available: int, samples: int) -> list[Stop]:
    """At most `samples` different places, spread over what the graph will see.

    Prefill, in turn: a padded first chunk, the fullest cache, a full first chunk, a partly filled cache. Decode: early,
    the fullest cache, between. Of a graph that serves from a greater P on, the first is the first that it serves.
    """
    least, most = served(m, graph)[0], reach(m, graph, available)
    if most < least:
        return []
    tokens = _most_tokens(m, graph, available)
    stops = []
    for index in range(samples):
        if graph.role == "decode":
            turn, kind = divmod(index, 3)
            turns = -(-samples // 3)
            early = least + max(most - least, 4) * turn // (4 * turns) + (least == 0)
            between = least + (most - least) * (turn + 1) // (turns + 1)
            stops.append(Stop(graph, min((early, most, between)[kind], most), 1))
            continue
        turn, kind = divmod(index, 4)
        turns = -(-samples // 4)
        if kind == 0:
            stops.append(Stop(graph, least, max(1, tokens - 1 - (tokens - 1) * turn // turns)))
        else:
            between = least + (most - least) * (turn + 1) // (turns + 1)
            stops.append(Stop(graph, (least, most, least, between)[kind], tokens))
    return stops


def golden_stops(m: Manifest, graph: GraphInfo, available: int) -> list[Stop]:
    """Prefill: a padded first chunk, a full chunk, the fullest cache. Decode: three steps in sequence."""
    (least, hold), most = served(m, graph), reach(m, graph, available)
    if most < least:
        return []
    middle, tokens = (least + most + 1) // 2, _most_tokens(m, graph, available)
    if graph.role == "decode":
        first = max(least, min(middle, hold - GOLDEN_RUNS + 1))
        return [Stop(graph, at, 1, at - first) for at in range(first, min(first + GOLDEN_RUNS, hold + 1))]
    places = dict.fromkeys(
        [(least, max(1, tokens * 2 // 3)), (middle, tokens), (most, tokens)]
    )  # a short text has fewer
    return [Stop(graph, position, real, number) for number, (position, real) in enumerate(places)]


def journeys(stops: Sequence[Stop]) -> list[list[Stop]]:
    """The stops divided among sequences, each of which passes its own in order; the least advanced goes on."""
    made: list[list[Stop]] = []
    ends: list[tuple[int, int]] = []  # a heap: P after the last stop of a sequence, and its index
    for stop in sorted(stops, key=lambda stop: stop.position):
        index = heapq.heappop(ends)[1] if ends and ends[0][0] <= stop.position else len(made)
        if index == len(made):
            made.append([])
        made[index].append(stop)
        heapq.heappush(ends, (stop.end, index))
    return made


def record(
    loaded: LoadedBundle, tap: Tap, corpus: Corpus, stops: Sequence[Stop], keep: Callable[[Recorded], None]
) -> int:
    """Run the chunk loop past every stop; the number of runs. keep: is given each, one at a time, graph by graph.

    loaded: whose backend is the tap. A run that the text has given already is left out. Raises NonFiniteLogits when
    a graph gives a number that is not finite.
    """
    of_graph: dict[str, list[Stop]] = {}
    for stop in stops:
        of_graph.setdefault(stop.graph.file, []).append(stop)
    return sum(_record_one(loaded, tap, corpus, some, keep) for some in of_graph.values())


def _record_one(
    loaded: LoadedBundle, tap: Tap, corpus: Corpus, stops: Sequence[Stop], keep: Callable[[Recorded], None]
) -> int:
    """`record` for stops of one graph."""
    seen: set[tuple[int, int, int]] = set()
    session = Session(loaded, chunk_sizes=[_chunk(loaded.manifest, stops[0].graph)])
    planned = journeys(stops)
    for index, journey in enumerate(planned):
        start = corpus.start(journey[-1].end, index, len(planned))
        for run in _travel(session, tap, corpus, journey, start):
            key = (start, run.stop.position, run.stop.tokens)
            if key not in seen:
                seen.add(key)
                keep(run)
    return len(seen)


def _travel(session: Session, tap: Tap, corpus: Corpus, journey: Sequence[Stop], start: int) -> Iterator[Recorded]:
    ids = corpus.take(start, journey[-1].end)
    session.reset()
    logits: Array | None = None
    for stop in journey:
        while session.position < stop.position:
            logits = _turn(session, ids, stop)
        if len(ids) < stop.end:  # where the text has ended, what the model says itself
            assert stop.tokens == 1
            assert logits is not None
            ids.append(int(np.argmax(logits)))
        taken = ids[stop.position : stop.end]
        tap.kept = []
        try:
            logits = session.decode(taken[0]) if stop.graph.role == "decode" else session.prefill(taken)
            ran = tap.kept
        finally:
            tap.kept = None
        assert ran[0][0].file == stop.graph.file
        ((inputs, outputs),) = [run[1:] for run in ran if run[0].file == stop.wanted.file]
        yield Recorded(stop, start, tuple(taken), inputs, outputs)


def _turn(session: Session, ids: Sequence[int], stop: Stop) -> Array:
    """One turn on the way to a stop; its last logits. No run sees more slots than the stop's graph: other layouts than
    bskd are laid out for the longest run so far. So prefill runs begin at P <= C' - c, later tokens are decoded.
    """
    m, at = session.manifest, session.position
    last = stop.graph.kv_len - _chunk(m, stop.graph)
    if at > last:
        return session.decode(ids[at])
    end = stop.position if at == last else min(stop.position, last)
    return session.prefill(ids[at : min(end, at + m.max_lm_input_len)])


def _chunk(m: Manifest, graph: GraphInfo) -> int:
    """Rows of the prefill runs before a run of the graph: for a decode step the most that it can see."""
    if graph.role == "prefill":
        return graph.rows
    return max((rows for rows in m.prefill_rows if rows <= graph.kv_len), default=m.prefill_rows[0])


def _most_tokens(m: Manifest, graph: GraphInfo, available: int) -> int:
    """Real tokens of a run as full as it gets; a decode step needs none of the text, see `_travel`."""
    return 0 if graph.role == "decode" else min(graph.rows, m.max_lm_input_len, available)


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in arrays.items()}
