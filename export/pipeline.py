"""The whole export on one screen: checkpoint -> graphs -> bundle."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
from onnx.helper import find_min_ir_version_for, make_opsetid

from rollkv.export.audit import AuditError, audit_graph
from rollkv.export.background import Background, WeightsWriter
from rollkv.export.head_graph import head_graphs
from rollkv.export.names import plain_names
from rollkv.export.passes import passes_for, run_passes
from rollkv.export.signature import ExportOptions, graph_inputs, graph_outputs, kv_pairs, layer_infos
from rollkv.export.tables import graph_weights, host_tables, table_bytes, table_files
from rollkv.export.trace import trace_graphs
from rollkv.export.write import (
    WEIGHTS_FILE,
    bind_weights,
    file_infos,
    place_weights,
    replacing_folder,
    serialize,
    write_file,
    write_manifest,
)
from rollkv.models.checkpoint import Checkpoint
from rollkv.models.config import RopeConfig
from rollkv.models.decoder import position_tables, table_shapes
from rollkv.models.rope import inverse_frequencies
from rollkv.runtime.bundle import FORMAT, TABLE_BYTES, GraphInfo, Manifest, RopeInfo, SourceInfo, WeightsInfo

Report = Callable[[str, int, int], None]  # what is done, how much of it, of how much


def export_bundle(checkpoint: Checkpoint, options: ExportOptions, output: Path, report: Report) -> Manifest:
    """Write a bundle of `checkpoint` to the folder `output`, replacing the bundle that is there.

    Raises ExportError or CheckpointError for a wrong setting or checkpoint, PassError and AuditError for a graph that
    is not as it must be, OSError for the disk. Nothing is left behind then.
    """
    config = checkpoint.config
    hashing = Background(checkpoint.sha256)
    hashing.start()
    with replacing_folder(output) as folder:
        looked_up = {} if options.rope == "feed" else position_tables(config, options.max_kvcache_len)
        tables = {name: table.numpy() for name, table in looked_up.items()}
        weights, hosted = graph_weights(checkpoint, options), host_tables(checkpoint, options)
        placed = place_weights(weights, tables, options.dtype)
        total = sum(place.length for place in placed.values())
        total += table_bytes(hosted)
        manifest = describe(checkpoint, options, "")
        report("trace", 0, 1)
        with WeightsWriter(folder, weights, tables, placed, table_files(hosted), total) as writing:
            writing.start()
            driven = manifest.driven
            sizes = [info.rows for info in driven], [info.kv_len for info in driven]
            traced = trace_graphs(config, options, *sizes)
            for done, (info, graph) in enumerate(zip(manifest.graphs, traced, strict=True)):
                writing.check()
                report(f"passes {Path(info.file).stem}", done, len(traced))
                model = run_passes(graph, passes_for(options.opset, options.simplify, options.norm, options.dtype))
                model.ir_version = info.ir_version
                write_file(folder / info.file, serialize(plain_names(bind_weights(model, placed, WEIGHTS_FILE))))
                findings = audit_graph(onnx.load(folder / info.file, load_external_data=False), info, options.norm)
                if findings:
                    raise AuditError(info.file, findings)
            report("passes", len(traced), len(traced))
            hashes = writing.finish(report)
        for name, data in checkpoint.text.items():
            write_file(folder / name, data)
        report("hashes", 0, 1)
        source = replace(manifest.source, sha256=hashing.result())
        manifest = replace(manifest, source=source, files=file_infos(folder, hashes))
        write_manifest(folder, manifest)
        report("hashes", 1, 1)
    return manifest


def describe(checkpoint: Checkpoint, options: ExportOptions, sha256: str | None = None) -> Manifest:
    """The manifest of an export, but for `files`. sha256: of the checkpoint; None: its files are hashed."""
    config = checkpoint.config
    prefill, lengths = options.prefill_rows, options.kv_lens
    several = len(prefill) * len(lengths) > 1  # the names of one prefill graph are plain
    graphs = [
        GraphInfo(
            file=f"{name}_k{kv_len}.onnx" if several else f"{role}.onnx",
            role=role,
            rows=rows,
            kv_len=kv_len,
            head=options.head_of(rows),
            opset=options.opset,
            ir_version=ir_version(options.opset),
            inputs=graph_inputs(config, options, rows, kv_len),
            outputs=graph_outputs(config, options, rows),
        )
        for name, role, rows in (*((f"prefill_c{rows}", "prefill", rows) for rows in prefill), ("decode", "decode", 1))
        for kv_len in reversed(lengths)  # a reader of one length finds that of C first
        if rows <= kv_len
    ]
    graphs += head_graphs(config, options, ir_version(options.opset))
    tables = {name: table.info for name, table in host_tables(checkpoint, options).items()}
    looked_up = {} if options.rope == "feed" else table_shapes(config)
    stored = [*(weight.shape for weight in graph_weights(checkpoint, options)), *looked_up.values()]
    unique = TABLE_BYTES[options.dtype] * sum(math.prod(shape) for shape in stored)
    on_host = options.head == "none"
    return Manifest(
        format=FORMAT,
        rollkv=importlib.metadata.version("rollkv"),
        source=SourceInfo(
            id=checkpoint.id,
            family=checkpoint.model_type,
            sha256=checkpoint.sha256() if sha256 is None else sha256,
            kind=checkpoint.kind,
        ),
        max_lm_input_len=options.max_lm_input_len,
        chunk_size=options.chunk_size,
        chunk_sizes=list(prefill),
        max_kvcache_len=options.max_kvcache_len,
        kv_layout=options.kv_layout,
        decode_attention=options.decode_attention,
        projections=options.projections,
        norm=options.norm,
        gqa=options.gqa,
        target=options.target,
        dtype=options.dtype,
        mask_value=options.mask_value,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position=config.max_position,
        bos_token_id=None if (config.bos_token_id or 0) >= config.vocab_size else config.bos_token_id,
        eos_token_ids=list(config.eos_token_ids),
        layers=layer_infos(config, options),
        rope={rope.name: rope_info(rope, options.max_kvcache_len) for rope in config.ropes},
        embedding=tables.get("embedding"),
        per_layer_embedding=tables.get("per_layer_embedding"),
        head_table=tables.get("head_table"),
        head_bias=tables.get("head_bias"),
        logit_scale=config.logit_scale if on_host else 1.0,
        logit_softcap=config.logit_softcap if on_host else None,
        image_attention=checkpoint.image_attention,
        graphs=graphs,
        kv_pairs=kv_pairs(config),
        weights=WeightsInfo(file=WEIGHTS_FILE, unique_bytes=unique),
    )


def ir_version(opset: int) -> int:
    """The lowest IR version that may hold the opset, from 9 on (ONNX's versioning table)."""
    return max(9, find_min_ir_version_for([make_opsetid("", opset)]))


def rope_info(rope: RopeConfig, slots: int) -> RopeInfo:
    """What the manifest says of a rotary embedding. slots: C."""
    return RopeInfo(
        inv_freq=inverse_frequencies(rope, slots).tolist(),
        rotary_dim=rope.rotary_dim,
        interleaved=False,  # whatever the checkpoint has: rows of its weights are in rotate-half order here
        attention_scaling=rope.attention_scaling,
        sections=list(rope.sections) if rope.sections else None,
        query_scale=list(rope.query_scale) if rope.query_scale else None,
        fixed_for=slots if rope.type in ("dynamic", "longrope") else None,
    )
