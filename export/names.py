"""Names in a graph file as compilers want them, which make identifiers and file names of them: no dots, no slashes.

A parameter of the decoder keeps its name but for the dots, and gets it back by `parameter_name`.
"""

from __future__ import annotations

import onnx

_DOT = "__"  # no parameter's own name has two underscores in a row


def plain_name(name: str) -> str:
    """A name with every dot and slash replaced."""
    return name.replace(".", _DOT).replace("/", _DOT)


def parameter_name(name: str) -> str:
    """The decoder's name of a parameter whose plain name is `name`."""
    return name.replace(_DOT, ".")


def plain_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every name made plain, in place. Inputs and outputs of the graph have plain names already."""
    graph = model.graph
    used = {value.name for value in (*graph.input, *graph.output)}
    renamed: dict[str, str] = {"": "", **{name: name for name in used}}

    def rename(name: str) -> str:
        if name not in renamed:
            new, count = plain_name(name), 0
            while new in used:
                count += 1
                new = f"{plain_name(name)}_{count}"
            used.add(new)
            renamed[name] = new
        return renamed[name]

    for tensor in graph.initializer:  # first, so that they keep their plain names
        tensor.name = rename(tensor.name)
    for node in graph.node:
        node.name = plain_name(node.name)
        for field in (node.input, node.output):
            for k, name in enumerate(field):
                field[k] = rename(name)
    for value in graph.value_info:
        value.name = rename(value.name)
    return model
