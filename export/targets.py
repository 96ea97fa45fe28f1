"""Target profiles: what each NPU compiler takes, and the graph form that suits it, as frozen data.

A profile is where an export for that target starts; every field of its form can be set alone by a flag. Knows no graph.
`audit.py` holds a graph against `ops`, `max_rank`, `opset` and `ir_version`, `handoff.py` writes what `tool` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollkv.runtime.manifest import NORMS

# What a canonical graph is made of, and what the other forms of it add.
BASE_OPS = frozenset(
    [
        "Add", "Concat", "Div", "Erf", "Gather", "Gemm", "MatMul", "Mul", "Neg", "ReduceMean", "Relu", "Reshape",
        "Sigmoid", "Slice", "Softmax", "Sqrt", "Sub", "Tanh", "Transpose", "Unsqueeze",
    ]
)  # fmt: skip
ROUTING_OPS = frozenset({"Cast", "Equal", "ReduceSum", "TopK"})  # of a mixture of experts
NORM_OPS: dict[str, frozenset[str]] = {
    "plain": frozenset(),
    "rowmax": frozenset({"Abs", "ReduceMax"}),
    "rsqrt": frozenset({"Reciprocal"}),
    "native": frozenset({"RMSNormalization"}),
}
assert set(NORM_OPS) == set(NORMS)
ROPES = ("graph", "feed")
NATIVE_OPSET = 23  # the first that has RMSNormalization

_MEASURED = "compiled on x86-64 with the tool's own simulator (docs/handoff.md)"
_PUBLIC = "from the vendor's public material; not compiled here"


@dataclass(frozen=True, kw_only=True)
class Note:
    """A limit or a habit of a target, and how it is known."""

    text: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Target:
    """One target. The form of its graph is named as in `ExportOptions`, chunk sizes are rows of a prefill run."""

    name: str
    title: str
    tool: str | None  # distribution and version of the compiler; None: no one compiler
    calibration: str  # a key of handoff_data.WRITERS
    opset: int  # that the export writes
    opsets: tuple[int, int]  # lowest and highest that are taken
    ir_version: int  # highest that is taken
    max_rank: int = 4
    ops: frozenset[str]
    ids: str = "int32"
    norm: str = "plain"
    gqa: str = "fold"
    rope: str = "graph"
    input: str = "ids"
    head: str = "last"
    kv_layout: str = "bskd"
    decode_attention: str = "joined"
    projections: str = "separate"  # "joined": in models that have that form (models/projections.py)
    dtype: str = "float32"  # of the handed-over graph; `precision` is what the compiler makes of it
    mask_value: float = -32768.0
    chunk_sizes: tuple[int, ...] = (128,)
    refused: tuple[tuple[str, str], ...] = ()  # fields of a form with a value that the compiler does not take
    weights: str = "external"  # or "inline": one .onnx under 2 GB with everything in it
    precision: str = "float16"
    mask_operand_limit: int | None = None  # bytes of 2 x heads x c x C above which a fault is known
    notes: tuple[Note, ...] = ()

    def form(self) -> dict[str, str | int | float]:
        """The options of `signature.resolve` that the profile sets."""
        names = ("opset", "ids", "norm", "gqa", "rope", "input", "head", "kv_layout", "decode_attention", "dtype")
        return {name: getattr(self, name) for name in (*names, "mask_value")}


def differences(form: Mapping[str, object], target: Target) -> list[tuple[str, object, object]]:
    """Fields of a form that are not the target's: name, what it is, what the target has.

    form: at least the fields of `Target.form`. An opset that the target takes is no difference.
    """
    low, high = target.opsets
    return [
        (name, form[name], wanted)
        for name, wanted in target.form().items()
        if form[name] != wanted and not (name == "opset" and low <= int(str(form[name])) <= high)
    ]


def _ops(*norms: str) -> frozenset[str]:
    return BASE_OPS.union(*(NORM_OPS[norm] for norm in norms))


_RK3588 = Target(
    name="rk3588",
    title="Rockchip RK3588",
    tool="rknn-toolkit2==2.5.0",
    calibration="rknn",
    opset=17,
    opsets=(13, 18),
    ir_version=10,
    ops=_ops("rowmax"),
    gqa="repeat",
    rope="feed",
    input="embeds",
    notes=(
        Note(text="opset above 19 is refused; IR version up to 10", source=_MEASURED),
        Note(
            text="Gather on token ids, and Reciprocal, run on its CPU: embeddings, cos and sin are fed",
            source=_MEASURED,
        ),
        Note(
            text="x / sqrt(mean(x x) + eps) w becomes one exNorm; ReduceMax of the rowmax form runs on its CPU",
            source=_MEASURED,
        ),
        Note(text="repeated key/value heads with softmax(q k s + mask) v become one exSDPAttention", source=_MEASURED),
        Note(text="inputs of rank 4 are read as NHWC unless data_format says nchw", source=_MEASURED),
        Note(text="the tool may be used for work with Rockchip products only", source="licence of the wheel"),
    ),
)
_BM1684X = Target(
    name="sophgo-bm1684x",
    title="Sophgo BM1684X",
    tool="tpu-mlir==1.30.2",
    calibration="sophgo",
    opset=17,
    opsets=(13, 17),
    ir_version=9,
    ops=_ops("rowmax"),
    norm="rowmax",
    refused=(("decode_attention", "apart"),),
    notes=(
        Note(text="a decode step that takes past and new keys apart ends in its optimiser", source=_MEASURED),
        Note(text="opset 18 (axes of ReduceMean as an input) and IR version 10 are refused", source=_MEASURED),
        Note(text="x x of the residual stream overflows in F16: the rowmax norm does not", source=_MEASURED),
        Note(text="Python 3.10 only", source=_MEASURED),
    ),
)
_TARGETS = (
    Target(
        name="universal",
        title="what every compiler here takes",
        tool=None,
        calibration="npz",
        opset=17,
        opsets=(13, 17),
        ir_version=9,
        ops=_ops("rowmax"),
        norm="rowmax",
        refused=(("decode_attention", "apart"),),
        mask_operand_limit=1 << 20,
        notes=(
            Note(text="opset 17 and IR version 9 are the newest that all of them read", source=_MEASURED),
            Note(text="a norm scaled by each row's largest value stays finite in float16", source=_MEASURED),
        ),
    ),
    _RK3588,
    replace(_RK3588, name="rk3576", title="Rockchip RK3576"),
    Target(
        name="qualcomm-htp",
        title="Qualcomm Hexagon HTP",
        tool="onnxruntime-qnn==2.7.0",
        calibration="qnn",
        opset=23,
        opsets=(13, 25),
        ir_version=11,
        ops=_ops("rowmax", "native"),
        norm="native",
        projections="joined",
        mask_operand_limit=1 << 20,
        notes=(
            Note(text="RMSNormalization runs as one op; x x of the plain form overflows float16", source=_MEASURED),
            Note(
                text="weights of a norm folded into the product after it are one rounding less: SmolLM2's decode step "
                "has a worst cosine of 0.999995 joined, 0.99986 separate",
                source=_MEASURED,
            ),
            Note(
                text="Reciprocal, and a missing soc_model, give the misleading error MEM_ALLOC 1002", source=_MEASURED
            ),
            Note(
                text="a mask operand above 1 MiB (2 bytes x heads x c x C) pairs rows wrongly",
                source="reported in public for an HTP compiler; not seen here",
            ),
            Note(text="development and benchmarking only, no redistribution", source="licence of the wheel"),
        ),
    ),
    _BM1684X,
    replace(_BM1684X, name="sophgo-bm1688", title="Sophgo BM1688"),
    replace(_BM1684X, name="sophgo-cv186x", title="Sophgo CV186X"),
    Target(
        name="openvino-npu",
        title="Intel NPU (OpenVINO)",
        tool="openvino==2026.4.0",
        calibration="npz",
        opset=17,
        opsets=(13, 25),
        ir_version=11,
        ops=_ops("rowmax", "rsqrt", "native") | ROUTING_OPS,
        norm="rowmax",
        notes=(Note(text="compiling for the NPU needs its driver; the CPU device is compared here", source=_MEASURED),),
    ),
    Target(
        name="mnn",
        title="MNN",
        tool="MNN==3.6.1",
        calibration="npz",
        opset=17,
        opsets=(13, 22),
        ir_version=10,
        ops=_ops("rowmax", "rsqrt"),
        norm="rowmax",
        notes=(
            Note(text="RMSNormalization prints an error and the converter still exits 0", source=_MEASURED),
            Note(
                text="the command mnnconvert reports home; the build script calls the converter itself",
                source=_MEASURED,
            ),
        ),
    ),
    Target(
        name="horizon",
        title="Horizon (hbdk)",
        tool=None,
        calibration="horizon",
        opset=17,
        opsets=(13, 17),
        ir_version=9,
        ops=_ops("rowmax"),
        norm="rowmax",
        chunk_sizes=(256,),
        notes=(
            Note(text="caches with the slots first, 256 rows, C = 4096, mask -32768, pads on the left", source=_PUBLIC),
        ),
    ),
    Target(
        name="axera",
        title="AXERA (Pulsar2)",
        tool=None,
        calibration="axera",
        opset=17,
        opsets=(13, 17),
        ir_version=9,
        ops=_ops("rowmax"),
        norm="rowmax",
        head="split",
        notes=(
            Note(text="calibration data are .npy files in a tar for each input", source=_PUBLIC),
            Note(
                text="its own flow for language models compiles the last norm and the head as a model of its own, "
                '"post"; here the norm stays in the other graphs, head.onnx begins behind it',
                source=_PUBLIC,
            ),
        ),
    ),
)
TARGETS = {target.name: target for target in _TARGETS}
