"""Families with a mixture of experts."""

from __future__ import annotations

from rollkv.models.family import ATTENTION_BIAS, EXPERTS, ONE_TWO, WINDOW_SWITCH, ExpertKeys, Family, geometry

ROWS = (
    Family(
        model_type="mixtral",
        settings=geometry(
            rms_norm_eps=1e-5,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
            num_key_value_heads=8,
            **ONE_TWO,
        ),
        experts=ExpertKeys(count=("num_local_experts",), width="intermediate_size", normalise=None),
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
        settings=geometry(
            "head_dim",
            num_key_value_heads=16,
            **WINDOW_SWITCH,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=None,
            qkv_bias=True,
        ),
        experts=ExpertKeys(count=("num_experts",)),
        biases={"qkv": "qkv_bias"},
        windows="odd",
        names=EXPERTS,
    ),
    Family(
        model_type="qwen3_moe",
        settings=geometry(
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
        fields={"qk_norm": "rms-head"},
        experts=ExpertKeys(count=("num_experts", "num_local_experts")),
        biases=ATTENTION_BIAS,
        windows="all",
        names=EXPERTS,
    ),
    Family(
        model_type="olmoe",
        settings=geometry(
            "head_dim",
            rms_norm_eps=1e-5,
            attention_bias=False,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=False,
            eos_token_id=50279,
        ),
        fixed={"clip_qkv": None},
        fields={"qk_norm": "rms-width"},
        experts=ExpertKeys(count=("num_experts",), width="intermediate_size"),
        biases=ATTENTION_BIAS,
        names=EXPERTS,
    ),
)
