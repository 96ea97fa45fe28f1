"""Tiny models of gemma4_text: two head sizes, shared keys and values, rows for each layer, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 5,
    "layer_types": [SLIDING, FULL] * 2,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 211,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 14}
SHARED = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 3,
}
ROPE = {
    SLIDING: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
    FULL: {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5, "factor": 4.0},
}
EXPORTED: dict[str, dict[str, Any]] = {
    # a window longer than c; three layers read the caches of two others, with an MLP twice as wide
    "shared": {**SHARED, "sliding_window": 11, "use_double_wide_mlp": True, "dtype": "bfloat16"},
    # a window shorter than c; every layer has a cache of its own; values from the keys' projection; heads that differ
    # in number too; no rows for each layer; biases; soft-capped logits; experts
    "keys": {
        "final_logit_softcapping": 5.0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 3,
        "hidden_size_per_layer_input": 0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        **EXPERTS,
    },
}
IN_TORCH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the model, the graphs
    "no layer shares": (
        {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "final_logit_softcapping": 5.0},
        {},
    ),
    "full layers only": ({"layer_types": [FULL] * 2, "num_kv_shared_layers": 1}, {}),
    "all at once": ({**SHARED, **EXPERTS, "attention_k_eq_v": True}, {"kv_layout": "bksd"}),
    "the last layer has no window": ({"layer_types": [FULL, SLIDING, SLIDING], "num_hidden_layers": 3}, {}),
    "other rotations": ({"rope_parameters": ROPE, "hidden_activation": "gelu"}, {"kv_layout": "bksd-kt"}),
    "one head size": ({"global_head_dim": 8}, {}),
    "embeddings as input": (SHARED, {"input": "embeds"}),
}


def save(folder: Path, dtype: str = "float32", **more: Any) -> Path:
    """A random model of transformers' own class; norms, scalars and weights so large that a wrong one shows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **{**BASE, **more}))
    torch.manual_seed(len(more))
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith("layer_scalar"):
                tensor.uniform_(0.6, 1.6)
            elif key.endswith("bias"):
                tensor.normal_(0.0, 0.5)
            elif tensor.ndim == 1:
                tensor.normal_(1.0, 0.3)
            else:
                tensor.normal_(0.0, 0.3)
        model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
