"""Tiny checkpoints made by transformers, their bundles, and a backend that records what it is fed."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before any test imports onnxruntime
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    # A core for each worker: threads of one that wait for each other would take the time of the other.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

from rollkv.runtime.bundle import Bundle, open_bundle

# Odd sizes: heads != kv heads, once kv heads == heads / kv heads, and for qwen3 head_dim x heads != hidden.
SMALL = {
    "vocab_size": 307,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    # heads / kv heads == kv heads, tied
    "llama-square": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def make_checkpoint(folder: Path, name: str, **more: Any) -> Path:
    """Save a random model of transformers' own class; norms, biases and weights large enough that an error shows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, extra = SHAPES[name]
    save = {key: more.pop(key) for key in ("max_shard_size",) if key in more}
    dtype = more.pop("dtype", torch.float32)
    config = AutoConfig.for_model(family, **{**SMALL, **extra, **more})
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
    model.to(dtype).save_pretrained(folder, **save)
    return folder


def export(checkpoint: Path, output: Path, lora: Path | None = None, **settings: Any) -> Bundle:
    """Export in this process; L, c, C and more by the names of `signature.resolve`."""
    from rollkv.export.pipeline import export_bundle
    from rollkv.export.signature import resolve
    from rollkv.models.checkpoint import open_checkpoint

    opened = open_checkpoint(str(checkpoint), lora=lora)
    lengths = {"max_lm_input_len": 40, "chunk_size": 8, "max_kvcache_len": 48}
    export_bundle(opened, resolve(opened.config, **{**lengths, **settings}), output, lambda *_: None)
    return open_bundle(output)


def export_preset(name: str, output: Path) -> Bundle:
    """Export a preset with the default lengths."""
    from rollkv.export.pipeline import export_bundle
    from rollkv.export.signature import resolve
    from rollkv.models.checkpoint import open_checkpoint

    opened = open_checkpoint(name)
    export_bundle(opened, resolve(opened.config), output, lambda *_: None)
    return open_bundle(output)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint(name): the folder of a tiny checkpoint of SHAPES, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / name, name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def bundle(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """bundle(name, **settings): a tiny checkpoint exported with c = 8, L = 40, C = 48, made once for each setting."""
    made: dict[Any, Bundle] = {}

    def get(name: str, **settings: Any) -> Bundle:
        key = (name, *sorted(settings.items()))
        if key not in made:
            made[key] = export(checkpoint(name), tmp_path_factory.mktemp("bundle") / name, **settings)
        return made[key]

    return get


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """saved(name): a tiny vision-language checkpoint of vision_models.MODELS, made once."""
    from vision_models import Saved, load, save

    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            folder = save(tmp_path_factory.mktemp("vision") / name, name)
            made[name] = Saved(folder, load(folder))
        return made[name]

    return get


_TRACED: dict[Any, list[bytes]] = {}


def trace_once(config: Any, options: Any, rows: Any, kv_lens: Any = None) -> Any:
    """`trace.trace_graphs`, which depends on nothing but the fields in the key."""
    import onnx

    from rollkv.export.trace import trace_graphs
    from rollkv.models.config import RopeConfig

    # Of a rotary embedding the graph has the shape of its tables; their values are weights.
    ropes = tuple(
        RopeConfig(
            name=rope.name,
            type="default" if rope.rotated_pairs is None else rope.type,
            theta=1.0,
            rotated_pairs=rope.rotated_pairs,
            rotary_dim=rope.rotary_dim,
            sections=rope.sections,
            query_scale=rope.query_scale and (1.0, 1),
        )
        for rope in config.ropes
    )
    lengths = (options.chunk_size, options.max_kvcache_len)
    key = (
        replace(config, family="", eos_token_ids=(), ropes=ropes),
        *rows,
        None if kv_lens is None else tuple(kv_lens),
        *lengths,
        options.kv_layout,
        options.ids,
        options.decode_attention,
        options.projections,
        options.mask_value,
        tuple(options.head_of(count) for count in rows),
        *(options.head, options.input),
        *(options.norm, options.gqa, options.rope, options.dtype),
    )
    if key not in _TRACED:
        _TRACED[key] = [model.SerializeToString() for model in trace_graphs(config, options, rows, kv_lens)]
    return [onnx.ModelProto.FromString(data) for data in _TRACED[key]]


@pytest.fixture(scope="session", autouse=True)
def shared_traces() -> Iterator[None]:
    """Trace each graph once in a test process."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    from rollkv.export import pipeline, verify

    patch = pytest.MonkeyPatch()
    for module in (pipeline, verify):
        patch.setattr(module, "trace_graphs", trace_once)
    yield
    patch.undo()


class Recorder:
    """A backend that keeps copies of all feeds; what it gives comes from another backend, or is zero."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner
        self.runs: list[tuple[Any, dict[str, Any]]] = []

    def run(self, graph: Any, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        import numpy as np

        self.runs.append((graph, {name: np.array(array) for name, array in feeds.items()}))
        if self.inner is not None:
            return self.inner.run(graph, feeds)
        return {value.name: np.zeros(value.shape, value.dtype) for value in graph.outputs}


@pytest.fixture(scope="session")
def text_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer and a chat template."""
    from toy_tokenizers import CHATML, CONFIG, byte_level, write

    folder = make_checkpoint(tmp_path_factory.mktemp("source") / "tïny", "llama", vocab_size=320)
    return write(folder, byte_level(), **CONFIG, chat_template=CHATML)


@pytest.fixture(scope="session")
def text_bundle(text_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Its bundle: L = 120, c = 8, C = 160."""
    output = tmp_path_factory.mktemp("bündle of text") / "b 1"
    return export(text_source, output, max_lm_input_len=120, max_kvcache_len=160)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text for hand-offs of that bundle."""
    text = "the quick brown fox. hello, how are you?\ngrüße aus köln 你好世界 🙂🙃 don't stop\n\nnow\n" * 20
    file = tmp_path_factory.mktemp("data") / "täxt.txt"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def source(text_source: Path) -> Path:
    """The same by a shorter name."""
    return text_source


@pytest.fixture
def previous(source: Path, tmp_path: Path) -> Path:
    """A bundle that is there already."""
    from bundle_exports import LENGTHS

    from rollkv.export.cli import main

    assert main(["export", str(source), "-o", str(tmp_path / "out" / "bundle"), *LENGTHS]) == 0
    return tmp_path / "out" / "bundle"


@pytest.fixture
def copy(text_bundle: Bundle, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may damage."""
    return Path(shutil.copytree(text_bundle.path, tmp_path / "copy"))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run(*arguments): exit code, stdout and stderr of the command in this process."""

    from rollkv.export.cli import main

    def call(*arguments: Any) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            code = error.code if isinstance(error.code, int) else 1
        out, err = capfd.readouterr()
        return code, out, err

    return call
