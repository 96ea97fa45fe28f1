"""Families with norms after attention and MLP too, or only there."""

from __future__ import annotations

from typing import Any

from rollkv.models.family import (
    ATTENTION_BIAS,
    GATE_UP,
    GEMMA,
    GGUF_SANDWICH,
    GLM,
    POST,
    QUERY_SCALE,
    SANDWICH,
    SQRT_H,
    Family,
    Key,
    geometry,
)

_GEMMA_SETTINGS = geometry(  # of gemma2 and gemma3_text
    "hidden_act",
    **GEMMA,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
    layer_types=None,
)
_GEMMA_FIXED = {"use_bidirectional_attention": False, "cache_implementation": "hybrid"}
_GEMMA: dict[str, Any] = {
    "keys": {"hidden_act": "hidden_activation"},
    "biases": ATTENTION_BIAS,
    "windows": "pattern",
    "names": SANDWICH,
    "gguf": GGUF_SANDWICH,
    "norm_plus": 1.0,
}
_GEMMA_FIELDS = {
    "order": "sandwich",
    "embedding_scale": SQRT_H,
    "attention_scale": QUERY_SCALE,
    "logit_softcap": Key("final_logit_softcapping"),
}

ROWS = (
    Family(
        model_type="gemma2",
        settings={**_GEMMA_SETTINGS, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        fixed={**_GEMMA_FIXED, "hidden_act": "gelu_pytorch_tanh"},
        fields={**_GEMMA_FIELDS, "attention_softcap": Key("attn_logit_softcapping")},
        pattern=2,
        **_GEMMA,
    ),
    Family(
        model_type="gemma3_text",
        image_attention="bidirectional",
        settings={
            **_GEMMA_SETTINGS,
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": 6,
            "final_logit_softcapping": None,
            "rope_local_base_freq": 10000.0,
        },
        fixed={**_GEMMA_FIXED, "attn_logit_softcapping": None},  # its class keeps it and does not apply it
        fields={**_GEMMA_FIELDS, "qk_norm": "rms-head"},
        pattern=6,
        ropes=("full", "sliding"),
        theta=1000000.0,
        **_GEMMA,
    ),
    Family(
        model_type="olmo2",
        settings=geometry(rms_norm_eps=1e-5, attention_bias=False, eos_token_id=50279),
        fields={"order": "post", "qk_norm": "rms-width"},
        biases=ATTENTION_BIAS,
        names=POST,
    ),
    Family(
        model_type="olmo3",
        settings=geometry(
            rms_norm_eps=1e-5, attention_bias=False, eos_token_id=50279, sliding_window=4096, layer_types=None
        ),
        fields={"order": "post", "qk_norm": "rms-width"},
        biases=ATTENTION_BIAS,
        windows="pattern",
        pattern=4,
        ropes=("full", "sliding"),
        theta=500000.0,
        names=POST,
    ),
    Family(
        model_type="glm4",
        fields={"order": "sandwich"},
        names={
            **GATE_UP,
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        **GLM,
    ),
    Family(
        model_type="exaone4",
        settings=geometry(
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
        names=POST,
    ),
)
