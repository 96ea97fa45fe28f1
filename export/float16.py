"""A typed float32 graph in float16: constants, weights, inputs, outputs and every value between them.

No Cast is put in: the graph computes in float16 from end to end, as an NPU does. Ids, positions and shapes stay whole
numbers. Knows no model; what the weights' values become is in `write.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from rollkv.export.signature import FLOAT16_SMALLEST
from rollkv.models.config import FLOAT16_MAX


def halve_floats(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """Every float32 becomes a float16, rounded to nearest, ties to even.

    Raises ValueError for a constant that float16 does not hold: above 65504, or below its smallest normal number and
    not 0, such as the eps of a norm in the plain form.
    """
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor)
            sizes = np.abs(values[values != 0])
            odd = sizes[(sizes < FLOAT16_SMALLEST) | ~(sizes <= FLOAT16_MAX)]
            if odd.size:
                raise ValueError(
                    f"constant {tensor.name} holds {odd.flat[0]:.6g}, allowed in float16: 0 and "
                    f"{FLOAT16_SMALLEST:.3g} .. {FLOAT16_MAX:.0f}"
                )
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), tensor.name))
    _halve_types(graph.input)
    _halve_types(graph.output)
    _halve_types(graph.value_info)
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    return model, True


def _halve_types(values: Iterable[onnx.ValueInfoProto]) -> None:
    for value in values:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
