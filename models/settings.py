"""A config.json read by its family's row: every setting is understood, or refused by name.

Knows the keys that Hugging Face's configs have in common; what is special to a family is in its row. No file format,
no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollkv.models.config import CheckpointError, DecoderConfig, ExpertsConfig, LayerConfig, RopeConfig
from rollkv.models.families import FAMILIES
from rollkv.models.family import REQUIRED, Family, Key
from rollkv.models.rope_settings import merge_rope, read_rope

# No model is near them: a damaged number is refused before memory is asked for. Beyond 2^24 float32 skips positions.
LARGEST = {"num_hidden_layers": 10_000, "max_position_embeddings": 2**24}
# Of every family whose row does not say otherwise. transformers reads is_causal from any config: false lets a row see
# later tokens. partial_rotary_factor it would overlook.
_FIXED = {"is_causal": True, "partial_rotary_factor": 1.0}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "relu2": "relu2",
}
# Settings that say nothing about the numbers of a forward pass in evaluation mode.
_HARMLESS = frozenset(
    [
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
        "attn_implementation", "attn_pdrop", "auto_map", "bad_words_ids", "chunk_size_feed_forward",
        "classifier_dropout", "dtype", "embd_pdrop", "embedding_dropout", "eod_token_id", "finetuning_task",
        "hidden_dropout", "id2label", "im_end_id", "im_start_id", "initializer_range", "is_decoder",
        "is_llama_config", "label2id", "model_type", "name_or_path", "org_vocab_size", "output_attentions",
        "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
        "resid_pdrop", "residual_dropout", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
        "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj", "task_specific_params", "text_len", "tokenizer_class", "torch_dtype",
        "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version",
        "use_cache",
    ]
)  # fmt: skip


def read_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """The content of a config.json, read by its family.

    where: the file's name, for messages.
    Raises CheckpointError: unknown model_type, missing or unknown setting, geometry that does not fit together.
    """
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    got = _settings(family, raw, where)
    sizes = {key: got[family.keys.get(key, key)] for key in _SIZES if family.keys.get(key, key) in got}
    heads = sizes["num_attention_heads"]
    kv_heads = sizes.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if sizes.get("head_dim") is None and sizes["hidden_size"] % heads:
        raise CheckpointError(
            f"{where}: hidden_size {sizes['hidden_size']} / num_attention_heads {heads} is no head_dim"
        )
    head_dim = sizes.get("head_dim") or sizes["hidden_size"] // heads
    windows = _windows(family, got, where)
    ropes, max_position = _ropes(family, got, head_dim, sizes["max_position_embeddings"], where)
    experts, sparse = _experts(family, got, where)
    turns = _turns(family, got, windows, where)
    layers = tuple(
        LayerConfig(
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=sizes["intermediate_size"] or 4 * sizes["hidden_size"],
            window=window,
            rope=None if not turn else "sliding" if window is not None and len(ropes) > 1 else "full",
            sparse=chosen,
        )
        for window, turn, chosen in zip(windows, turns, sparse, strict=True)
    )
    used = {layer.rope for layer in layers}
    config = DecoderConfig(
        family=family.model_type,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        num_heads=heads,
        norm_eps=float(_positive(got, family.keys.get("rms_norm_eps", "rms_norm_eps"), where)),
        max_position=max_position,
        layers=layers,
        ropes=tuple(rope for rope in ropes if rope.name in used),
        bos_token_id=got["bos_token_id"],
        eos_token_ids=token_ids(got["eos_token_id"], f"{where}: eos_token_id"),
        biases=frozenset(name for name, on in family.biases.items() if (got[on] if isinstance(on, str) else on)),
        experts=experts,
        tied_head=bool(got["tie_word_embeddings"]),
        **{"activation": _activation(family, got, where), **_fields(family, got, where)},
    )
    return config if family.finish is None else family.finish(config, got, where)


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """A token id setting: null, an id, or a list of ids. Raises CheckpointError for anything else."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(map(_is_token_id, ids)):
        raise CheckpointError(f"{where} is {value!r}, must be a token id or a list of them")
    return ids


def _settings(family: Family, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every setting of the row with its value or its default, checked one by one."""
    fixed = {key: value for key, value in _FIXED.items() if key not in family.settings} | dict(family.fixed)
    for key, value in raw.items():
        if key in fixed and value is not None and value != fixed[key]:
            raise CheckpointError(f"{where}: {key} is {value!r}; allowed for {family.model_type}: {fixed[key]!r}")
        if key in family.settings or key in fixed or key in _HARMLESS or value is None or value is False:
            continue
        raise CheckpointError(
            f"{where}: setting {key!r} = {str(value)[:80]!r} is not understood for {family.model_type}"
        )
    got = {key: raw.get(key, default) for key, default in family.settings.items()}
    missing = [
        key for key, value in got.items() if value is REQUIRED or (value is None and family.settings[key] is REQUIRED)
    ]
    if missing:
        raise CheckpointError(f"{where}: {', '.join(missing)} missing")
    for size in _SIZES:
        key = family.keys.get(size, size)
        if got.get(key) is not None:
            _count(got[key], key, where, LARGEST.get(size, 2**31))
    for key, default in family.settings.items():
        if isinstance(default, bool) and got[key] is not None and not isinstance(got[key], bool):
            raise CheckpointError(f"{where}: {key} is {got[key]!r}, must be true or false")
    bos = got["bos_token_id"]
    if bos is not None and not _is_token_id(bos):
        raise CheckpointError(f"{where}: bos_token_id is {bos!r}, must be a token id or null")
    return got


def _fields(family: Family, got: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row's own fields of DecoderConfig."""
    fields = {}
    for name, value in family.fields.items():
        if name == "experts":
            continue
        if isinstance(value, Key):
            setting = got[value.name]
            if setting is None:
                continue
            switch = isinstance(family.settings[value.name], bool)  # and _settings has checked it
            fields[name] = value.through(setting if switch else _positive(got, value.name, where))
        else:
            fields[name] = value
    return fields


def _activation(family: Family, got: Mapping[str, Any], where: str) -> str:
    key = family.keys.get("hidden_act", "hidden_act")
    allowed = {**_ACTIVATIONS, **family.activations}
    if not isinstance(got[key], str) or got[key] not in allowed:
        raise CheckpointError(f"{where}: {key} {got[key]!r} is not supported; allowed: {', '.join(map(repr, allowed))}")
    return allowed[got[key]]


def _windows(family: Family, got: Mapping[str, Any], where: str) -> tuple[int | None, ...]:
    """Window of each layer. null and 0 mean none: a window of 0 would let no query see anything.

    Family.windows: "none" of the layers; "all"; "pattern": layer_types, or all but every n-th; "listed": layer_types,
    or those that do not turn, if use_sliding_window; behind use_sliding_window also "switch": layer_types, or from
    max_window_layers on; "switch-all"; "switch-odd": layer_types, or every other below max_window_layers.
    """
    layers: int = got[family.keys.get("num_hidden_layers", "num_hidden_layers")]
    kinds, known = got.get("layer_types"), ("full_attention", "sliding_attention")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == layers and all(kind in known for kind in kinds)
    ):
        raise CheckpointError(f"{where}: layer_types {str(kinds)[:80]} must be {layers} of {', '.join(known)}")
    window: int | None = got.get("sliding_window") or None
    if family.windows == "none" or window is None or not got.get("use_sliding_window", True):
        return (None,) * layers
    _count(window, "sliding_window", where, 2**31, "a positive integer or null")
    if family.windows in ("all", "switch-all"):
        return (window,) * layers
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family.windows == "pattern":
        period = next(
            (got[k] for k in ("sliding_window_pattern", "_sliding_window_pattern") if got.get(k) is not None),
            family.pattern,
        )
        if isinstance(period, str) and period and set(period) <= {"L", "G"}:  # EXAONE writes LLLG
            return tuple(window if period[i % len(period)] == "L" else None for i in range(layers))
        _count(period, "sliding_window_pattern", where, 2**31)
        return tuple(window if (i + 1) % period else None for i in range(layers))
    if family.windows == "listed":
        return tuple(None if turn else window for turn in _listed(got, layers, where))
    first = got["max_window_layers"]
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise CheckpointError(f"{where}: max_window_layers is {first!r}, must be a number of layers")
    if family.windows == "switch-odd":
        return tuple(window if i % 2 == 0 and i < first else None for i in range(layers))
    assert family.windows == "switch"
    return tuple(window if i >= first else None for i in range(layers))


def _turns(family: Family, got: Mapping[str, Any], windows: tuple[int | None, ...], where: str) -> list[bool]:
    """Whether queries and keys of each layer rotate."""
    if family.turns == "listed":
        return _listed(got, len(windows), where)
    if family.turns == "windowed" or (family.turns == "windowed-if-any" and any(windows)):
        return [window is not None for window in windows]
    return [family.turns != "none"] * len(windows)


def _listed(got: Mapping[str, Any], layers: int, where: str) -> list[bool]:
    """no_rope_layers, where 1 means that the layer does turn; or all but every n-th."""
    listed, interval = got["no_rope_layers"], got["no_rope_layer_interval"]
    if listed is None:
        _count(interval, "no_rope_layer_interval", where, 2**31)
        return [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or not all(value in (0, 1) for value in listed):
        raise CheckpointError(f"{where}: no_rope_layers {str(listed)[:80]} must be {layers} of 0 and 1")
    return [bool(value) for value in listed]


def _ropes(
    family: Family, got: Mapping[str, Any], head_dim: int, max_position: int, where: str
) -> tuple[tuple[RopeConfig, ...], int]:
    """The rotary embeddings, and how many positions the model has."""
    if family.turns == "none":
        return (), max_position
    renamed = {
        ours: got[theirs]
        for ours, theirs in family.keys.items()
        if ours in ("rope_theta", "partial_rotary_factor") and got[theirs] is not None
    }
    in_part = "partial_rotary_factor" in {*family.settings, *family.keys}  # else read_rope refuses all but 1
    ropes, positions = [], max_position
    for name in family.ropes:
        kind = {"full": "full_attention", "sliding": "sliding_attention"}[name] if len(family.ropes) > 1 else None
        merged = merge_rope({**got, **renamed}, theta_default=family.theta, kind=kind, where=where)
        share = merged.get("partial_rotary_factor") if in_part else None
        share = family.rotary_factor if share is None else share
        if not _is_positive(share) or share > 1:
            raise CheckpointError(f"{where}: partial_rotary_factor is {share!r}, allowed: above 0, up to 1")
        rope, reach = read_rope(
            merged,
            head_dim=head_dim,
            rotary_dim=int(head_dim * share),
            max_position=max_position,
            interleaved=family.interleaved,
            where=where,
            name=name,
        )
        ropes.append(rope)
        positions = max(positions, reach)
    return tuple(ropes), positions


def _experts(family: Family, got: Mapping[str, Any], where: str) -> tuple[ExpertsConfig | None, list[bool]]:
    """The mixture of experts, and which layers have one."""
    layers: int = got[family.keys.get("num_hidden_layers", "num_hidden_layers")]
    if "experts" not in family.fields:
        return None, [False] * layers
    count_keys, top_key, width_key, normalise = family.fields["experts"]
    count_key = next((key for key in count_keys.split("|") if got[key] is not None), count_keys.split("|")[0])
    count, top_k, width = (_count(got[key], key, where, 2**16) for key in (count_key, top_key, width_key))
    if top_k > count:
        raise CheckpointError(f"{where}: {top_key} is {top_k}, allowed: up to {count_key} {count}")
    shared: int = got.get("shared_expert_intermediate_size") or 0
    if shared != 0:
        _count(shared, "shared_expert_intermediate_size", where, 2**31)
    experts = ExpertsConfig(
        count=count,
        top_k=top_k,
        width=width,
        normalise=normalise if isinstance(normalise, bool) else bool(got[normalise]),
        shared_width=shared,
    )
    step, dense = got.get("decoder_sparse_step", 1), got.get("mlp_only_layers") or []
    _count(step, "decoder_sparse_step", where, 2**31)
    if not isinstance(dense, list) or not all(_is_token_id(i) for i in dense):
        raise CheckpointError(f"{where}: mlp_only_layers is {str(dense)[:80]}, must be a list of layers")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    return (experts if any(sparse) else None), sparse


def _count(value: Any, key: str, where: str, most: int, what: str = "a positive integer") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where}: {key} is {value!r}, must be {what}")
    if value > most:
        raise CheckpointError(f"{where}: {key} is {value}, allowed: up to {most}")
    return value


def _positive(got: Mapping[str, Any], key: str, where: str) -> float:
    value = got[key]
    if not _is_positive(value):
        raise CheckpointError(f"{where}: {key} is {value!r}, must be a positive number")
    return float(value)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    """A finite number above 0; JSON as Python reads it may hold Infinity and NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
