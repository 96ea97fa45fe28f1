"""The ladder: proof on the files of a bundle, rung by rung, against transformers' own model.

    transformers -> torch decoder -> graph as traced -> graph in the bundle -> bundle through the runtime

Every rung takes the same prompts, chunked, and the same tokens after them; a bundle of several chunk sizes is proved
with each of them, on prompts that suit it, and through the runtime with all of them together. Logits are compared with
transformers' after the prompt and after each token; new keys and values layer by layer with transformers' own cache,
so that a break is found where it begins. More rungs: every row of a graph that gives the logits of all, past C under
`roll` against the mask oracle of the contract, and an audit of what the session feeds.
A float16 bundle is judged by `verify_float16.py`, over the tokens of a text as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rollkv.export.artefact import graph_fault, manifest_fault, stored_weights, weight_fault
from rollkv.export.feeds import RecordingBackend, feed_fault
from rollkv.export.prompts import proof_ids, proof_prompts
from rollkv.export.reference import (
    LiteralHost,
    Reference,
    Trail,
    oracle_visible,
    tokens_first,
)
from rollkv.export.reference_backends import TorchBackend, WeightlessBackend
from rollkv.export.signature import options_of
from rollkv.export.trace import trace_graphs
from rollkv.export.verify_float16 import diverge, in_float32, joined, kv_bound, texts, widened
from rollkv.models.checkpoint import Checkpoint
from rollkv.runtime.backend import Array, Backend, OrtBackend, available_threads
from rollkv.runtime.bundle import SLOT_AXES, Bundle, Manifest
from rollkv.runtime.cover import Run, plan_runs
from rollkv.runtime.session import Session

STEPS = 6  # tokens decoded after each prompt
TINY = 10_000_000  # parameters; float32 noise is larger beside small logits
BOUND, BOUND_TINY = 3e-5, 1e-4  # max abs difference of logits over max |logit|
BOUND_KV = 1e-3  # of a layer's keys or values over their largest; says where a break begins


class ReferenceMismatch(ValueError):
    """A reference that does not belong to the bundle."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: a prompt of n tokens on one rung."""

    rung: str
    n: int = 0  # 0: no prompt is run
    max_abs: float = 0.0  # of the logits' difference
    relative: float = 0.0  # the worst step's difference over its max |logit|
    bound: float = 0.0  # on `relative`
    top1: int = 0  # steps of `steps` with the reference's argmax
    steps: int = 0
    near_ties: int = 0  # steps whose argmax differs while the reference's two best lie within the bound
    kv_relative: float = 0.0  # largest difference of a layer's new keys or values over their largest
    kl: float | None = None  # mean KL(reference || bundle) in nats, where that is judged, and `bound` is on it
    first_layer: int | None = None  # that breaks its bound
    fault: str | None = None  # what is wrong, None when all holds
    skipped: str | None = None  # why nothing was run

    @property
    def holds(self) -> bool:
        """Whether every bound holds."""
        return self.fault is None


Judge = Callable[[str, int, Trail, Trail], Row]


@dataclass
class Report:
    """All rows; `fault` names the first place that diverges."""

    bundle: str
    source: str
    rows: list[Row] = field(default_factory=list)

    @property
    def fault(self) -> str | None:
        """The first row that breaks a bound, in words."""
        row = next((row for row in self.rows if row.fault), None)
        if row is None:
            return None
        return f"rung {row.rung}, " + (f"prompt of {row.n}: " if row.n else "") + str(row.fault)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, where a number that is not finite is null. top1_share: of the steps; null where there are none."""
        rows = [
            {key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in row.items()}
            for row in map(dataclasses.asdict, self.rows)
        ]
        for row in rows:
            row["top1_share"] = row["top1"] / row["steps"] if row["steps"] else None
        return {
            "bundle": self.bundle,
            "source": self.source,
            "ok": self.fault is None,
            "fault": self.fault,
            "rows": rows,
        }


def verify_bundle(bundle: Bundle, checkpoint: Checkpoint, progress: Callable[[str], None]) -> Report:
    """Climb the ladder. progress: is told of each rung before it starts.

    Raises BundleError when a file is not what the manifest says, ReferenceMismatch when the checkpoint is not the one
    that the bundle was made from.
    """
    m = bundle.manifest
    if checkpoint.sha256() != m.source.sha256:
        raise ReferenceMismatch(
            f"{checkpoint.path}: not the checkpoint of this bundle, which was made from {m.source.id!r} (sha256 "
            f"{m.source.sha256[:12]}...); pass that one with --reference, or the --lora folder that belongs to it"
        )
    report = Report(str(bundle.path), m.source.id)
    progress("manifest, graph files, weights, hashes")
    bundle.check()
    faults = (manifest_fault(bundle, checkpoint), graph_fault(bundle), weight_fault(bundle, checkpoint))
    report.rows.append(Row(rung="files", fault=next((fault for fault in faults if fault), None)))
    if report.fault:
        return report  # what runs would not be what the manifest says
    progress("transformers, the reference")
    if checkpoint.path.is_file():
        progress(
            "settings of a GGUF file are read by rollkv for both sides (docs/export.md), its weights by transformers"
        )
    reference = Reference(checkpoint, m.max_kvcache_len)
    sizes = m.prefill_rows
    lengths = [(c, kv_len) for c in sizes for kv_len in reversed(m.kv_lens)]
    prompts = {c: proof_prompts(bundle, c) for c in sizes}
    every = {len(ids): ids for c in sizes for ids in prompts[c]}
    mixed = min(sum(sizes) + 1, m.max_lm_input_len)  # takes a run of every size, where it is not cut
    every.setdefault(mixed, proof_ids(bundle, mixed, start=mixed))
    try:
        expected = {n: reference.greedy(ids, min(STEPS, m.max_kvcache_len - n)) for n, ids in sorted(every.items())}
    except Exception as error:  # transformers raises many kinds
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ReferenceMismatch(f"{checkpoint.path}: transformers cannot run this model: {said}") from error
    bound = BOUND_TINY if sum(int(np.prod(w.shape)) for w in checkpoint.weights) < TINY else BOUND
    half = m.dtype == "float16"
    exact: Judge = partial(compare, bound=bound)
    by_law: Judge = compare_float16 if half else exact
    lower = widened(bundle) if half else bundle

    def judge(
        rung: str,
        taken: Iterable[Sequence[int]],
        follow: Callable[[Sequence[int], Sequence[int]], Trail],
        law: Judge = by_law,
    ) -> None:
        for ids in taken:
            wanted, tokens = expected[len(ids)]
            report.rows.append(law(rung, len(ids), wanted, follow(ids, tokens)))

    progress("torch decoder")
    decoder = TorchBackend(checkpoint, options_of(m))
    for c, kv_len in lengths:
        judge(_rung("torch", m, c, kv_len), prompts[c], LiteralHost(lower, decoder, c, kv_len).follow, exact)
    progress("graphs as traced")
    traced = _traced_backend(bundle, checkpoint)
    for c, kv_len in lengths:
        judge(_rung("traced", m, c, kv_len), prompts[c], LiteralHost(lower, traced, c, kv_len).follow)
    progress("graphs of the bundle")
    engine = OrtBackend(bundle)
    for c, kv_len in lengths:
        judge(_rung("graph", m, c, kv_len), prompts[c], LiteralHost(bundle, engine, c, kv_len).follow)
    for c in (graph.rows for graph in m.graphs if graph.role == "prefill" and graph.head == "all"):
        host = LiteralHost(bundle, engine, c)
        for ids in prompts[c]:
            if len(ids) <= 2 * c + 1:  # one run and several; logits of all rows of a long prompt would fill the memory
                wanted, got = Trail(reference.rows(ids)), Trail(host.rows(ids))
                report.rows.append(by_law(_rung("rows", m, c), len(ids), wanted, got))
    progress("bundle through the runtime")
    for c in sizes:
        judge(_rung("runtime", m, c), prompts[c], partial(follow_session, _session(bundle, engine, c)))
    if len(sizes) > 1:
        judge("runtime", every.values(), partial(follow_session, _session(bundle, engine, None)))
    if half:
        progress("a text, token by token")
        for c in sizes:
            report.rows += text_rows(bundle, engine, c, reference)
    progress("past C under roll")
    for c in sizes:
        report.rows.append(roll_row(_session(bundle, engine, c), c, reference, by_law))
    progress("what the session feeds")
    for c in sizes:
        longest = m.max_lm_input_len if c == m.chunk_size else 4 * c + 1  # a recording of many runs fills the memory
        some = [ids for ids in prompts[c] if len(ids) in (1, c + 1, longest)]
        report.rows += feed_rows(_rung("feeds", m, c), bundle, engine, c, some)
    if len(sizes) > 1:
        report.rows += feed_rows("feeds", bundle, engine, None, [every[mixed]])
    return report


def _rung(name: str, m: Manifest, c: int, kv_len: int | None = None) -> str:
    """A rung's name, with the rows of the prefill graph where there are several, and a visible length below C."""
    size = "" if len(m.prefill_rows) == 1 else f" c={c}"
    return name + size + ("" if kv_len in (None, m.max_kvcache_len) else f" k={kv_len}")


def _session(bundle: Bundle, backend: Backend, c: int | None) -> Session:
    """A session that runs the prefill graph of c rows alone; None: any of them."""
    several: dict[str, Any] = {} if c is None or len(bundle.manifest.prefill_rows) == 1 else {"chunk_sizes": (c,)}
    return Session(bundle, backend=backend, **several)


def compare(
    rung: str,
    n: int,
    wanted: Trail,
    got: Trail,
    bound: float,
    bound_kv: Callable[[int], float] = lambda layer: BOUND_KV,
) -> Row:
    """One row: logits and argmax of every step, keys and values of every layer.

    bound: on logits, over the largest. bound_kv: of a layer, on its keys and values over their largest.
    """
    max_abs = relative = 0.0
    same = near = 0
    for a, b in zip(wanted.logits, got.logits, strict=True):
        largest, error = float(np.abs(a).max()), float(np.abs(a - b).max())
        max_abs, relative = _worst(max_abs, error), _worst(relative, _share(error, largest))
        if a.argmax() == b.argmax():
            same += 1
        elif a.max() - a[b.argmax()] < bound * largest:
            near += 1
    kv, first = 0.0, None
    for layer in wanted.keys:
        pairs = ((wanted.keys, got.keys), (wanted.values, got.values))
        error = _worst(*(_relative(a[layer], b[layer]) for a, b in pairs))
        kv = _worst(kv, error)
        if first is None and not error <= bound_kv(layer):
            first = (layer, error)
    steps = len(wanted.logits)
    fault = None
    if first is not None:
        layer, error = first
        fault = (
            f"new keys or values of layer {layer} are off by {error:.1e} of their largest (bound {bound_kv(layer):.0e})"
        )
    elif not relative <= bound:
        fault = f"logits are off by {max_abs:.3g}, {relative:.1e} of the largest (bound {bound:.0e})"
    elif same + near < steps:
        fault = f"argmax differs in {steps - same - near} of {steps} steps"
    return Row(
        rung=rung,
        n=n,
        max_abs=max_abs,
        relative=relative,
        bound=bound,
        top1=same,
        steps=steps,
        near_ties=near,
        kv_relative=kv,
        first_layer=first[0] if first else None,
        fault=fault,
    )


def compare_float16(rung: str, n: int, wanted: Trail, got: Trail) -> Row:
    """One row of a float16 bundle, by the law of `verify_float16.py`; keys and values by its bound."""
    divergence = diverge(wanted.logits, got.logits)
    row = compare(rung, n, wanted, got, float("inf"), kv_bound)
    fault = divergence.fault if row.first_layer is None else row.fault
    return dataclasses.replace(
        row, bound=divergence.bound, near_ties=divergence.near_ties, kl=divergence.kl, fault=fault
    )


def text_rows(bundle: Bundle, engine: Backend, c: int, reference: Reference) -> list[Row]:
    """The graphs under the literal host, and the session, over every token of a text in a float16 bundle."""
    m = bundle.manifest
    taken = texts(bundle, c)
    wanted = joined([Trail(reference.rows([*ids, *rest])[len(ids) - 1 :]) for ids, rest in taken])
    graph, session = LiteralHost(bundle, engine, c).follow, partial(follow_session, _session(bundle, engine, c))
    return [
        compare_float16(_rung(f"{name} text", m, c), len(taken[0][0]), wanted, joined([way(*pair) for pair in taken]))
        for name, way in (("graph", graph), ("runtime", session))
    ]


def _relative(wanted: Array, got: Array) -> float:
    """Largest difference over the largest of wanted; the tail, as transformers keeps a sliding layer's window only."""
    tail = min(len(wanted), len(got))
    return _share(float(np.abs(wanted[-tail:] - got[-tail:]).max()), float(np.abs(wanted).max()))


def _share(error: float, largest: float) -> float:
    """error / largest. Where all that is wanted is zero, as after a token whose embedding is: 0, or infinite."""
    if largest == 0:
        return _worst(0.0, error * np.inf) if error else 0.0
    return error / largest


def _worst(*errors: float) -> float:
    """The largest; NaN when one is, so that no bound holds."""
    return float("nan") if any(np.isnan(errors)) else max(errors)


def follow_session(session: Session, ids: Sequence[int], tokens: Sequence[int]) -> Trail:
    """A prompt and the given tokens through the session; keys and values are read out of its cache at the end."""
    session.reset()
    trail = Trail([session.prefill(ids)])
    trail.logits += [session.decode(token) for token in tokens]
    m = session.manifest
    decode = session.loaded.decode
    feeds = session.feeds(decode, Run(1, 0), [0])
    for value in decode.inputs:
        if value.role in ("past_key", "past_value"):
            assert value.layer is not None
            kv_len = m.layers[value.layer].kv_len
            axis = SLOT_AXES[m.kv_layout][value.role == "past_value"]
            pile = trail.keys if value.role == "past_key" else trail.values
            slots = tokens_first(feeds[value.name], m.kv_layout, axis)
            pile[value.layer] = slots[kv_len - min(session.position, kv_len) :]
    return trail


def roll_row(session: Session, c: int, reference: Reference, law: Judge) -> Row:
    """A prompt longer than C, then decode, under `roll`: the mask oracle in one full pass of the reference.

    session: one whose prefill runs have c rows.
    """
    m = session.manifest
    rung, slots = _rung("roll", m, c), m.max_kvcache_len
    total = min(slots + c + 1 + STEPS, m.max_position)
    if total <= slots:
        return Row(rung=rung, n=total, skipped="C is all the positions of the model, nothing can be forgotten")
    steps = min(STEPS, total - 1)
    n = total - steps
    ids = proof_ids(session.bundle, total, start=0)
    runs = [run.rows - run.pads for run in plan_runs(n, 0, c, slots)] + [1] * steps
    wanted = reference.masked(ids, oracle_visible(runs, slots), steps + 1)
    session.reset()
    got = [session.prefill(ids[:n], on_limit="roll")]
    got += [session.decode(token, on_limit="roll") for token in ids[n:]]
    return law(rung, n, Trail(wanted), Trail(got))


def feed_rows(rung: str, bundle: Bundle, engine: Backend, c: int | None, prompts: Iterable[Sequence[int]]) -> list[Row]:
    """Positions and masks of every run against the contract's words; hidden slots do not matter to the last bit."""
    rows = []
    for ids in prompts:
        recorder = RecordingBackend(engine)
        rows.append(Row(rung=rung, n=len(ids), fault=feed_fault(_session(bundle, recorder, c), recorder, ids)))
    return rows


def _traced_backend(bundle: Bundle, checkpoint: Checkpoint) -> WeightlessBackend:
    """The graphs before the passes, traced again, with the bundle's own weights."""
    m = bundle.manifest
    infos = [*m.driven, *([] if m.head_graph is None else [m.head_graph])]
    sizes = [info.rows for info in m.driven], [info.kv_len for info in m.driven]
    graphs = trace_graphs(checkpoint.config, options_of(m), *sizes)
    for info, graph in zip(infos, graphs, strict=True):
        graph.ir_version = info.ir_version
    files = dict(zip((info.file for info in infos), graphs, strict=True))
    return WeightlessBackend(files, in_float32(stored_weights(bundle)), available_threads())
