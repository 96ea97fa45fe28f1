"""Tiny models of every family: odd sizes, windows, every feature that a config can ask for.

heads != kv heads, kv heads == heads / kv heads, head_dim x heads != hidden, windows shorter and longer than c = 8.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conftest import SMALL

BASE = {**SMALL, "vocab_size": 211, "pad_token_id": 0}
SQUARE = {"num_attention_heads": 9, "num_key_value_heads": 3}  # kv heads == heads / kv heads
WIDE = {"head_dim": 16}  # 6 x 16 != 36
GPT2 = {
    "vocab_size": 211,
    "n_embd": 36,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 22}

FAMILY_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-dynamic": (
        "llama",
        {
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "gemma": ("gemma", {**WIDE}),
    "gemma2": (
        "gemma2",
        {
            **WIDE,
            "num_hidden_layers": 3,
            "sliding_window": 11,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 9,
        },
    ),
    "gemma3": ("gemma3_text", {**WIDE, "num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 3}),
    "gemma3-linear": (
        "gemma3_text",
        {
            **SQUARE,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi": ("phi", {"num_key_value_heads": 6, "partial_rotary_factor": 0.34, "hidden_size": 72}),
    "phi-norm": ("phi", {"qk_layernorm": True, "num_key_value_heads": 3, "hidden_size": 48}),
    "phi3": ("phi3", {"hidden_size": 48, "sliding_window": 9}),
    "phi3-longrope": (
        "phi3",
        {
            "hidden_size": 48,
            "original_max_position_embeddings": 40,
            "max_position_embeddings": 160,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 4.5, 8.0],
            },
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "smollm3",
        {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7},
    ),
    "olmo2": ("olmo2", {**SQUARE}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 10,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 12}),
    "stablelm": ("stablelm", {"hidden_size": 48, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "stablelm",
        {"hidden_size": 48, "use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    ),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None, "hidden_size": 48, "rotary_pct": 0.5}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {
            "num_key_value_heads": None,
            "hidden_size": 48,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
        },
    ),
    "gpt2": ("gpt2", GPT2),
    "glm": ("glm", {**WIDE}),
    "glm4": ("glm4", {**WIDE, "attention_bias": False}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 7, "logit_scale": 0.3}),
    "nemotron": ("nemotron", {**WIDE}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 9, "head_dim": 16}),
    "exaone4-global": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5": ("ernie4_5", {**WIDE, "use_bias": True}),
    "hunyuan": ("hunyuan_v1_dense", {**WIDE}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {**WIDE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "gemma3-dynamic": (
        "gemma3_text",
        {
            **WIDE,
            "max_position_embeddings": 32,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "mixtral-one": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "seed_oss": ("seed_oss", {**WIDE, "attention_out_bias": True}),
    "helium": ("helium", {"head_dim": 6}),
    "arcee": ("arcee", {**SQUARE}),
    "ministral3": (
        "ministral3",
        {
            **WIDE,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "internlm3": ("internlm3", {**WIDE, "qkv_bias": True, "bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **EXPERTS,
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 18,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, **WIDE, "num_local_experts": 5}),
    "olmoe": ("olmoe", {**SQUARE, "num_experts": 5, "num_experts_per_tok": 2}),
}


def make_family(folder: Path, name: str, **more: Any) -> Path:
    """Save a random model of transformers' own class; norms, biases and weights large enough that an error shows.

    internlm3 has no class there: it is saved as llama, and its config rewritten.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, extra = FAMILY_SHAPES[name]
    settings = {**({} if family == "gpt2" else BASE), **extra, **more}
    if family == "internlm3":
        settings |= {"attention_bias": settings["qkv_bias"] or settings["bias"], "mlp_bias": settings["bias"]}
    config = AutoConfig.for_model("llama" if family == "internlm3" else family, **settings)
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
            elif float(parameter.std()) < 0.1:  # norms of several heads start at 1, some parameters at zero
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    if family == "internlm3":
        file = folder / "config.json"
        raw = json.loads(file.read_text(encoding="utf-8"))
        del raw["attention_bias"], raw["mlp_bias"]
        file.write_text(json.dumps({**raw, "model_type": "internlm3"}), encoding="utf-8")
    return folder
