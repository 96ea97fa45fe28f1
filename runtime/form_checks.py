"""What a manifest must satisfy where the graphs leave rotations or the head out: `manifest_checks.py` calls it.

Knows nothing of files but their names, nothing of ONNX. H and V as in the contract, R the rotary dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollkv.runtime.manifest import DTYPES, HEAD_ROLES, ROTATION_ROLES, GraphInfo, Manifest, ValueInfo

Need = Callable[[bool, str], None]  # raises BundleError with the text when the condition does not hold


def check_head(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """A graph gives logits, or with head "none" hidden states, for which the head is elsewhere."""
    found = [value for value in (*graph.inputs, *graph.outputs) if value.role in HEAD_ROLES]
    wanted = "hidden_states" if graph.head == "none" else "logits"
    count = sum(value.role == wanted for value in found)
    need(count == 1, f"graph {graph.file}: {count} values have the role {wanted}, must be one")
    other = next((value for value in found if value.role != wanted), None)
    need(
        other is None,
        f"graph {graph.file}: {other and other.name} has the role {other and other.role}, with head {graph.head} only "
        f"{wanted} is allowed",
    )
    rows, width = graph.rows if graph.head == "all" else 1, m.hidden_size if graph.head == "none" else m.vocab_size
    for value in found:
        said = f"graph {graph.file}: {value.role} has shape {value.shape}, must be {[1, rows, width]}"
        need(value.shape == [1, rows, width], f"{said} with head {graph.head}")


def check_outer_head(m: Manifest, need: Need) -> None:
    """All graphs give logits, and no head is elsewhere; or none does, and it is on the host or in a graph, not both."""
    without = [graph.file for graph in m.driven if graph.head == "none"]
    need(len(without) in (0, len(m.driven)), f"graph {', '.join(without)}: head is none, but other graphs give logits")
    table, bias, cap = m.head_table, m.head_bias, m.logit_softcap
    heads = [graph for graph in m.graphs if graph.role == "head"]
    need(len(heads) <= 1, f"graphs {', '.join(graph.file for graph in heads)} have the role head, must be one or none")
    need(
        table is not None or bool(heads) or not without,
        "head_table is missing, which graphs with head none need where no graph has the role head",
    )
    for graph in heads:
        what = f"graph {graph.file} has the role head"
        need(bool(without), f"{what}, but no graph has head none")
        need(table is None, f"{what}, but head_table is there too; must be either")
        need(bias is None, f"{what}, but head_bias is there too; must be either")
        need(
            m.logit_scale == 1 and cap is None,
            f"{what}, so logit_scale and logit_softcap are in it; must be 1 and null",
        )
        _check_head_graph(m, graph, need)
    for name, info, shape in (
        ("head_table", table, [m.vocab_size, m.hidden_size]),
        ("head_bias", bias, [1, m.vocab_size]),
    ):
        if info is None:
            continue
        need(bool(without), f"{name} is there, but no graph has head none")
        need(info.shape == shape, f"{name}: shape is {info.shape}, must be {shape}")
        need(info.scale == 1, f"{name}: scale is {info.scale}, must be 1; logit_scale scales what comes out")
    with np.errstate(over="ignore", under="ignore"):
        scale, small = np.float32(m.logit_scale), np.float32(1.0 if cap is None else cap)
    need(
        bool(np.isfinite(scale) and scale != 0), f"logit_scale is {m.logit_scale}, must be finite and not 0 as float32"
    )
    need(
        bool(np.isfinite(small) and small > 0),
        f"logit_softcap is {cap}, must be finite and positive as float32, or null",
    )
    need(
        bool(without) or (m.logit_scale == 1 and cap is None),
        "logit_scale or logit_softcap is set, but no graph has head none",
    )


def _check_head_graph(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """One row of hidden states, as the other graphs give them, becomes one row of logits."""
    for name, has, wanted in (("rows", graph.rows, 1), ("kv_len", graph.kv_len, 0), ("head", graph.head, "last")):
        need(has == wanted, f"graph {graph.file}: {name} is {has!r}, must be {wanted!r} in a graph of the role head")
    for values, side, role, width in (
        (graph.inputs, "input", "hidden_states", m.hidden_size),
        (graph.outputs, "output", "logits", m.vocab_size),
    ):
        roles = [value.role for value in values]
        need(roles == [role], f"graph {graph.file}: its {side}s have the roles {roles}, must be {[role]}")
        value, shape = values[0], [1, 1, width]
        what = f"graph {graph.file}: {value.name}"
        need(value.shape == shape, f"{what} has shape {value.shape}, must be {shape}")
        need(
            value.dtype in DTYPES[:2],
            f"{what} has dtype {value.dtype!r}; supported: {', '.join(DTYPES[:2])}",
        )
    need(graph.inputs[0].name != graph.outputs[0].name, f"graph {graph.file}: a name occurs twice")
    taken = graph.inputs[0].dtype
    for other in m.driven:
        given = next((value.dtype for value in other.outputs if value.role == "hidden_states"), taken)
        need(
            given == taken,
            f"graph {graph.file}: {graph.inputs[0].name} has dtype {taken!r}, but graph {other.file} gives {given!r}",
        )


def check_rotations(m: Manifest, graph: GraphInfo, need: Need) -> None:
    """Fed rotations are of ropes that are there, whole, once each, in the shape that the host makes."""
    fed: dict[str, dict[str, ValueInfo]] = {}
    for value in graph.inputs:
        what = f"graph {graph.file}: {value.name}"
        turns = value.role in ROTATION_ROLES
        need(turns or value.rope is None, f"{what} has the rope {value.rope!r}, but the role {value.role}")
        if not turns:
            continue
        names = ", ".join(map(repr, m.rope)) or "none"
        need(value.rope in m.rope, f"{what} has the rope {value.rope!r}, must be a name in rope: {names}")
        assert value.rope is not None
        parts = fed.setdefault(value.rope, {})
        need(value.role not in parts, f"{what} is a second {value.role} of rope {value.rope!r}")
        parts[value.role] = value
        shape = [1, graph.rows, 1 if value.role == "rope_query_scale" else m.rope[value.rope].rotary_dim]
        need(value.shape == shape, f"{what} has shape {value.shape}, must be {shape}")
    for value in graph.outputs:
        need(value.rope is None, f"graph {graph.file}: {value.name} has the rope {value.rope!r}, but is an output")
    for name, parts in fed.items():
        rope = m.rope[name]
        for role in ROTATION_ROLES:
            there = role in parts
            wanted = role != "rope_query_scale" or rope.query_scale is not None
            said = "is missing" if wanted else "is there, but rope has no query_scale"
            need(there == wanted, f"graph {graph.file}: {role} of rope {name!r} {said}")
        need(
            not rope.interleaved, f"graph {graph.file}: rope {name!r} is fed, but interleaved: its halves are not alike"
        )
    turning = {layer.rope for layer in m.layers if layer.rope is not None}
    lacking = sorted(turning - fed.keys())
    need(
        not fed or not lacking,
        f"graph {graph.file}: layers turn by rope {', '.join(map(repr, lacking))}, which is not fed as others are",
    )


def check_rotations_agree(m: Manifest, need: Need) -> None:
    """Every graph takes the same rotations."""
    kinds = [
        (graph.file, sorted((value.role, value.rope or "") for value in graph.inputs if value.role in ROTATION_ROLES))
        for graph in m.driven
    ]
    first, fed = kinds[0]
    for file, other in kinds[1:]:
        need(other == fed, f"graph {file}: rotations are not fed as in {first}")
