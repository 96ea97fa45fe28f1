"""What a bundle is compared with: transformers' own model, and the host half of the contract written down literally.

`Reference` shares nothing with this project but what transformers does not know: the settings of a GGUF file, which it
reads in part, and the order in which keys of interleaved rotations are cached here. `LiteralHost` shares with the
session that it is compared with the plain functions alone: padding, the full causal mask and its cutting, the roll by
concatenation.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollkv.export.host_forms import fed_rotation, head_product
from rollkv.models.checkpoint import Checkpoint
from rollkv.models.config import CheckpointError, DecoderConfig
from rollkv.models.hf_files import read_json
from rollkv.models.tensor_views import half_order
from rollkv.models.wrappers import WRAPPERS
from rollkv.runtime.align import pad_left
from rollkv.runtime.backend import Array, Backend
from rollkv.runtime.bundle import SLOT_AXES, Bundle, GraphInfo
from rollkv.runtime.cache import roll
from rollkv.runtime.embedding import EmbeddingTable
from rollkv.runtime.mask import causal_mask, chunk_mask


@dataclass
class Trail:
    """What one way of computing gave for a prompt of n tokens and G more.

    logits: (V,) after the prompt and after each further token. keys, values: (n + G, K, D) of each layer with a cache
    of its own, as the cache stores them.
    """

    logits: list[Array] = field(default_factory=list)
    keys: dict[int, Array] = field(default_factory=dict)
    values: dict[int, Array] = field(default_factory=dict)


class Reference:
    """transformers' model of the checkpoint, in float32 with eager attention, its weights read by transformers.

    An adapter is loaded and merged by peft. Rotary factors that depend on the length are those of C, as in the graphs.
    Of a GGUF file the config is read by this project, see `_of_gguf`.
    """

    def __init__(self, checkpoint: Checkpoint, slots: int, attention: str = "eager") -> None:
        """slots: C. attention: transformers' attn_implementation; "sdpa" is faster, and what `timed` is for."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        path = checkpoint.path
        file: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
        if file:
            file["config"] = _of_gguf(path)
        if checkpoint.config.family == "internlm3":
            file["config"] = _as_llama(path)
        if checkpoint.config.experts is not None:
            file["experts_implementation"] = "eager"
        with contextlib.redirect_stderr(io.StringIO()):  # its GGUF reader draws a bar that no setting turns off
            auto: Any = AutoModelForImageTextToText if checkpoint.model_type in WRAPPERS else AutoModelForCausalLM
            try:
                self._model: Any = auto.from_pretrained(
                    path.parent if path.is_file() else path,
                    dtype=torch.float32,
                    attn_implementation=attention,
                    local_files_only=True,
                    **file,
                ).eval()
            except Exception as error:  # transformers raises many kinds
                said = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise CheckpointError(f"{path}: transformers cannot load this model: {said}") from error
        if checkpoint.lora is not None:
            from peft import PeftModel

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute that transformers renames
                try:
                    adapted = PeftModel.from_pretrained(self._model, str(checkpoint.lora), torch_device="cpu")
                except Exception as error:  # peft raises many kinds
                    said = str(error).strip().splitlines()[0]
                    raise CheckpointError(f"{checkpoint.lora}: peft cannot load this adapter: {said}") from error
            self._model = adapted.merge_and_unload().eval()
        if checkpoint.model_type in WRAPPERS and checkpoint.config.gemma4 is not None:
            # Gemma 4 puts the pad token's embedding where one of these stands; here every id is an ordinary token.
            for kind in ("image", "video", "audio"):
                setattr(self._model.config, f"{kind}_token_id", -1)
        _fix_rope(self._model, slots)
        self._config = checkpoint.config
        self._windows = checkpoint.config.windows

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], steps: int) -> tuple[Trail, list[int]]:
        """One unchunked pass over ids, then `steps` greedy tokens one by one; also those tokens."""
        if 1 in self._windows:
            return self._greedy_uncached(ids, steps)
        out = self._model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)
        trail, tokens = Trail([out.logits[0, -1].numpy()]), []
        for _ in range(steps):
            tokens.append(int(trail.logits[-1].argmax()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the argument's name changes in a later transformers
                out = self._model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            trail.logits.append(out.logits[0, -1].numpy())
        own = [i for i, layer in enumerate(self._config.layers) if layer.kv_from is None]
        for i in own:
            layer = out.past_key_values.layers[i]  # those of layers without a cache stay empty
            trail.keys[i] = _in_halves(layer.keys[0].permute(1, 0, 2).numpy(), self._config, i)
            trail.values[i] = layer.values[0].permute(1, 0, 2).numpy()
        return trail, tokens

    @torch.no_grad()
    def timed(self, ids: Sequence[int], steps: int) -> tuple[float, list[float]]:
        """Seconds of a greedy answer: from the prompt to its first token, and of each step after it."""
        times, cache, fed = [], None, list(ids)
        for _ in range(steps + 1):
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the argument's name changes in a later transformers
                out = self._model(torch.tensor([fed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, fed = out.past_key_values, [int(out.logits[0, -1].argmax())]
            times.append(time.perf_counter() - start)
        return times[0], times[1:]

    def _greedy_uncached(self, ids: Sequence[int], steps: int) -> tuple[Trail, list[int]]:
        """A full pass for each token: with a window of 1 transformers' cache, W - 1 tokens long, keeps all of them."""
        trail, tokens = Trail(), []  # type: tuple[Trail, list[int]]
        for _ in range(steps + 1):
            out = self._model(torch.tensor([[*ids, *tokens]]), use_cache=False, logits_to_keep=1)
            trail.logits.append(out.logits[0, -1].numpy())
            tokens.append(int(trail.logits[-1].argmax()))
        return trail, tokens[:-1]

    @torch.no_grad()
    def rows(self, ids: Sequence[int], positions: Array | None = None) -> list[Array]:
        """One full pass, by default at positions 0, 1, ...; the logits (V,) of every row. positions as in the graph."""
        where: dict[str, Any] = {}
        if positions is not None:  # with a mask: transformers takes a gap between positions for the next text
            lowest = torch.full((1, 1, len(ids), len(ids)), torch.finfo(torch.float32).min)
            where = {"position_ids": torch.from_numpy(positions).long(), "attention_mask": self._masks(lowest.triu(1))}
        return [row.numpy() for row in self._model(torch.tensor([list(ids)]), use_cache=False, **where).logits[0]]

    @torch.no_grad()
    def masked(self, ids: Sequence[int], visible: NDArray[np.bool_], keep: int) -> list[Array]:
        """One full pass where query q sees key k iff visible[q, k]; the logits (V,) of the last `keep` rows."""
        full = torch.where(torch.from_numpy(visible), 0.0, torch.finfo(torch.float32).min)[None, None]
        out = self._model(
            torch.tensor([list(ids)]), attention_mask=self._masks(full), use_cache=False, logits_to_keep=keep
        )
        return [row.numpy() for row in out.logits[0]]

    def _masks(self, full: torch.Tensor) -> Any:
        """An additive mask (1, 1, n, n), cut to the window where layers have one, as transformers' models take it."""
        window = next((w for w in self._windows if w is not None), None)
        if window is None:
            return full
        n = full.shape[-1]
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        sliding = torch.where(distance < window, full, torch.finfo(torch.float32).min)
        return sliding if None not in self._windows else {"full_attention": full, "sliding_attention": sliding}


def _fix_rope(model: Any, slots: int) -> None:
    """Rotary factors that transformers would choose anew for each length become those of `slots` positions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # by layer type, where layers with a window have their own
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind not in ("dynamic", "longrope"):
                continue
            prefix, where = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, device=torch.device("cpu"), seq_len=slots, **where
            )
            getattr(module, f"{prefix}inv_freq").copy_(frequencies)
            setattr(module, f"{prefix}attention_scaling", scaling)
            if layer_type is None:
                module.rope_type = "default"  # which is never chosen anew
            else:
                module.rope_type = {**module.rope_type, layer_type: "default"}


def _of_gguf(path: Path) -> Any:
    """The config of a GGUF file as this project reads it, which `tests/test_gguf_families.py` holds to the original's.

    transformers' own reader (5.24) takes the weights, but drops rope scaling, biases, soft-caps, query scales and
    windows, and looks for a padding token where the file names none.
    """
    from transformers import AutoConfig

    from rollkv.models.gguf_file import read_gguf

    return AutoConfig.for_model(**{**read_gguf(path).config, "pad_token_id": None})


def _as_llama(folder: Path) -> Any:
    """InternLM3 has no model class in transformers: it is llama with biases of its own choice, and read as that."""
    from transformers import LlamaConfig

    raw = read_json(folder / "config.json")
    bias = bool(raw.get("bias"))
    biases = {"attention_bias": bias or bool(raw.get("qkv_bias")), "mlp_bias": bias}  # one that lacks starts at zero
    return LlamaConfig(**{**raw, **biases, "model_type": "llama"})


def _in_halves(keys: Array, config: DecoderConfig, layer: int) -> Array:
    """Keys (n, K, D) that rotate in interleaved pairs, in the order of halves that this project caches."""
    head_dim, rope = config.layers[layer].head_dim, config.layers[layer].rope
    rotary = next((r.rotary_dim for r in config.ropes if r.name == rope and r.interleaved), 0)
    return keys[..., half_order(1, head_dim, rotary)] if rotary else keys


class LiteralHost:
    """The host as the contract words it for a first prompt: the full mask is cut, the cache is concatenated."""

    def __init__(self, bundle: Bundle, backend: Backend, rows: int | None = None, kv_len: int | None = None) -> None:
        """rows: of the prefill graph, whichever others there are; by default the largest.

        kv_len: the visible length C' of the graphs that serve while P + c <= C', where there are such.
        """
        self._bundle, m = bundle, bundle.manifest
        self._m = m
        self._backend = backend
        tables = {"embeds": m.embedding, "per_layer_inputs": m.per_layer_embedding}
        self._tables = {
            role: EmbeddingTable(bundle.path / info.file, info) for role, info in tables.items() if info is not None
        }
        rows = m.chunk_size if rows is None else rows
        whole = [graph for graph in m.graphs if graph.kv_len == m.max_kvcache_len]
        self._prefill = next(graph for graph in whole if graph.role == "prefill" and graph.rows == rows)
        self._decode = next(graph for graph in whole if graph.role == "decode")
        self._shorter = {(graph.role, graph.rows): graph for graph in m.graphs if graph.kv_len == kv_len}

    def follow(self, ids: Sequence[int], tokens: Sequence[int]) -> Trail:
        """A prompt, chunk by chunk, then the given tokens one by one."""
        past, pieces = self._empty(), {}  # type: dict[str, Array], dict[str, list[Array]]
        padded, real = pad_left(ids, self._prefill.rows)
        ends = [
            self._run(self._prefill, padded, real, start, past, pieces)
            for start in range(0, len(padded), self._prefill.rows)
        ]
        trail = Trail([self._logits(ends[-1])])
        for token in tokens:
            padded, real = np.append(padded, token), np.append(real, 1)
            trail.logits.append(self._logits(self._run(self._decode, padded, real, len(padded) - 1, past, pieces)))
        for value in self._decode.inputs:
            if value.role in ("past_key", "past_value"):
                assert value.layer is not None
                pile = trail.keys if value.role == "past_key" else trail.values
                pile[value.layer] = np.concatenate(pieces[value.name])
        return trail

    def rows(self, ids: Sequence[int]) -> list[Array]:
        """The logits (V,) of every token of a prompt, from a prefill graph that gives those of all rows."""
        assert self._prefill.head == "all"
        past = self._empty()
        padded, real = pad_left(ids, self._prefill.rows)
        starts = range(0, len(padded), self._prefill.rows)
        made = np.concatenate([self._run(self._prefill, padded, real, start, past, {}) for start in starts])
        return list(made[real == 1])

    def _empty(self) -> dict[str, Array]:
        """A cache in which nothing was written."""
        values = self._decode.inputs
        return {v.name: np.zeros(v.shape, v.dtype) for v in values if v.role in ("past_key", "past_value")}

    def _run(
        self,
        graph: GraphInfo,
        padded: Array,
        real: Array,
        start: int,
        past: dict[str, Array],
        pieces: dict[str, list[Array]],
    ) -> Array:
        """One run and the roll after it; its logits (1, V), or (rows, V) where the graph gives all; or (1, H)."""
        m = self._m
        rows = slice(start, start + graph.rows)
        positions = np.maximum(np.cumsum(real) - 1, 0)
        shorter = self._shorter.get((graph.role, graph.rows))
        if shorter is not None and int(np.sum(real[:start])) + graph.rows <= shorter.kv_len:
            graph = shorter
        key_names = {value.name for value in graph.inputs if value.role == "past_key"}
        axes = {name: SLOT_AXES[m.kv_layout][name not in key_names] for name, _ in m.kv_pairs}
        feeds = {}
        for value in graph.inputs:
            if value.name in past:  # the last slots of the cache
                axis, whole = axes[value.name], past[value.name]
                slots = range(whole.shape[axis] - value.shape[axis], whole.shape[axis])
                feeds[value.name] = np.ascontiguousarray(np.take(whole, slots, axis))
        for value in graph.inputs:
            if value.role == "ids":
                feeds[value.name] = padded[None, rows].astype(value.dtype)
            elif value.role in ("embeds", "per_layer_inputs"):
                table = self._tables[value.role].rows(padded[rows]) * real[rows, None]
                feeds[value.name] = table[None].astype(value.dtype)
            elif value.role == "position_ids":
                feeds[value.name] = np.broadcast_to(positions[rows], value.shape).astype(value.dtype, order="C")
            elif value.rope is not None:
                three = np.broadcast_to(positions[rows], (3, graph.rows)) if m.three_part else positions[rows]
                feeds[value.name] = fed_rotation(value, m.rope[value.rope], three)[None].astype(value.dtype)
            elif value.role.endswith("attention_mask"):
                window = None
                if value.role == "sliding_attention_mask":
                    window = next(layer.window for layer in m.layers if layer.window)
                full = causal_mask(real, m.mask_value, window)
                mask = chunk_mask(full, start, graph.rows, value.shape[-1], m.mask_value)
                feeds[value.name] = mask[None, None].astype(value.dtype)
        outputs = self._backend.run(graph, feeds)
        end = next(value for value in graph.outputs if value.role in ("logits", "hidden_states"))
        made = np.array(outputs[end.name][0])
        token_rows = real[rows] == 1
        for name, new in m.kv_pairs:
            past[name] = roll(past[name], outputs[new], axes[name])  # with the pads, which the contract allows
            pieces.setdefault(name, []).append(tokens_first(outputs[new], m.kv_layout, axes[name])[token_rows])
        return made

    def _logits(self, made: Array) -> Array:
        """The logits (V,) of the last row, out of what a run gave."""
        head = self._m.head_graph
        if head is not None:
            outputs = self._backend.run(head, {head.inputs[0].name: made[None]})
            return np.array(outputs[head.outputs[0].name][0, -1])
        whole = made if self._m.head_table is None else head_product(self._bundle, made)
        last: Array = whole[-1]
        return last


def tokens_first(array: Array, layout: str, axis: int) -> Array:
    """A key or value output (1, ...) as (c, K, D), copied."""
    if layout == "bskd":
        return np.array(array[0])
    return np.array(array[0].transpose(2, 0, 1) if axis == 3 else array[0].transpose(1, 0, 2))


def oracle_visible(runs: Sequence[int], slots: int) -> NDArray[np.bool_]:
    """What each query sees when the cache forgets: k <= q and k >= (end of q's run) - C, (n, n).

    runs: real tokens of each run in order.
    """
    n = sum(runs)
    ends = np.repeat(np.cumsum(runs), runs)  # one past the last token of q's run
    keys = np.arange(n)
    return (keys[None, :] <= keys[:, None]) & (keys[None, :] >= ends[:, None] - slots)
