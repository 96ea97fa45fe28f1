"""The audit of a whole bundle for a target: its files, and what real numbers do in them, all findings at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from rollkv.export.emulation import Agreement, Float16Backend, agreement
from rollkv.export.handoff_text import read_corpus
from rollkv.export.prompts import proof_ids
from rollkv.export.ranges import COARSE, Ranges, measure
from rollkv.export.signature import options_of
from rollkv.export.target_audit import Finding, form_findings, size_findings, target_findings
from rollkv.export.targets import Target
from rollkv.export.verify_float16 import KL, MISSES
from rollkv.models.config import FLOAT16_MAX
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle

STEPS = 16  # tokens decoded after the prompt


@dataclass(frozen=True, kw_only=True)
class BundleAudit:
    """What was found. ranges, float16: None when nothing was run."""

    bundle: str
    target: str
    findings: list[Finding]
    tokens: int = 0
    ranges: Ranges | None = None
    float16: Agreement | None = None

    def layers(self) -> list[dict[str, Any]]:
        """One row for each layer: its largest residual, square and score."""
        if self.ranges is None:
            return []
        residual, square, score = (self.ranges.of(kind) for kind in ("residual", "square", "score"))
        over = {r.layer for r in self.ranges.readings if r.overflows}
        return [
            {
                "layer": layer,
                "residual": reading.largest,
                "int16_step": reading.int16_step,
                "median": reading.median,
                "square": square[layer].largest if layer in square else None,
                "score": score[layer].largest if layer in score else None,
                "overflows": layer in over,
            }
            for layer, reading in residual.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bundle": self.bundle,
            "target": self.target,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "tokens": self.tokens,
            "layers": self.layers(),
            "hidden_rows": None if self.ranges is None else self.ranges.hidden_rows,
            "float16": None if self.float16 is None else dataclasses.asdict(self.float16),
        }


def audit_bundle(bundle: Bundle, target: Target, run: bool = True, data: Path | None = None) -> BundleAudit:
    """Every finding. run: also run the graphs, on the text of the file `data`, by default on text of rollkv's own.

    Raises HandoffError for a text that cannot be read, BackendError when a graph does not run.
    """
    m = bundle.manifest
    options = options_of(m)
    found = [*form_findings({name: getattr(options, name) for name in target.form()}, target)]
    found += size_findings(m, target)
    for info in m.graphs:
        found += target_findings(onnx.load(bundle.path / info.file, load_external_data=False), info, target)
    if not run:
        return BundleAudit(bundle=str(bundle.path), target=target.name, findings=found)
    ids = audit_ids(bundle, data)
    steps = max(0, min(STEPS, len(ids) - 1))
    prompt = ids[: len(ids) - steps]
    ranges = measure(bundle, prompt)
    float16 = agreement(bundle, OrtBackend(bundle), Float16Backend(bundle), ids, steps)
    return BundleAudit(
        bundle=str(bundle.path),
        target=target.name,
        findings=[*found, *_range_findings(ranges, m.mask_value, target), *_float16_findings(float16, target)],
        tokens=len(prompt),
        ranges=ranges,
        float16=float16,
    )


def audit_ids(bundle: Bundle, data: Path | None) -> list[int]:
    """Tokens to run: a first chunk with pads and BOS, a full one, and STEPS more where L allows."""
    m = bundle.manifest
    c = m.prefill_rows[-1]
    n = min(m.max_lm_input_len, 2 * c + max(1, c // 2) + STEPS)
    if data is None:
        return proof_ids(bundle, n, start=0)
    corpus = read_corpus(data, bundle, chat=False)
    return corpus.take(corpus.start(n, 0, 1), n)


def _range_findings(ranges: Ranges, mask_value: float, target: Target) -> Iterator[Finding]:
    def warn(rule: str, text: str, cure: str | None = None, level: str = "warning") -> Finding:
        return Finding(graph="", rule=rule, level=level, text=text, cure=cure)

    first = ranges.first_overflow
    if first is not None:
        place = "outside of the layers" if first.layer is None else f"in layer {first.layer}"
        cure = {
            "square": f"--norm {target.norm if target.norm != 'plain' else 'rowmax'}",
            "residual": "none by a flag: the residual stream needs float32 or bfloat16 there",
        }.get(first.kind, "none by a flag: that op needs float32 or bfloat16 there")
        what = {"square": "x x of a norm", "residual": "the residual stream", "score": "scores"}.get(
            first.kind, first.op
        )
        text = (
            f"the first overflow of float16 is {what} {place}: {first.value} reaches {first.largest:.6g} in "
            f"{first.run}, above {FLOAT16_MAX:.0f}"
        )
        yield warn("float16", text, cure)
    scores = ranges.of("score")
    if scores:
        worst = max(scores.values(), key=lambda reading: reading.largest)
        if worst.largest > abs(mask_value) / 2:
            text = (
                f"scores reach {worst.largest:.6g} in layer {worst.layer}, which the mask value {mask_value:g} "
                "does not hide"
            )
            yield warn("mask", text, "a --mask-value of larger magnitude")
        step = (abs(mask_value) + worst.largest) / 65535
        if step > COARSE:
            need = -float(2 ** max(4, int(2 * worst.largest).bit_length()))
            text = (
                f"one 16-bit scale over scores (up to {worst.largest:.4g}) and the mask value {mask_value:g} has steps "
                f"of {step:.2g}"
            )
            yield warn("int16", text, f"--mask-value={need:g}, where scores are quantised with the mask")
    coarse = [r for r in ranges.of("residual").values() if r.median is not None and r.int16_step > COARSE * r.median]
    if coarse:
        worst = max(coarse, key=lambda reading: reading.int16_step)
        text = (
            f"the residual stream of {len(coarse)} layers is too wide for one int16 scale, most in layer "
            f"{worst.layer}: it reaches {worst.largest:.6g}, a step is {worst.int16_step:.3g}, half of the numbers are "
            f"below {worst.median:.3g}"
        )
        yield warn("int16", text, "keep the residual stream in float16")


def _float16_findings(a: Agreement, target: Target) -> Iterator[Finding]:
    if target.precision != "float16":
        return
    if a.fault is not None or not (a.top1 >= 1 - MISSES and a.law.kl <= KL):
        said = a.fault or f"top-1 {a.top1:.1%} (needed {1 - MISSES:.0%}), KL {a.law.kl:.2e} (allowed {KL:g})"
        yield Finding(graph="", rule="float16", level="refused", text=f"emulated float16 is not the same model: {said}")
