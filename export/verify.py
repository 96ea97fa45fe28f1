"""The ladder: proof on the files of a bundle, rung by rung, against transformers' own model.

    transformers -> torch decoder -> graph as traced -> graph in the bundle -> bundle through the runtime

Every rung takes the same prompts, chunked, and the same tokens after them. Logits are compared with transformers'
after the prompt and after each token; new keys and values layer by layer with transformers' own cache, so that a
break is found where it begins. Two more rungs: past C under `roll` against the mask oracle of the contract, and an
audit of what the session feeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollkv.export.artefact import graph_fault, manifest_fault, options_of, stored_weights, weight_fault
from rollkv.export.prompts import SEED, proof_ids, proof_prompts
from rollkv.export.reference import (
    LiteralHost,
    Reference,
    TorchBackend,
    Trail,
    WeightlessBackend,
    oracle_visible,
    tokens_first,
)
from rollkv.export.trace import trace_graphs
from rollkv.models.checkpoint import Checkpoint
from rollkv.runtime.backend import Array, Backend, OrtBackend, available_threads
from rollkv.runtime.bundle import SLOT_AXES, Bundle, GraphInfo, Manifest
from rollkv.runtime.cover import plan_runs
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
    first_layer: int | None = None  # that breaks its bound
    fault: str | None = None  # what is wrong, None when all holds
    skipped: str | None = None  # why nothing was run

    @property
    def holds(self) -> bool:
        """Whether every bound holds."""
        return self.fault is None


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
        """For JSON, where a number that is not finite is null."""
        rows = [
            {key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in row.items()}
            for row in map(dataclasses.asdict, self.rows)
        ]
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
    prompts = proof_prompts(bundle)
    try:
        expected = [reference.greedy(ids, min(STEPS, m.max_kvcache_len - len(ids))) for ids in prompts]
    except Exception as error:  # transformers raises many kinds
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ReferenceMismatch(f"{checkpoint.path}: transformers cannot run this model: {said}") from error
    bound = BOUND_TINY if sum(int(np.prod(w.shape)) for w in checkpoint.weights) < TINY else BOUND

    def judge(rung: str, follow: Callable[[Sequence[int], Sequence[int]], Trail]) -> None:
        for ids, (wanted, tokens) in zip(prompts, expected, strict=True):
            report.rows.append(compare(rung, len(ids), wanted, follow(ids, tokens), bound))

    progress("torch decoder")
    judge("torch", LiteralHost(bundle, TorchBackend(checkpoint, options_of(m))).follow)
    progress("graphs as traced")
    judge("traced", LiteralHost(bundle, _traced_backend(bundle, checkpoint)).follow)
    progress("graphs of the bundle")
    engine = OrtBackend(bundle)
    judge("graph", LiteralHost(bundle, engine).follow)
    progress("bundle through the runtime")
    session = Session(bundle, backend=engine)
    judge("runtime", lambda ids, tokens: follow_session(session, ids, tokens))
    progress("past C under roll")
    report.rows += roll_rows(session, reference, bound)
    progress("what the session feeds")
    some = (1, m.chunk_size + 1, m.max_lm_input_len)
    report.rows += feed_rows(bundle, engine, [ids for ids in prompts if len(ids) in some])
    return report


def compare(rung: str, n: int, wanted: Trail, got: Trail, bound: float) -> Row:
    """One row: logits and argmax of every step, keys and values of every layer."""
    max_abs = relative = 0.0
    same = near = 0
    for a, b in zip(wanted.logits, got.logits, strict=True):
        largest, error = float(np.abs(a).max()), float(np.abs(a - b).max())
        max_abs, relative = _worst(max_abs, error), _worst(relative, error / largest)
        if a.argmax() == b.argmax():
            same += 1
        elif a.max() - a[b.argmax()] < bound * largest:
            near += 1
    kv, first = 0.0, None
    for layer in wanted.keys:
        pairs = ((wanted.keys, got.keys), (wanted.values, got.values))
        error = _worst(*(_relative(a[layer], b[layer]) for a, b in pairs))
        kv = _worst(kv, error)
        if first is None and not error <= BOUND_KV:
            first = (layer, error)
    steps = len(wanted.logits)
    fault = None
    if first is not None:
        layer, error = first
        fault = f"new keys or values of layer {layer} are off by {error:.1e} of their largest (bound {BOUND_KV:.0e})"
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


def _relative(wanted: Array, got: Array) -> float:
    """Largest difference over the largest of wanted; the tail, as transformers keeps a sliding layer's window only."""
    tail = min(len(wanted), len(got))
    return float(np.abs(wanted[-tail:] - got[-tail:]).max() / np.abs(wanted).max())


def _worst(*errors: float) -> float:
    """The largest; NaN when one is, so that no bound holds."""
    return float("nan") if any(np.isnan(errors)) else max(errors)


def follow_session(session: Session, ids: Sequence[int], tokens: Sequence[int]) -> Trail:
    """A prompt and the given tokens through the session; keys and values are read out of its cache at the end."""
    session.reset()
    trail = Trail([session.prefill(ids)])
    trail.logits += [session.decode(token) for token in tokens]
    m = session.manifest
    decode = next(graph for graph in m.graphs if graph.role == "decode")
    feeds = session.feeds(decode, plan_runs(1, session.position, 1, m.max_kvcache_len)[0], [0])
    for value in decode.inputs:
        if value.role in ("past_key", "past_value"):
            assert value.layer is not None
            kv_len = m.layers[value.layer].kv_len
            axis = SLOT_AXES[m.kv_layout][value.role == "past_value"]
            pile = trail.keys if value.role == "past_key" else trail.values
            slots = tokens_first(feeds[value.name], m.kv_layout, axis)
            pile[value.layer] = slots[kv_len - min(session.position, kv_len) :]
    return trail


def roll_rows(session: Session, reference: Reference, bound: float) -> list[Row]:
    """A prompt longer than C, then decode, under `roll`: the mask oracle in one full pass of the reference."""
    m = session.manifest
    c, slots = m.chunk_size, m.max_kvcache_len
    total = min(slots + c + 1 + STEPS, m.max_position)
    if total <= slots:
        return [Row(rung="roll", n=total, skipped="C is all the positions of the model, nothing can be forgotten")]
    steps = min(STEPS, total - 1)
    n = total - steps
    ids = proof_ids(session.bundle, total, start=0)
    runs = [run.rows - run.pads for run in plan_runs(n, 0, c, slots)] + [1] * steps
    wanted = reference.masked(ids, oracle_visible(runs, slots), steps + 1)
    session.reset()
    got = [session.prefill(ids[:n], on_limit="roll")]
    got += [session.decode(token, on_limit="roll") for token in ids[n:]]
    return [compare("roll", n, Trail(wanted), Trail(got), bound)]


class RecordingBackend:
    """Keeps copies of the last feeds of each graph and of what came out, and hands the run on."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.runs: list[tuple[GraphInfo, dict[str, Array], dict[str, Array]]] = []

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run."""
        copies = {name: np.array(array) for name, array in feeds.items()}
        outputs = self._inner.run(graph, feeds)
        self.runs.append((graph, copies, {name: np.array(array) for name, array in outputs.items()}))
        return outputs


def feed_rows(bundle: Bundle, engine: Backend, prompts: Sequence[Sequence[int]]) -> list[Row]:
    """Positions and masks of every run against the contract's words; hidden slots do not matter to the last bit."""
    m = bundle.manifest
    rows = []
    for ids in prompts:
        recorder = RecordingBackend(engine)
        session = Session(bundle, backend=recorder)
        session.prefill(ids)
        if session.room():
            session.decode(0)
        fault, past = None, 0
        for graph, feeds, outputs in recorder.runs:
            pads = -len(ids) % m.chunk_size if past == 0 and graph.role == "prefill" else 0
            fault = (
                fault or _check_feeds(m, graph, feeds, past, pads) or _check_hidden(engine, m, graph, feeds, outputs)
            )
            past += graph.rows - pads
        rows.append(Row(rung="feeds", n=len(ids), fault=fault))
    return rows


def _check_feeds(m: Manifest, graph: GraphInfo, feeds: Mapping[str, Array], past: int, pads: int) -> str | None:
    """Each row of the run, slot by slot, from the rule in section 2 of docs/contract.md."""
    c = graph.rows
    positions = np.array([0] * pads + list(range(past, past + c - pads)))
    for value in graph.inputs:
        fed = feeds[value.name]
        if value.role == "position_ids" and not np.array_equal(fed, np.broadcast_to(positions, fed.shape)):
            return f"run at P = {past}: positions {fed[0][:8]}... are not {positions[:8]}..."
        if value.role in ("embeds", "per_layer_inputs") and np.any(fed[0, :pads]):
            return f"run at P = {past}: {value.name} of the pads are not zero"
        if not value.role.endswith("attention_mask"):
            continue
        slots = value.shape[-1]
        window = next((x.window for x in m.layers if x.window), None) if value.role.startswith("sliding") else None
        j = np.arange(slots)
        # position that each slot holds: cached, pad (none), or of this run
        holds = np.where(j < slots - c, past - (slots - c) + j, past + j - (slots - c) - pads)
        holds = np.where((j >= slots - c) & (j < slots - c + pads), -1, holds)
        q = np.where(np.arange(c) < pads, -1, positions)[:, None]
        seen = (q >= 0) & (holds >= 0) & (holds <= q) & (True if window is None else q - holds < window)
        if not np.array_equal(fed[0, 0], np.where(seen, 0.0, m.mask_value).astype(fed.dtype)):
            row = int(np.flatnonzero((fed[0, 0] != np.where(seen, 0.0, m.mask_value)).any(1))[0])
            return f"run at P = {past}: row {row} of {value.name} is not what the contract says"
    return None


def _check_hidden(
    engine: Backend, m: Manifest, graph: GraphInfo, feeds: Mapping[str, Array], outputs: Mapping[str, Array]
) -> str | None:
    """Fill slots that no row sees with values of +-1e4 and other keys: the last row's logits stay as they were."""
    for name, array in outputs.items():
        if not np.isfinite(array).all():
            return f"output {name} is not finite"
    draw = np.random.default_rng(SEED)
    changed = dict(feeds)
    masks = {v.role: feeds[v.name][0, 0] for v in graph.inputs if v.role.endswith("attention_mask")}
    for value in graph.inputs:
        if value.role not in ("past_key", "past_value"):
            continue
        array = np.array(feeds[value.name])
        axis = SLOT_AXES[m.kv_layout][value.role == "past_value"]
        assert value.layer is not None
        mask = masks["attention_mask" if m.layers[value.layer].window is None else "sliding_attention_mask"]
        # past slot j + c is the run's slot j; the first c are dropped by the graph
        hidden = np.concatenate((np.ones(graph.rows, bool), (mask < 0).all(0)[: value.shape[axis] - graph.rows]))
        view = np.moveaxis(array, axis, 0)
        noise = draw.standard_normal(view[hidden].shape)
        view[hidden] = np.sign(noise) * 1e4 if value.role == "past_value" else noise * (np.abs(view).max() or 1.0)
        changed[value.name] = array
    same = np.array_equal(outputs["logits"][0, -1], engine.run(graph, changed)["logits"][0, -1])
    return None if same else "the logits change with what lies in hidden slots"


def _traced_backend(bundle: Bundle, checkpoint: Checkpoint) -> WeightlessBackend:
    """The graphs before the passes, traced again, with the bundle's own weights."""
    infos = bundle.manifest.graphs
    graphs = trace_graphs(checkpoint.config, options_of(bundle.manifest), [info.rows for info in infos])
    for info, graph in zip(infos, graphs, strict=True):
        graph.ir_version = info.ir_version
    files = dict(zip((info.file for info in infos), graphs, strict=True))
    return WeightlessBackend(files, stored_weights(bundle), available_threads())
