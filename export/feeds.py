"""What a session feeds, number by number, against section 2 of docs/contract.md; and that hidden slots change no bit.

Shares no function with the session. c rows of a run, P tokens that went through before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from rollkv.export.host_forms import rotation_fault
from rollkv.export.prompts import SEED
from rollkv.runtime.backend import Array, Backend
from rollkv.runtime.bundle import SLOT_AXES, GraphInfo, Manifest
from rollkv.runtime.session import Session


class RecordingBackend:
    """Keeps copies of the feeds of each run and of what came out, and hands the run on."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.runs: list[tuple[GraphInfo, dict[str, Array], dict[str, Array]]] = []

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run."""
        copies = {name: np.array(array) for name, array in feeds.items()}
        outputs = self.inner.run(graph, feeds)
        self.runs.append((graph, copies, {name: np.array(array) for name, array in outputs.items()}))
        return outputs


def feed_fault(session: Session, recorder: RecordingBackend, ids: Sequence[int]) -> str | None:
    """The first thing that is wrong in the runs of a prompt and of a token after it.

    session: a new one, whose backend is the recorder.
    """
    m = session.manifest
    session.prefill(ids)
    prompt = [run for run in recorder.runs if run[0].role != "head"]
    pads = sum(graph.rows for graph, _, _ in prompt) - len(ids)  # all of them in the first run
    if not 0 <= pads < prompt[0][0].rows:
        return f"the runs of a prompt of {len(ids)} have {pads} rows more, the first of them {prompt[0][0].rows}"
    steps = min(1, session.room())
    if steps:
        session.decode(0)
    if m.head_graph is not None and (fault := _check_head_runs(recorder.runs, len(prompt), steps)):
        return fault
    past = 0
    for graph, feeds, outputs in recorder.runs:
        if graph.role == "head":
            continue
        fault = _check_feeds(m, graph, feeds, past, pads) or _check_hidden(recorder.inner, m, graph, feeds, outputs)
        if fault:
            return fault
        past, pads = past + graph.rows - pads, 0
    return None


def _check_head_runs(
    runs: Sequence[tuple[GraphInfo, dict[str, Array], dict[str, Array]]], prompt: int, steps: int
) -> str | None:
    """The head runs after the last run of the prompt, and after each step, on the hidden state that came out there.

    runs: all, in order. prompt: how many of them took the prompt.
    """
    wanted = [False] * (prompt - 1) + [False, True] * (1 + steps)
    if [graph.role == "head" for graph, _, _ in runs] != wanted:
        return (
            f"the graphs run are {', '.join(graph.file for graph, _, _ in runs)}: the head runs for the last row alone"
        )
    for (graph, _, outputs), (head, feeds, _) in itertools.pairwise(runs):
        if head.role != "head":
            continue
        name = next(value.name for value in graph.outputs if value.role == "hidden_states")
        if not np.array_equal(feeds[head.inputs[0].name], outputs[name]):
            return f"graph {head.file} is fed another hidden state than {graph.file} gave"
    return None


def _check_feeds(m: Manifest, graph: GraphInfo, feeds: Mapping[str, Array], past: int, pads: int) -> str | None:
    """Each row of the run, slot by slot, from the rule in section 2 of docs/contract.md."""
    c = graph.rows
    positions = np.array([0] * pads + list(range(past, past + c - pads)))
    for value in graph.inputs:
        fed = feeds[value.name]
        if value.role == "position_ids" and not np.array_equal(fed, np.broadcast_to(positions, fed.shape)):
            return f"run at P = {past}: positions {fed[0][:8]}... are not {positions[:8]}..."
        if value.rope is not None:
            # of text: three-part positions are alike
            three = np.broadcast_to(positions, (3, c)) if m.three_part else positions
            if fault := rotation_fault(value, m.rope[value.rope], three, fed):
                return f"run at P = {past}: {fault}"
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
    end = next(value for value in graph.outputs if value.role in ("logits", "hidden_states"))
    same = np.array_equal(outputs[end.name][0, -1], engine.run(graph, changed)[end.name][0, -1])
    what = end.name.replace("_", " ")
    return None if same else f"the {what} change with what lies in hidden slots"
