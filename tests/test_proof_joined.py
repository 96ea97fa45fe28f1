"""The joined form, proved against transformers: a family for each order, kind of norm, of bias and of storage."""

from __future__ import annotations

from pathlib import Path

import pytest
from proof import MODELS, prove

from rollkv.models.checkpoint import open_checkpoint

FAMILIES = (
    "llama-bias",  # biases everywhere
    "qwen2-window",  # biases of q, k, v; layers with a window and without
    "qwen3",  # a norm of each head, tied
    "hunyuan",  # one behind the rotation
    "cohere",  # one for each head, parallel, a layer norm without bias
    "phi",  # parallel, a layer norm with bias, part of a head turns
    "phi-norm",  # the same with a layer norm of each head
    "gpt_neox",  # q, k, v stored by head
    "gpt_neox-sequential",  # biases of the MLP alone
    "gpt2",  # stored as (in, out), positions are learned
    "stablelm-parallel",  # parallel with one norm
    "gemma2",  # sandwich, soft-caps, a scale of its own
    "gemma3",  # sandwich with norms of the heads, two rotations
    "glm4",  # sandwich, gate and up stored together, interleaved pairs
    "olmo2",  # norms behind, one over all heads
    "starcoder2",  # no gate, layer norms
    "arcee",  # no gate, RMS norms
    "seed_oss",  # biases of attention
    "smollm3",  # layers that do not turn
    "ministral3",  # queries grow with the position
    "granite",  # scales of the embedding, residual, attention and logits
    "mixtral",  # experts in every layer
    "qwen2_moe",  # experts, a shared one, and a layer without
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_and_every_rung_equals_transformers(name: str, tmp_path: Path) -> None:
    prove(MODELS[name].save(tmp_path / "source"), tmp_path / "bundle", projections="joined")


@pytest.mark.parametrize("decode_attention", ["apart", "joined"])
@pytest.mark.parametrize("kv_layout", ["bskd", "bksd", "bksd-kt"])
def test_every_layout_and_form_of_decoding_does(kv_layout: str, decode_attention: str, tmp_path: Path) -> None:
    source = MODELS["llama"].save(tmp_path / "source")
    settings = {"kv_layout": kv_layout, "decode_attention": decode_attention}
    prove(source, tmp_path / "bundle", projections="joined", **settings)


def test_the_list_has_every_order_norm_and_bias_that_a_family_has(tmp_path: Path) -> None:
    def features(name: str) -> set[tuple[str, object]]:
        config = open_checkpoint(str(MODELS[name].save(tmp_path / name))).config
        return {
            ("order", config.order),
            ("norm", config.norm),
            ("norm of heads", config.qk_norm),
            ("biases", config.biases),
            ("norm and gate", (config.norm, config.gated_mlp)),
        }

    ours = set().union(*map(features, FAMILIES))
    every = set().union(*map(features, (name for name in MODELS if not name.startswith("gemma4"))))
    assert every - ours == set()
