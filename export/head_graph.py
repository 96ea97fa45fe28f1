"""The head as a graph of its own, with `--head split`: the hidden state of one row in, its logits out.

Knows no torch and no ONNX. H hidden size, V vocabulary.
"""

from __future__ import annotations

from rollkv.export.signature import ExportOptions
from rollkv.models.config import DecoderConfig
from rollkv.runtime.bundle import GraphInfo, ValueInfo

HEAD_FILE = "head.onnx"


def head_values(config: DecoderConfig, options: ExportOptions) -> tuple[list[ValueInfo], list[ValueInfo]]:
    """Its input, (1, 1, H), which the other graphs give under the same name, and its output, (1, 1, V)."""
    inputs, outputs = (
        [ValueInfo(name=role, shape=[1, 1, width], dtype=options.dtype, role=role)]
        for role, width in (("hidden_states", config.hidden_size), ("logits", config.vocab_size))
    )
    return inputs, outputs


def head_graphs(config: DecoderConfig, options: ExportOptions, ir_version: int) -> list[GraphInfo]:
    """What the manifest says of it; nothing where the export has none."""
    if options.head != "split":
        return []
    inputs, outputs = head_values(config, options)
    return [
        GraphInfo(
            file=HEAD_FILE,
            role="head",
            rows=1,
            kv_len=0,
            head="last",
            opset=options.opset,
            ir_version=ir_version,
            inputs=inputs,
            outputs=outputs,
        )
    ]
