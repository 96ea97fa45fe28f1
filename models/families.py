"""Decoder families as data: a row for each `model_type`.

A row says which settings config.json has and what an absent one stands for (transformers' configuration classes), what
each means as a field of `DecoderConfig`, and where the tensors' names differ from llama's. `settings.py` reads a config
by its row, `names.py` the tensors. With those two, the file that knows what Hugging Face calls things.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollkv.models import families_gemma4 as gemma4
from rollkv.models.config import DecoderConfig

REQUIRED = object()  # in Family.settings: the key must be there


@dataclass(frozen=True)
class Key:
    """A field that is the value of a setting, perhaps through a function."""

    name: str
    through: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Source:
    """A tensor whose checkpoint stores it otherwise than llama's: see `names.py` for each layout."""

    name: str
    layout: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`."""

    model_type: str
    settings: Mapping[str, Any]  # key of config.json -> value when absent
    keys: Mapping[str, str] = field(default_factory=dict)  # llama's key -> this family's for the same thing
    fixed: Mapping[str, Any] = field(default_factory=dict)  # may be there with this value only
    fields: Mapping[str, Any] = field(default_factory=dict)  # of DecoderConfig: a value, or the Key of one
    activations: Mapping[str, str] = field(default_factory=dict)  # what the config calls otherwise than others do
    biases: Mapping[str, bool | str] = field(default_factory=dict)  # "qkv", ... -> always, or the setting that asks
    windows: str = "none"  # which layers have one: see settings._windows
    pattern: int = 0  # for windows == "pattern": every pattern-th layer has none
    turns: str = "all"  # layers whose queries and keys rotate: all, windowed, windowed-if-any, listed; none: no rope
    ropes: tuple[str, ...] = ("full",)  # ("full", "sliding"): layers with a window have a rotation of their own
    theta: float = 10000.0  # base of the rotation when the config names none
    rotary_factor: float = 1.0  # how much of a head rotates when the config does not say
    interleaved: bool = False  # pairs (2i, 2i + 1) rotate
    names: Mapping[str, str | Source] = field(default_factory=dict)  # part -> tensor, where it is not llama's
    gguf: Mapping[str, str | Source] | None = None  # the same for GGUF files; None: not read from them
    norm_plus: float = 0.0  # the checkpoint's norm weights lack this
    finish: Callable[[DecoderConfig, Mapping[str, Any], str], DecoderConfig] | None = None  # what no row can say
    prefix: str = ""  # that published checkpoints leave out of every name
    remarks: str = ""  # for `rollkv families`


_GEOMETRY = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,  # None: as many as query heads
    "head_dim": None,  # None: hidden_size / num_attention_heads
    "max_position_embeddings": REQUIRED,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ONE_TWO = {"bos_token_id": 1, "eos_token_id": 2}
_WINDOW_SWITCH = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_LAYER_NORM = {"layer_norm_eps": 1e-5}
_NEEDS_KV = {"num_key_value_heads": REQUIRED}
_PART = {"partial_rotary_factor": None}  # of families that may turn a part of each head only


def _geometry(*without: str, **more: Any) -> dict[str, Any]:
    """The usual settings, without some, with others."""
    return {key: value for key, value in {**_GEOMETRY, **more}.items() if key not in without}


_ATTENTION_BIAS = {"qkv": "attention_bias", "out": "attention_bias"}
_GATE_UP = {"mlp.gate": Source("mlp.gate_up_proj", "gate-up"), "mlp.up": Source("mlp.gate_up_proj", "gate-up")}
_QKV = {f"attention.{x}": Source("self_attn.qkv_proj", "qkv") for x in "qkv"}
_SANDWICH = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_FC = {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
_EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.shared": "mlp.shared_expert",
    "mlp.shared_gate": "mlp.shared_expert_gate",
    "mlp.gate.experts": "mlp.experts.{}.gate_proj",
    "mlp.up.experts": "mlp.experts.{}.up_proj",
    "mlp.down.experts": "mlp.experts.{}.down_proj",
}
_GEMMA = {"tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 2, "attention_bias": False}
_GEMMA_NAMES = {**_SANDWICH}
_GGUF_SANDWICH = {
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
}
_SQRT_H = Key("hidden_size", math.sqrt)
_QUERY_SCALE = Key("query_pre_attn_scalar", lambda scalar: scalar**-0.5)

_ROWS = (
    Family(
        model_type="llama",
        settings=_geometry(attention_bias=False, mlp_bias=False, **_ONE_TWO),
        biases={**_ATTENTION_BIAS, "mlp": "mlp_bias"},
        gguf={},
    ),
    Family(
        model_type="mistral",
        settings=_geometry(sliding_window=4096, **_NEEDS_KV, **_ONE_TWO),
        windows="all",
    ),
    Family(
        model_type="qwen2",
        settings=_geometry(**_NEEDS_KV, **_WINDOW_SWITCH),
        fixed={"attention_bias": True},
        biases={"qkv": True},
        windows="switch",
        gguf={},
    ),
    Family(
        model_type="qwen3",
        settings=_geometry(**_NEEDS_KV, head_dim=128, attention_bias=False, **_WINDOW_SWITCH),
        fields={"qk_norm": "rms-head"},
        biases=_ATTENTION_BIAS,
        windows="switch",
        gguf={},
    ),
    Family(
        model_type="gemma",
        settings=_geometry(
            "hidden_act",
            num_key_value_heads=16,
            head_dim=256,
            hidden_activation=None,
            **_GEMMA,
            use_bidirectional_attention=None,
        )
        | {"hidden_act": "gelu_pytorch_tanh"},
        fixed={"use_bidirectional_attention": False, "hidden_activation": "gelu_pytorch_tanh"},
        fields={"embedding_scale": _SQRT_H},
        activations={"gelu": "gelu-tanh"},  # what the first release wrote
        biases=_ATTENTION_BIAS,
        norm_plus=1.0,
    ),
    Family(
        model_type="gemma2",
        settings=_geometry(
            "hidden_act",
            num_key_value_heads=4,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            **_GEMMA,
            query_pre_attn_scalar=256,
            sliding_window=4096,
            layer_types=None,
            final_logit_softcapping=30.0,
            attn_logit_softcapping=50.0,
        ),
        keys={"hidden_act": "hidden_activation"},
        fixed={
            "use_bidirectional_attention": False,
            "hidden_act": "gelu_pytorch_tanh",
            "cache_implementation": "hybrid",
        },
        fields={
            "order": "sandwich",
            "embedding_scale": _SQRT_H,
            "attention_scale": _QUERY_SCALE,
            "attention_softcap": Key("attn_logit_softcapping"),
            "logit_softcap": Key("final_logit_softcapping"),
        },
        biases=_ATTENTION_BIAS,
        windows="pattern",
        pattern=2,
        names=_GEMMA_NAMES,
        gguf=_GGUF_SANDWICH,
        norm_plus=1.0,
    ),
    Family(
        model_type="gemma3_text",
        settings=_geometry(
            "hidden_act",
            num_key_value_heads=4,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            **_GEMMA,
            query_pre_attn_scalar=256,
            sliding_window=4096,
            sliding_window_pattern=6,
            _sliding_window_pattern=6,
            layer_types=None,
            final_logit_softcapping=None,
            attn_logit_softcapping=None,
            rope_local_base_freq=10000.0,
        ),
        keys={"hidden_act": "hidden_activation"},
        fixed={"use_bidirectional_attention": False, "cache_implementation": "hybrid"},
        fields={
            "order": "sandwich",
            "qk_norm": "rms-head",
            "embedding_scale": _SQRT_H,
            "attention_scale": _QUERY_SCALE,
            "attention_softcap": Key("attn_logit_softcapping"),
            "logit_softcap": Key("final_logit_softcapping"),
        },
        biases=_ATTENTION_BIAS,
        windows="pattern",
        pattern=6,
        ropes=("full", "sliding"),
        theta=1000000.0,
        names=_GEMMA_NAMES,
        gguf=_GGUF_SANDWICH,
        norm_plus=1.0,
    ),
    Family(
        model_type="gemma4_text",
        settings=_geometry("hidden_act", "rope_theta", "rope_scaling", "partial_rotary_factor", **gemma4.SETTINGS),
        keys={"hidden_act": "hidden_activation"},
        fixed=gemma4.FIXED,
        fields={
            "order": "sandwich",
            "qk_norm": "rms-head",
            "embedding_scale": _SQRT_H,
            "attention_scale": 1.0,
            "logit_softcap": Key("final_logit_softcapping"),
        },
        biases=_ATTENTION_BIAS,
        windows="pattern",
        pattern=6,
        turns="none",  # the rotations, as all that differs by layer type, are read by `finish`
        names=gemma4.NAMES,
        finish=gemma4.finish_gemma4,
    ),
    Family(
        model_type="phi",
        settings=_geometry("rms_norm_eps", "head_dim", **_LAYER_NORM, **_PART, qk_layernorm=False, **_ONE_TWO)
        | {"hidden_act": "gelu_new"},
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={
            "order": "parallel",
            "norm": "layer-bias",
            "gated_mlp": False,
            "qk_norm": Key("qk_layernorm", lambda on: "layer-head" if on else None),
        },
        biases={"qkv": True, "out": True, "mlp": True, "head": True},
        rotary_factor=0.5,
        names={
            **_FC,
            "attention.out": "self_attn.dense",
            "attention.q_norm": "self_attn.q_layernorm",
            "attention.k_norm": "self_attn.k_layernorm",
            "head.norm": "model.final_layernorm",
        },
    ),
    Family(
        model_type="phi3",
        settings=_geometry(
            "head_dim",
            **_PART,
            rms_norm_eps=1e-5,
            original_max_position_embeddings=4096,
            sliding_window=None,
            bos_token_id=1,
            eos_token_id=32000,
        ),
        fixed={"attention_bias": False},
        windows="all",
        names={**_QKV, **_GATE_UP},
        gguf={
            **{f"attention.{x}": Source("attn_qkv", "qkv") for x in "qkv"},
            "mlp.gate": Source("ffn_up", "gate-up"),
            "mlp.up": Source("ffn_up", "gate-up"),
        },
    ),
    Family(
        model_type="smollm3",
        settings=_geometry(
            num_key_value_heads=4,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=None,
            no_rope_layers=None,
            no_rope_layer_interval=4,
            layer_types=None,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=True,
            bos_token_id=128000,
            eos_token_id=128001,
        ),
        biases={**_ATTENTION_BIAS, "mlp": "mlp_bias"},
        windows="listed",
        turns="listed",
        theta=2000000.0,
    ),
    Family(
        model_type="olmo2",
        settings=_geometry(rms_norm_eps=1e-5, attention_bias=False, eos_token_id=50279),
        fields={"order": "post", "qk_norm": "rms-width"},
        biases=_ATTENTION_BIAS,
        names={
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
    Family(
        model_type="olmo3",
        settings=_geometry(
            rms_norm_eps=1e-5, attention_bias=False, eos_token_id=50279, sliding_window=4096, layer_types=None
        ),
        fields={"order": "post", "qk_norm": "rms-width"},
        biases=_ATTENTION_BIAS,
        windows="pattern",
        pattern=4,
        ropes=("full", "sliding"),
        theta=500000.0,
        names={
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
    Family(
        model_type="granite",
        settings=_geometry(
            attention_bias=False,
            mlp_bias=False,
            embedding_multiplier=1.0,
            logits_scaling=1.0,
            residual_multiplier=1.0,
            attention_multiplier=1.0,
            **_ONE_TWO,
        ),
        fields={
            "embedding_scale": Key("embedding_multiplier"),
            "logit_scale": Key("logits_scaling", lambda scaling: 1 / scaling),
            "residual_scale": Key("residual_multiplier"),
            "attention_scale": Key("attention_multiplier"),
        },
        biases={**_ATTENTION_BIAS, "mlp": "mlp_bias"},
    ),
    Family(
        model_type="starcoder2",
        settings=_geometry(
            "rms_norm_eps",
            "head_dim",
            num_key_value_heads=2,
            norm_epsilon=1e-5,
            sliding_window=None,
            use_bias=True,
            tie_word_embeddings=True,
            bos_token_id=50256,
            eos_token_id=50256,
        )
        | {"hidden_act": "gelu_pytorch_tanh"},
        keys={"rms_norm_eps": "norm_epsilon"},
        fields={"norm": "layer-bias", "gated_mlp": False},
        fixed={"mlp_type": "default", "norm_type": "layer_norm"},
        biases={"qkv": "use_bias", "out": "use_bias", "mlp": "use_bias"},
        windows="all",
        names={"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    ),
    Family(
        model_type="stablelm",
        settings=_geometry(
            "rms_norm_eps",
            "head_dim",
            **_LAYER_NORM,
            **_PART,
            num_key_value_heads=32,
            use_qkv_bias=False,
            qk_layernorm=False,
            use_parallel_residual=False,
            bos_token_id=0,
            eos_token_id=0,
        ),
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={
            "order": Key("use_parallel_residual", lambda on: "parallel" if on else "pre"),
            "norm": "layer-bias",
            "qk_norm": Key("qk_layernorm", lambda on: "layer-heads" if on else None),
        },
        biases={"qkv": "use_qkv_bias"},
        rotary_factor=0.25,
        names={
            "attention.q_norm": Source("self_attn.q_layernorm.norms.{}", "per-head"),
            "attention.k_norm": Source("self_attn.k_layernorm.norms.{}", "per-head"),
        },
    ),
    Family(
        model_type="gpt_neox",
        settings=_geometry(
            "rms_norm_eps",
            "head_dim",
            "num_key_value_heads",
            **_LAYER_NORM,
            use_parallel_residual=True,
            attention_bias=True,
            rotary_pct=None,
            rotary_emb_base=None,
            bos_token_id=0,
            eos_token_id=2,
        )
        | {"hidden_act": "gelu"},
        keys={
            "rms_norm_eps": "layer_norm_eps",
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
        },
        fields={
            "order": Key("use_parallel_residual", lambda on: "parallel-two" if on else "pre"),
            "norm": "layer-bias",
            "gated_mlp": False,
        },
        biases={**_ATTENTION_BIAS, "mlp": True},
        rotary_factor=0.25,
        names={
            **{f"attention.{x}": Source("attention.query_key_value", "qkv-by-head") for x in "qkv"},
            "attention.out": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
            "embedding": "gpt_neox.embed_in",
            "layers": "gpt_neox.layers",
            "head.norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
    ),
    Family(
        model_type="gpt2",
        settings={
            "vocab_size": REQUIRED,
            "n_embd": REQUIRED,
            "n_layer": REQUIRED,
            "n_head": REQUIRED,
            "n_positions": REQUIRED,
            "n_ctx": None,  # n_positions once more, which nothing reads
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        fields={"norm": "layer-bias", "gated_mlp": False, "learned_positions": True},
        biases={"qkv": True, "out": True, "mlp": True},
        turns="none",
        names={
            **{f"attention.{x}": Source("attn.c_attn", "conv-qkv") for x in "qkv"},
            "attention.out": Source("attn.c_proj", "conv"),
            "mlp.up": Source("mlp.c_fc", "conv"),
            "mlp.down": Source("mlp.c_proj", "conv"),
            "attention_norm": "ln_1",
            "mlp_norm": "ln_2",
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "layers": "transformer.h",
            "head.norm": "transformer.ln_f",
        },
        prefix="transformer.",
    ),
    Family(
        model_type="glm",
        settings=_geometry(
            **_PART,
            head_dim=128,
            num_key_value_heads=2,
            rms_norm_eps=1.5625e-07,
            attention_bias=True,
            eos_token_id=[151329, 151336, 151338],
        ),
        biases={"qkv": "attention_bias"},
        rotary_factor=0.5,
        interleaved=True,
        names=_GATE_UP,
    ),
    Family(
        model_type="glm4",
        settings=_geometry(
            **_PART,
            head_dim=128,
            num_key_value_heads=2,
            rms_norm_eps=1.5625e-07,
            attention_bias=True,
            eos_token_id=[151329, 151336, 151338],
        ),
        fields={"order": "sandwich"},
        biases={"qkv": "attention_bias"},
        rotary_factor=0.5,
        interleaved=True,
        names={
            **_GATE_UP,
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
    ),
    Family(
        model_type="cohere",
        settings=_geometry(
            "rms_norm_eps",
            **_LAYER_NORM,
            logit_scale=0.0625,
            attention_bias=False,
            use_qk_norm=False,
            tie_word_embeddings=True,
            bos_token_id=5,
            eos_token_id=255001,
        ),
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={
            "order": "parallel",
            "norm": "layer",
            "logit_scale": Key("logit_scale"),
            "qk_norm": Key("use_qk_norm", lambda on: "layer-heads" if on else None),
        },
        biases=_ATTENTION_BIAS,
        theta=500000.0,
        interleaved=True,
    ),
    Family(
        model_type="cohere2",
        settings=_geometry(
            "rms_norm_eps",
            **_LAYER_NORM,
            logit_scale=0.0625,
            attention_bias=False,
            sliding_window=4096,
            sliding_window_pattern=4,
            layer_types=None,
            tie_word_embeddings=True,
            bos_token_id=5,
            eos_token_id=255001,
        ),
        keys={"rms_norm_eps": "layer_norm_eps"},
        fixed={
            "use_qk_norm": False,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "cache_implementation": "hybrid",
        },
        fields={"order": "parallel", "norm": "layer", "logit_scale": Key("logit_scale")},
        biases=_ATTENTION_BIAS,
        windows="pattern",
        pattern=4,
        turns="windowed",
        interleaved=True,
    ),
    Family(
        model_type="nemotron",
        settings=_geometry(
            "rms_norm_eps", **_PART, norm_eps=1e-5, attention_bias=False, mlp_bias=False, bos_token_id=2, eos_token_id=3
        )
        | {"hidden_act": "relu2"},
        keys={"rms_norm_eps": "norm_eps"},
        fields={"norm": "layer-bias", "gated_mlp": False},
        biases={**_ATTENTION_BIAS, "mlp": "mlp_bias"},
        rotary_factor=0.5,
        norm_plus=1.0,
    ),
    Family(
        model_type="exaone4",
        settings=_geometry(
            num_key_value_heads=32,
            rms_norm_eps=1e-5,
            sliding_window=4096,
            sliding_window_pattern=4,
            layer_types=None,
            bos_token_id=0,
            eos_token_id=2,
        ),
        fields={"order": "post", "qk_norm": "rms-head"},
        windows="pattern",
        pattern=4,
        turns="windowed-if-any",
        names={
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
    Family(
        model_type="ernie4_5",
        settings=_geometry(
            head_dim=128,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            use_bias=False,
            tie_word_embeddings=True,
            **_ONE_TWO,
        ),
        biases={"qkv": "use_bias", "out": "use_bias", "mlp": "use_bias"},
        theta=500000.0,
        interleaved=True,
    ),
    Family(
        model_type="hunyuan_v1_dense",
        settings=_geometry(rms_norm_eps=1e-5, attention_bias=False, **_ONE_TWO),
        fields={"qk_norm": "rms-head-late"},
        biases=_ATTENTION_BIAS,
        names={"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"},
    ),
    Family(
        model_type="seed_oss",
        settings=_geometry(
            num_key_value_heads=8,
            head_dim=128,
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
            bos_token_id=0,
            eos_token_id=2,
        ),
        biases={"qkv": "attention_bias", "out": "attention_out_bias", "mlp": "mlp_bias"},
    ),
    Family(
        model_type="helium",
        settings=_geometry(
            num_key_value_heads=20,
            head_dim=128,
            rms_norm_eps=1e-8,
            attention_bias=False,
            mlp_bias=False,
            **_ONE_TWO,
        ),
        biases={"qkv": "attention_bias", "mlp": "mlp_bias"},
        theta=100000.0,
        interleaved=True,
    ),
    Family(
        model_type="internlm3",
        # Its own code and transformers' class differ in what an absent size stands for.
        settings=_geometry(
            **_NEEDS_KV, head_dim=REQUIRED, rms_norm_eps=REQUIRED, qkv_bias=False, bias=False, **_ONE_TWO
        ),
        biases={"qkv": "qkv_bias", "out": "bias", "mlp": "bias"},
    ),
    Family(
        model_type="arcee",
        settings=_geometry(
            rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False, bos_token_id=128000, eos_token_id=128001
        )
        | {"hidden_act": "relu2"},
        fields={"gated_mlp": False},
        biases={**_ATTENTION_BIAS, "mlp": "mlp_bias"},
    ),
    Family(
        model_type="ministral3",
        settings=_geometry(
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            sliding_window=None,
            rope_parameters=REQUIRED,
            **_ONE_TWO,
        ),
        windows="all",
        theta=1000000.0,
    ),
    Family(
        model_type="mixtral",
        settings=_geometry(
            rms_norm_eps=1e-5,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
            num_key_value_heads=8,
            **_ONE_TWO,
        ),
        fields={"experts": ("num_local_experts", "num_experts_per_tok", "intermediate_size", True)},
        windows="all",
        theta=1000000.0,
        names={
            "mlp.router": "block_sparse_moe.gate",
            "mlp.gate.experts": "block_sparse_moe.experts.{}.w1",
            "mlp.up.experts": "block_sparse_moe.experts.{}.w3",
            "mlp.down.experts": "block_sparse_moe.experts.{}.w2",
        },
    ),
    Family(
        model_type="qwen2_moe",
        settings=_geometry(
            "head_dim",
            num_key_value_heads=16,
            **_WINDOW_SWITCH,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=None,
            qkv_bias=True,
        ),
        fields={"experts": ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")},
        biases={"qkv": "qkv_bias"},
        windows="switch-odd",
        names=_EXPERTS,
    ),
    Family(
        model_type="qwen3_moe",
        settings=_geometry(
            use_sliding_window=False,
            sliding_window=4096,
            max_window_layers=None,
            attention_bias=False,
            num_experts=None,
            num_local_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=None,
            num_key_value_heads=4,
        ),
        fields={
            "qk_norm": "rms-head",
            "experts": (
                "num_experts|num_local_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "norm_topk_prob",
            ),
        },
        biases=_ATTENTION_BIAS,
        windows="switch-all",
        names=_EXPERTS,
    ),
    Family(
        model_type="olmoe",
        settings=_geometry(
            "head_dim",
            rms_norm_eps=1e-5,
            attention_bias=False,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=False,
            eos_token_id=50279,
        ),
        fixed={"clip_qkv": None},
        fields={
            "qk_norm": "rms-width",
            "experts": ("num_experts", "num_experts_per_tok", "intermediate_size", "norm_topk_prob"),
        },
        biases=_ATTENTION_BIAS,
        names=_EXPERTS,
    ),
)
FAMILIES: Mapping[str, Family] = {row.model_type: row for row in _ROWS}
