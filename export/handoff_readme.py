"""README.md and README.zh.md of a handoff: its contract in English and in Chinese, with the numbers of this bundle.

Two templates in `handoff_words.py`, filled from the manifest, the profile and handoff.json. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollkv.export.handoff_runs import Recorded
from rollkv.export.handoff_words import CHINESE, ENGLISH, Words
from rollkv.export.targets import Target
from rollkv.runtime.bundle import SLOT_AXES, GraphInfo, Manifest
from rollkv.runtime.manifest import ValueInfo

SHOWN = 12  # ids or positions of the example; more are cut in the middle


def readmes(
    m: Manifest, target: Target, data: Mapping[str, Any], files: Sequence[str], script: str, example: Recorded
) -> dict[str, str]:
    """File name -> text. data: of handoff.json. files: names in the folder. example: a first chunk of a prompt."""
    return {
        name: _readme(words, m, target, data, files, script, example)
        for name, words in (("README.md", ENGLISH), ("README.zh.md", CHINESE))
    }


def _readme(
    words: Words,
    m: Manifest,
    target: Target,
    data: Mapping[str, Any],
    files: Sequence[str],
    script: str,
    example: Recorded,
) -> str:
    graphs = "\n".join(_graph(words, graph, m) for graph in m.graphs)
    axes = SLOT_AXES[m.kv_layout]
    calibration, tolerances = data["calibration"], data["tolerances"]
    prefill, decode = _by_role(m, "prefill"), _by_role(m, "decode")
    roles = {_role(value, m) for graph in m.graphs for value in (*graph.inputs, *graph.outputs)}
    head = None if m.head_graph is None else m.head_graph.file
    parts = [text.format(head=head) for role, text in words.host_parts.items() if role in roles]
    host = [f"{number}. {text}" for number, text in enumerate(parts, 10)]
    several = [words.several_graphs] if len(m.driven) > 2 else []
    windows = sorted({layer.window for layer in m.layers if layer.window is not None})
    return words.page.format(
        model=m.source.id,
        target=target.name,
        title=target.title,
        tool=target.tool or words.no_tool,
        precision=target.precision,
        L=m.max_lm_input_len,
        c=m.chunk_size,
        C=m.max_kvcache_len,
        last=m.max_kvcache_len - m.chunk_size,
        layout=m.kv_layout,
        dtype=m.dtype,
        mask_value=f"{m.mask_value:g}",
        vocab=m.vocab_size,
        positions=m.max_position,
        layers=len(m.layers),
        bos=m.bos_token_id,
        eos=", ".join(map(str, m.eos_token_ids)) or "-",
        pairs=len(m.kv_pairs),
        files=_files(words, files),
        graphs=graphs,
        prefill=", ".join(f"`{g.file}`" for g in prefill),
        decode=", ".join(f"`{g.file}`" for g in decode),
        third="" if head is None else words.third.format(head=head),
        key_axis=axes[0],
        value_axis=axes[1],
        several="".join(f"\n{line}" for line in several),
        window="".join("\n" + words.window.format(W=window) for window in windows),
        host="".join(f"\n{line}" for line in host),
        example=_example(words, m, example),
        calibration=words.calibrations[calibration["format"]],
        format=calibration["format"],
        samples="\n".join(
            f"- `{graph['path']}`: {graph['samples']}" + (f", `{graph['list']}`" if graph["list"] else "")
            for graph in calibration["graphs"].values()
        ),
        golden="\n".join(
            f"- `{run['path']}`: {name}, P = {run['past']}, p = {run['pads']}"
            for name, runs in data["golden_runs"].items()
            for run in runs
        ),
        golden_by=data["golden_by"],
        cosine=tolerances["cosine"],
        relative=f"{tolerances['relative']:.3g}",
        script=script,
        notes="\n".join(f"- {note.text} ({note.source})" for note in target.notes) or "-",
    )


def _by_role(m: Manifest, role: str) -> list[GraphInfo]:
    return [graph for graph in m.graphs if graph.role == role]


def _files(words: Words, files: Sequence[str]) -> str:
    return "\n".join(
        f"| `{name}` | {words.files.get(name, words.file_kinds.get(Path(name).suffix, ''))} |" for name in files
    )


def _role(value: ValueInfo, m: Manifest) -> str:
    """The key of a value's words: what takes hidden states is not the same in every bundle."""
    return f"split_{value.role}" if value.role == "hidden_states" and m.head_graph is not None else value.role


def _graph(words: Words, graph: GraphInfo, m: Manifest) -> str:
    heading = words.head if graph.role == "head" else words.graph
    head = heading.format(file=graph.file, rows=graph.rows, kv_len=graph.kv_len, opset=graph.opset)
    return "\n".join(
        [
            head,
            "",
            *_table(words, words.inputs, graph.inputs, m),
            "",
            *_table(words, words.outputs, graph.outputs, m),
            "",
        ]
    )


def _table(words: Words, title: str, values: Sequence[ValueInfo], m: Manifest) -> list[str]:
    lines = [f"| {title} | {words.shape} | {words.type} | {words.meaning} |", "|---|---|---|---|"]
    for value in values:
        meaning = words.roles.get(_role(value, m), value.role)
        meaning = meaning.format(layer=value.layer, head=m.head_graph and m.head_graph.file)
        lines.append(f"| `{value.name}` | {tuple(value.shape)} | {value.dtype} | {meaning} |")
    return lines


def _example(words: Words, m: Manifest, run: Recorded) -> str:
    """A first chunk, row by row in words: what is fed for how many tokens."""
    graph, pads, real = run.stop.graph, run.pads, len(run.ids)
    lines = [words.example.format(file=graph.file, real=real, rows=graph.rows, pads=pads)]
    lines.append(f"    {words.tokens}: {_row(run.ids)}")
    for value in graph.inputs:
        if value.name not in run.inputs or value.layer is not None:
            continue
        array = run.inputs[value.name]
        if value.role in ("ids", "position_ids"):
            lines.append(f"    {value.name}: {_row(array.reshape(-1, graph.rows)[0].tolist())}")
        elif value.role.endswith("attention_mask"):
            mask = array[0, 0]
            lines += [
                f"    {value.name}, {words.row} {row}: {_visible(words, mask[row])}"
                for row in sorted({0, pads, min(pads + 1, graph.rows - 1), graph.rows - 1})
            ]
        else:
            last = graph.rows - 1
            numbers = array.reshape(-1, graph.rows, array.shape[-1])[0, last, :4].tolist()
            shown = ", ".join(f"{number:.4g}" for number in numbers)
            lines.append(f"    {value.name}, {words.row} {last}: {shown}{', ...' if array.shape[-1] > 4 else ''}")
    slots = graph.kv_len
    lines.append("")
    lines.append(words.after.format(pads=pads, last=graph.rows - 1, first=slots - real, slots=slots - 1, real=real))
    return "\n".join(lines)


def _row(numbers: Sequence[int]) -> str:
    if len(numbers) <= SHOWN:
        return " ".join(map(str, numbers))
    half = SHOWN // 2
    return f"{' '.join(map(str, numbers[:half]))} ... {' '.join(map(str, numbers[-half:]))}"


def _visible(words: Words, mask: np.ndarray[Any, Any]) -> str:
    """Which slots of a mask's row are 0; those are one stretch."""
    (slots,) = np.nonzero(mask == 0)
    if not len(slots):
        return words.hidden
    return words.visible.format(first=int(slots[0]), last=int(slots[-1]), count=len(slots))
