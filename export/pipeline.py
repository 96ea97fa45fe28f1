"""The whole export on one screen: checkpoint -> graphs -> bundle."""

from __future__ import annotations

import importlib.metadata
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from rollkv.export.audit import AuditError, audit_graph
from rollkv.export.passes import passes_for, run_passes
from rollkv.export.signature import ExportOptions, graph_inputs, graph_outputs, kv_pairs, layer_infos
from rollkv.export.tables import Table, graph_weights, host_tables, write_table
from rollkv.export.trace import trace_graphs
from rollkv.export.write import (
    WEIGHTS_FILE,
    Placed,
    bind_weights,
    file_infos,
    place_weights,
    replacing_folder,
    serialize,
    write_file,
    write_manifest,
    write_weights,
)
from rollkv.models.checkpoint import Checkpoint, Weight
from rollkv.models.config import RopeConfig
from rollkv.models.decoder import position_tables, table_shapes
from rollkv.models.rope import inverse_frequencies
from rollkv.runtime.bundle import FORMAT, TABLE_BYTES, GraphInfo, Manifest, RopeInfo, SourceInfo, WeightsInfo, hash_file

T = TypeVar("T")
IR_VERSION = 9
Report = Callable[[str, int, int], None]  # what is done, how much of it, of how much


def export_bundle(checkpoint: Checkpoint, options: ExportOptions, output: Path, report: Report) -> Manifest:
    """Write a bundle of `checkpoint` to the folder `output`, replacing the bundle that is there.

    Raises ExportError or CheckpointError for a wrong setting or checkpoint, PassError and AuditError for a graph that
    is not as it must be, OSError for the disk. Nothing is left behind then.
    """
    config = checkpoint.config
    hashing = _Aside(checkpoint.sha256)
    with replacing_folder(output) as folder:
        tables = {name: table.numpy() for name, table in position_tables(config, options.max_kvcache_len).items()}
        weights, hosted = graph_weights(checkpoint, options), host_tables(checkpoint, options)
        placed = place_weights(weights, tables)
        total = sum(place.length for place in placed.values())
        total += sum(math.prod(table.info.shape) * TABLE_BYTES[table.info.dtype] for table in hosted.values())
        manifest = describe(checkpoint, options, "")
        report("trace", 0, 1)
        with _Writing(folder, total) as writing:
            writing.begin(weights, tables, placed, hosted)
            sizes = [info.rows for info in manifest.graphs], [info.kv_len for info in manifest.graphs]
            traced = trace_graphs(config, options, *sizes)
            for done, (info, graph) in enumerate(zip(manifest.graphs, traced, strict=True)):
                writing.check()
                report(f"passes {Path(info.file).stem}", done, len(traced))
                model = run_passes(graph, passes_for(options.opset, options.simplify))
                model.ir_version = info.ir_version
                write_file(folder / info.file, serialize(bind_weights(model, placed, WEIGHTS_FILE)))
                findings = audit_graph(onnx.load(folder / info.file, load_external_data=False), info)
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


class _Aside(Generic[T]):
    """Work for the other core: hashing and copying let go of Python's lock. Nobody waits for it after a failure."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._done.append(self._work())
        except BaseException as error:
            self._error = error

    def running(self, seconds: float | None) -> bool:
        """Whether it still runs after so long a wait; None: until it ends."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise what it raised until now."""
        if self._error is not None:
            raise self._error

    def result(self) -> T:
        """What it gave. Raises what it raised."""
        self._thread.join()
        self.check()
        return self._done[0]


class _Writing:
    """The weights on their way into the folder while the graphs are made. A failure of either ends both."""

    def __init__(self, folder: Path, total: int) -> None:
        """total: bytes to write."""
        self._folder, self._total, self._written = folder, total, 0
        self._stop = threading.Event()
        self._work: _Aside[dict[str, str]] | None = None

    def begin(
        self,
        weights: Sequence[Weight],
        tables: Mapping[str, NDArray[np.float32]],
        placed: Mapping[str, Placed],
        hosted: Mapping[str, Table],
    ) -> None:
        """See `write_weights` and `write_table`."""

        def work() -> dict[str, str]:
            write_weights(self._folder / WEIGHTS_FILE, weights, tables, placed, self._count)
            for table in hosted.values():
                write_table(self._folder / table.info.file, table, self._count)
            names = [WEIGHTS_FILE, *(table.info.file for table in hosted.values())]
            return {name: hash_file(self._folder / name) for name in names}

        self._work = _Aside(work)

    def check(self) -> None:
        """Raise what the writing raised until now."""
        assert self._work is not None
        self._work.check()

    def finish(self, report: Report) -> dict[str, str]:
        """Wait for the last byte; sha256 of each file. Raises what the writing raised."""
        assert self._work is not None
        while self._work.running(0.1):
            report("weights", self._written, self._total)
        hashes = self._work.result()
        report("weights", self._total, self._total)
        return hashes

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing writes into the folder any more."""
        self._stop.set()
        if self._work is not None:
            self._work.running(None)

    def _count(self, count: int) -> None:
        if self._stop.is_set():
            raise InterruptedError("the export has ended")
        self._written += count


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
            ir_version=IR_VERSION,
            inputs=graph_inputs(config, options, rows, kv_len),
            outputs=graph_outputs(config, options, rows),
        )
        for name, role, rows in (*((f"prefill_c{rows}", "prefill", rows) for rows in prefill), ("decode", "decode", 1))
        for kv_len in reversed(lengths)  # a reader of one length finds that of C first
        if rows <= kv_len
    ]
    tables = {name: table.info for name, table in host_tables(checkpoint, options).items()}
    stored = [*(weight.shape for weight in graph_weights(checkpoint, options)), *table_shapes(config).values()]
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
        dtype="float32",
        mask_value=options.mask_value,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position=config.max_position,
        bos_token_id=None if (config.bos_token_id or 0) >= config.vocab_size else config.bos_token_id,
        eos_token_ids=list(config.eos_token_ids),
        layers=layer_infos(config, options),
        rope={rope.name: _rope_info(rope, options.max_kvcache_len) for rope in config.ropes},
        embedding=tables.get("embedding"),
        per_layer_embedding=tables.get("per_layer_embedding"),
        image_attention=checkpoint.image_attention,
        graphs=graphs,
        kv_pairs=kv_pairs(config),
        weights=WeightsInfo(file=WEIGHTS_FILE, unique_bytes=sum(4 * math.prod(shape) for shape in stored)),
    )


def _rope_info(rope: RopeConfig, slots: int) -> RopeInfo:
    return RopeInfo(
        inv_freq=inverse_frequencies(rope, slots).tolist(),
        rotary_dim=rope.rotary_dim,
        interleaved=False,  # whatever the checkpoint has: rows of its weights are in rotate-half order here
        attention_scaling=rope.attention_scaling,
        sections=list(rope.sections) if rope.sections else None,
        query_scale=list(rope.query_scale) if rope.query_scale else None,
        fixed_for=slots if rope.type in ("dynamic", "longrope") else None,
    )
