"""What a board that computes in float16 will get, emulated in ONNX Runtime on the CPU.

Every floating value of the graph, and every weight, is rounded to float16 where it is made and widened again, so that
each op reads and gives float16 numbers and adds up in float32 inside, as NPUs do. Overflow becomes infinity and is
named. Compared with the same graph in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from rollkv.export.kit.replay import difference
from rollkv.export.ranges import plain_session
from rollkv.export.verify_float16 import Divergence, diverge
from rollkv.runtime.backend import Array, Backend
from rollkv.runtime.bundle import Bundle, GraphInfo
from rollkv.runtime.sampling import NonFiniteLogits
from rollkv.runtime.session import Session


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Float16 against float32. fault: what the emulation ran into, None when nothing."""

    law: Divergence
    cosine: float  # the smallest of a row of logits
    max_abs: float  # the largest difference of a logit
    fault: str | None = None

    @property
    def top1(self) -> float:
        """Share of the rows whose largest logit is the same one; near ties are not excused. 0 without rows."""
        return self.law.top1 / max(1, self.law.positions)


class Float16Backend:
    """Runs the graphs of a bundle with every value rounded to float16."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._sessions: dict[str, object] = {}

    def run(self, graph: GraphInfo, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See Backend.run."""
        if graph.file not in self._sessions:
            model = onnx.load(self._bundle.path / graph.file, load_external_data=False)
            self._sessions[graph.file] = plain_session(self._bundle, rounded(model))
        names = [value.name for value in graph.outputs]
        outputs = self._sessions[graph.file].run(names, dict(feeds))  # type: ignore[attr-defined]
        return dict(zip(names, outputs, strict=True))


def rounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph, computed in float32, with a rounding to float16 behind every input, weight and node, in place.

    A graph in float16 keeps the types of its inputs and outputs.
    """
    graph = model.graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output, *graph.input)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    floats = {name for name, kind in types.items() if kind in (TensorProto.FLOAT, TensorProto.FLOAT16)}
    outputs = {value.name for value in graph.output}
    nodes: list[onnx.NodeProto] = []

    def narrow(name: str, to: str) -> None:
        """float16 and wide again, under the name `to`."""
        nodes.append(helper.make_node("Cast", [name], [f"{name}/f16"], to=TensorProto.FLOAT16))
        nodes.append(helper.make_node("Cast", [f"{name}/f16"], [to], to=TensorProto.FLOAT))

    given = [*(v.name for v in graph.input), *(t.name for t in graph.initializer)]
    renamed = {name: f"{name}/rounded" for name in given if name in floats}
    for name, to in renamed.items():
        narrow(name, to)
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        for attribute in copy.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
        for k, name in enumerate(copy.input):
            copy.input[k] = renamed.get(name, name)
        made = [name for name in node.output if name in floats]
        for k, name in enumerate(copy.output):
            if name in floats:
                copy.output[k] = f"{name}/exact"
        nodes.append(copy)
        for name in made:
            renamed[name] = f"{name}/rounded"
            narrow(f"{name}/exact", renamed[name])
            if name in outputs:
                nodes.append(helper.make_node("Cast", [renamed[name]], [name], to=types[name]))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    return model


def agreement(bundle: Bundle, exact: Backend, other: Backend, ids: Sequence[int], steps: int) -> Agreement:
    """Logits after a prompt and after each of `steps` further ids of it, through the runtime's chunk loop, twice.

    ids: at least steps + 1; all but the last `steps` are the prompt.
    """
    sides: list[list[Array]] = []
    fault = None
    for backend in (exact, other):
        session, rows = Session(bundle, backend=backend), []  # type: Session, list[Array]
        try:
            rows.append(np.array(session.prefill(ids[: len(ids) - steps]), np.float64))
            rows += [np.array(session.decode(token), np.float64) for token in ids[len(ids) - steps :]]
        except NonFiniteLogits as error:
            fault = str(error)
        sides.append(rows)
    pairs = list(zip(*sides, strict=False))
    if not pairs:
        law = Divergence(kl=float("inf"), top1=0, near_ties=0, positions=0)
        return Agreement(law=law, cosine=0.0, max_abs=float("inf"), fault=fault)
    numbers = [difference(a, b) for a, b in pairs]
    return Agreement(
        law=diverge(*zip(*pairs, strict=True)),
        cosine=min(cosine for cosine, _, _ in numbers),
        max_abs=max(largest for _, largest, _ in numbers),
        fault=fault,
    )
