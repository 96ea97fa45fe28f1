"""A config.json read by its family's row: every setting is understood, or refused by name.

Knows the keys that Hugging Face's configs have in common; what is special to a family is in its row. No file format,
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollkv.models.config import FLOAT16_MAX, ROPE_TYPES, CheckpointError, DecoderConfig, LayerConfig, RopeConfig
from rollkv.models.families import FAMILIES
from rollkv.models.family import REQUIRED, Family, Key
from rollkv.models.layer_settings import TURN_RULES, read_experts, read_windows
from rollkv.models.rope_settings import merge_rope, read_rope
from rollkv.models.setting_values import MAX_POSITIONS, count, is_index, is_positive, positive, token_ids

# No model is near them: a damaged number is refused before memory is asked for.
_LARGEST = {"num_hidden_layers": 10_000, "max_position_embeddings": MAX_POSITIONS}
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
        "_attn_implementation", "_attn_implementation_autoset", "_model_name_or_path", "_name_or_path", "architectures",
        "attention_dropout",
        "attn_implementation", "attn_pdrop", "auto_map", "bad_words_ids", "chunk_size_feed_forward",
        "classifier_dropout", "dtype", "embd_pdrop", "embedding_dropout", "eod_token_id", "finetuning_task",
        "hidden_dropout", "id2label", "im_end_id", "im_start_id", "initializer_range", "is_decoder",
        "is_llama_config", "label2id", "model_type", "name_or_path", "org_vocab_size", "output_attentions",
        "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
        "resid_pdrop", "residual_dropout", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
        "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj", "task_specific_params", "text_len", "tokenizer_class", "torch_dtype",
        "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version",
        "use_cache", "_num_labels", "attention_softmax_in_fp32", "do_sample", "gradient_checkpointing", "max_length",
        "max_sequence_length", "model_max_length", "n_special", "num_labels", "output_past", "predict_special_tokens",
        "scale_attention_softmax_in_fp32", "temperature",
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
    layer_count = sizes["num_hidden_layers"]
    windows = read_windows(family, got, layer_count, where)
    ropes, max_position = _ropes(family, got, head_dim, sizes["max_position_embeddings"], where)
    experts, sparse = read_experts(family, got, layer_count, where)
    turns = TURN_RULES[family.turns](got, windows, where)
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
    used, eps = {layer.rope for layer in layers}, family.keys.get("rms_norm_eps", "rms_norm_eps")
    config = DecoderConfig(
        family=family.model_type,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        num_heads=heads,
        norm_eps=_eps(got[eps], eps, where),
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


def _settings(family: Family, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every setting of the row with its value or its default, checked one by one."""
    fixed = {key: value for key, value in _FIXED.items() if key not in family.settings} | dict(family.fixed)
    for key, value in raw.items():
        if key in fixed and value is not None and value != fixed[key]:
            raise CheckpointError(f"{where}: {key} is {value!r}; allowed for {family.model_type}: {fixed[key]!r}")
        known = key in family.settings or key in fixed or key in family.unread or key in _HARMLESS
        if known or value is None or value is False:
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
    share = family.keys.get("partial_rotary_factor", "partial_rotary_factor")
    if share in family.settings and raw.get(share, share) is None and family.rotary_factor != 1:
        raise CheckpointError(f"{where}: {share} is null; leave it out for {family.rotary_factor}, or give a number")
    for size in _SIZES:
        key = family.keys.get(size, size)
        if got.get(key) is not None:
            count(got[key], key, where, _LARGEST.get(size, 2**31))
    for key, default in family.settings.items():
        if isinstance(default, bool) and got[key] is not None and not isinstance(got[key], bool):
            raise CheckpointError(f"{where}: {key} is {got[key]!r}, must be true or false")
    bos = got["bos_token_id"]
    if bos is not None and not is_index(bos):
        raise CheckpointError(f"{where}: bos_token_id is {bos!r}, must be a token id or null")
    return got


def _eps(value: Any, key: str, where: str) -> float:
    eps = positive(value, key, where)
    if eps > 1:
        raise CheckpointError(f"{where}: {key} is {value!r}, allowed: above 0, up to 1")
    return eps


def _fields(family: Family, got: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row's own fields of DecoderConfig."""
    fields = {}
    for name, value in family.fields.items():
        if isinstance(value, Key):
            setting = got[value.name]
            if setting is None:
                continue
            switch = isinstance(family.settings[value.name], bool)  # and _settings has checked it
            result = value.through(setting if switch else positive(setting, value.name, where))
            if isinstance(result, float) and not result <= FLOAT16_MAX:
                raise CheckpointError(
                    f"{where}: {value.name} is {setting!r}, which makes a constant above {FLOAT16_MAX:.0f}"
                )
            fields[name] = result
        else:
            fields[name] = value
    return fields


def _stretched(merged: dict[str, Any], head_dim: int, where: str) -> dict[str, Any]:
    """Rotary settings of HunYuan: type dynamic with alpha is type default with the base theta alpha^(D / (D - 2))."""
    if merged.get("rope_type", merged.get("type")) != "dynamic" or not merged.get("alpha"):
        return merged
    alpha, theta = (positive(merged[key], f"rope setting {key!r}", where) for key in ("alpha", "rope_theta"))
    known = {"rope_type", "type", "rope_theta", "alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    if unknown := sorted(key for key in merged.keys() - known if merged[key] is not None):
        raise CheckpointError(f"{where}: rope setting {unknown[0]!r} is not understood beside alpha")
    if head_dim <= 2 or alpha > FLOAT16_MAX:
        raise CheckpointError(
            f"{where}: rope setting 'alpha' is {alpha:g} with head_dim {head_dim}; allowed: up to "
            f"{FLOAT16_MAX:.0f}, with heads larger than 2"
        )
    return {"rope_type": "default", "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}


def _activation(family: Family, got: Mapping[str, Any], where: str) -> str:
    key = family.keys.get("hidden_act", "hidden_act")
    allowed = {**_ACTIVATIONS, **family.activations}
    if not isinstance(got[key], str) or got[key] not in allowed:
        raise CheckpointError(f"{where}: {key} {got[key]!r} is not supported; allowed: {', '.join(map(repr, allowed))}")
    return allowed[got[key]]


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
        if family.ntk_alpha:
            merged = _stretched(merged, head_dim, where)
        rope_type = merged.get("rope_type", merged.get("type", "default"))
        if rope_type in ROPE_TYPES and rope_type not in family.rope_types:
            raise CheckpointError(
                f"{where}: rope type {rope_type!r} is not supported for {family.model_type}; supported: "
                f"{', '.join(family.rope_types)}"
            )
        share = merged.get("partial_rotary_factor") if in_part else None
        share = family.rotary_factor if share is None else share
        if not is_positive(share) or share > 1:
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
        if family.query_scale and merged.get("llama_4_scaling_beta") is None:
            raise CheckpointError(f"{where}: rope setting 'llama_4_scaling_beta' is missing")
        if rope.query_scale is not None and not family.query_scale:
            raise CheckpointError(
                f"{where}: rope setting 'llama_4_scaling_beta' is not understood for {family.model_type}"
            )
        ropes.append(rope)
        positions = max(positions, reach)
    return tuple(ropes), positions
