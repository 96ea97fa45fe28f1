"""Rotary embeddings against transformers' own: frequencies to the last bit, tables near and far, the look-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma4TextConfig, LlamaConfig, Ministral3Config, Phi3Config, Qwen2VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from rollkv.models.config import RopeConfig
from rollkv.models.rope import Rope, inverse_frequencies, query_scales, rope_tables, rotate, rotate_apart
from rollkv.models.rope_settings import merge_rope, read_rope

POSITIONS = torch.tensor([[0, 1, 1000, 5000, 32767, 99_999]])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8192}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": {**YARN, "rope_theta": 150000.0, "factor": 32, "beta_fast": 16.0, "beta_slow": 2, "truncate": False},
    "yarn-mscales": {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-one-mscale": {**YARN, "mscale": 0.707},
    "yarn-attention": {**YARN, "attention_factor": 1.25, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-ratio": {**YARN, "factor": None},
    "longrope": LONGROPE,
    "longrope-factor": {**LONGROPE, "rope_theta": 1e6, "factor": 8.0},
    "longrope-attention": {**LONGROPE, "attention_factor": 1.19},
    "proportional": PROPORTIONAL,
    "proportional-factor": {**PROPORTIONAL, "partial_rotary_factor": 0.3, "factor": 8.0},
}


def llama(rope: dict[str, Any], head_dim: int = 16, max_position: int = 32768) -> LlamaConfig:
    rope = dict(rope)
    if rope["rope_type"] == "longrope":
        pairs = range(int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2)
        rope |= {"short_factor": [1.0 + 0.03 * i for i in pairs], "long_factor": [1.5 + 0.7 * i for i in pairs]}
    return LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=max_position, rope_parameters=rope
    )


def ours(config: Any, head_dim: int | None = None, kind: str | None = None) -> RopeConfig:
    """Our reading of the config.json that transformers would write."""
    raw = config.to_dict()
    settings = merge_rope(raw, theta_default=10000.0, kind=kind)
    head_dim = head_dim or raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return read_rope(
        settings,
        head_dim=head_dim,
        rotary_dim=int(head_dim * settings.get("partial_rotary_factor", 1.0)),
        max_position=raw["max_position_embeddings"],
        interleaved=False,
        where="config.json",
    )[0]


def with_values(rope: RopeConfig, max_position: int, slots: int) -> Rope:
    module = Rope(rope, max_position)
    cos, sin = rope_tables(rope, max_position, slots)
    values = {"cos": cos, "sin": sin}
    scales = query_scales(rope, max_position)
    if scales is not None:
        values["query_scale"] = scales
    module.load_state_dict(values)
    return module


def heads_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("name", SCALED)
def test_frequencies_and_attention_scaling_equal_transformers_to_the_last_bit(name: str, head_dim: int) -> None:
    config = llama(SCALED[name], head_dim)
    rope = ours(config)
    for slots in (1, 8192, 8193, 32768, 40_000, 131_072):
        expected, scaling = ROPE_INIT_FUNCTIONS[rope.type](config, torch.device("cpu"), seq_len=slots)
        got = inverse_frequencies(rope, slots)
        assert got.dtype == torch.float32
        assert torch.equal(got, expected), slots
        assert rope.attention_scaling == scaling


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn", "yarn-betas", "longrope"])
def test_frequencies_of_a_part_of_the_head_equal_transformers_to_the_last_bit(name: str) -> None:
    config = llama({**SCALED[name], "partial_rotary_factor": 0.4}, head_dim=80)
    rope = ours(config)
    assert rope.rotary_dim == 32
    expected, _ = ROPE_INIT_FUNCTIONS[rope.type](config, torch.device("cpu"), seq_len=50_000)
    assert torch.equal(inverse_frequencies(rope, 50_000), expected)


@pytest.mark.parametrize("theta", [10000.0, 1e6, 11_158_840.0])
def test_plain_frequencies_equal_transformers_to_the_last_bit(theta: float) -> None:
    config = llama({"rope_type": "default", "rope_theta": theta}, head_dim=96)
    assert torch.equal(inverse_frequencies(ours(config), 1), LlamaRotaryEmbedding(config).inv_freq)


def test_factors_hang_on_the_slots_only_above_the_original_length() -> None:
    longrope, dynamic = ours(llama(SCALED["longrope"])), ours(llama(SCALED["dynamic"]))
    short, long = inverse_frequencies(longrope, 8192), inverse_frequencies(longrope, 8193)
    assert torch.equal(short, inverse_frequencies(longrope, 100))
    assert torch.equal(long, inverse_frequencies(longrope, 100_000))
    assert (short / long).max() > 2
    assert torch.equal(inverse_frequencies(dynamic, 100), inverse_frequencies(dynamic, 32768))
    assert (inverse_frequencies(dynamic, 32768) / inverse_frequencies(dynamic, 65536)).max() > 2


@pytest.mark.parametrize("slots", [4096, 100_000])
@pytest.mark.parametrize("name", ["default", *SCALED])
def test_tables_equal_transformers_rotary_embedding_near_and_far(name: str, slots: int) -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = llama(SCALED.get(name, plain))
    rope = ours(config)
    theirs = LlamaRotaryEmbedding(config)
    if rope.type in ("dynamic", "longrope"):  # what they would choose by the text's length, set once as in a graph
        theirs.inv_freq = ROPE_INIT_FUNCTIONS[rope.type](config, torch.device("cpu"), seq_len=slots)[0]
    forward = LlamaRotaryEmbedding.forward.__wrapped__
    expected_cos, expected_sin = forward(theirs, torch.zeros(1), POSITIONS)
    cos, sin = rope_tables(rope, 100_000, slots)
    half, pairs = rope.rotary_dim // 2, rope.pairs
    assert cos.shape == sin.shape == (100_000, pairs)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos[POSITIONS[0]], expected_cos[0, :, :pairs])
    assert torch.equal(sin[POSITIONS[0]], expected_sin[0, :, half : half + pairs])
    assert (expected_sin[0, :, half + pairs :] == 0).all(), "the other pairs stay as they are"
    if name != "default" and (name, slots) != ("dynamic", 4096):
        unscaled, _ = rope_tables(RopeConfig(type="default", theta=rope.theta, rotary_dim=16), 5001, slots)
        rows = POSITIONS[0, :4]
        assert name.startswith("proportional") or (cos[rows] - unscaled[rows]).abs().max() > 0.05, (
            "leaving the scaling out must show"
        )


@pytest.mark.parametrize(("name", "last"), [("longrope", 8191), ("longrope", 8192), ("dynamic", 99_999)])
def test_transformers_itself_chooses_these_factors_for_a_text_that_fills_the_cache(name: str, last: int) -> None:
    config = llama(SCALED[name])
    positions = torch.tensor([[0, 1, 1000, last]])
    expected, _ = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    cos, _ = rope_tables(ours(config), last + 1, last + 1)
    # for dynamic it takes the length from a float32 tensor, which costs it some bits of theta
    torch.testing.assert_close(cos[positions[0]], expected[0, :, :8], rtol=0, atol=0 if name == "longrope" else 2e-4)


def test_proportional_frequencies_equal_those_of_gemma4() -> None:
    config = Gemma4TextConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=2, head_dim=16, global_head_dim=32,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=32768,
    )  # fmt: skip
    theirs = Gemma4TextRotaryEmbedding(config)
    for kind, head_dim in (("full_attention", 32), ("sliding_attention", 16)):
        rope = ours(config, head_dim, kind)
        cos, sin = theirs(torch.zeros(1), POSITIONS, kind)
        own_cos, own_sin = rope_tables(rope, 100_000, 1)
        assert own_cos.shape == (100_000, rope.pairs)
        assert torch.equal(own_cos[POSITIONS[0]], cos[0, :, : rope.pairs])
        assert torch.equal(own_sin[POSITIONS[0]], sin[0, :, : rope.pairs])
        x = torch.randn(1, len(POSITIONS[0]), 3, head_dim)
        turned = rotate_apart(x, *with_values(rope, 100_000, 1)(POSITIONS.to(torch.int32)))
        torch.testing.assert_close(turned, apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0])
        assert (rope.type, rope.rotated_pairs) == (("proportional", 4) if head_dim == 32 else ("default", None))


def test_the_module_and_rotate_turn_heads_as_transformers_does() -> None:
    config = llama(YARN)
    x = torch.randn(1, 6, 3, 16)
    cos, sin = LlamaRotaryEmbedding(config)(x, POSITIONS)
    expected, _ = apply_rotary_pos_emb(heads_last(x), heads_last(x), cos, sin)
    own_cos, own_sin = with_values(ours(config), 100_000, 8)(POSITIONS.to(torch.int32))
    assert own_cos.shape == own_sin.shape == (1, 6, 1, 16)
    assert torch.equal(rotate(x, own_cos, own_sin), heads_last(expected))


def test_only_the_first_part_of_a_head_turns() -> None:
    config = Phi3Config(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=131072, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    )  # fmt: skip
    x = torch.randn(1, 6, 2, 32)
    cos, sin = Phi3RotaryEmbedding(config)(x, POSITIONS)
    expected, _ = apply_partial(heads_last(x), heads_last(x), cos, sin)
    rope = ours(config)
    assert rope.rotary_dim == 24
    turned = rotate(x, *with_values(rope, 100_000, 8)(POSITIONS))
    assert torch.equal(turned, heads_last(expected))
    assert torch.equal(turned[..., 24:], x[..., 24:])


def test_sections_turn_by_three_different_positions_as_in_qwen2_vl() -> None:
    config = Qwen2VLTextConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=32768,
        rope_parameters={"type": "mrope", "rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    positions = torch.tensor([[[0, 5, 17, 900]], [[3, 40, 2, 31]], [[999, 8, 250, 64]]])
    x = torch.randn(1, 4, 2, 16)
    cos, sin = Qwen2VLRotaryEmbedding(config)(x, positions)
    expected, _ = apply_rotary_pos_emb(heads_last(x), heads_last(x), cos, sin)
    rope = ours(config)
    assert rope.sections == (2, 3, 3)
    module = with_values(rope, 1000, 8)
    own_cos, own_sin = module(positions)
    assert own_cos.shape == own_sin.shape == (1, 4, 1, 16)
    assert torch.equal(rotate(x, own_cos, own_sin), heads_last(expected))
    for swapped in ([1, 0, 2], [0, 2, 1]):
        assert not torch.equal(module(positions[swapped])[0], own_cos)


def test_three_equal_positions_are_the_plain_rotation() -> None:
    plain = RopeConfig(type="default", theta=10000.0, rotary_dim=16)
    sections = RopeConfig(type="default", theta=10000.0, rotary_dim=16, sections=(4, 2, 2))
    positions = torch.tensor([[0, 7, 99]])
    expected = with_values(plain, 100, 8)(positions)
    got = with_values(sections, 100, 8)(positions.repeat(3, 1, 1))
    assert all(map(torch.equal, got, expected))


def test_the_query_scale_equals_that_of_ministral3() -> None:
    config = Ministral3Config(hidden_size=32, num_attention_heads=2, head_dim=16)
    rope = ours(config)
    assert rope.query_scale == (0.1, 16384)
    near_steps = torch.tensor([[0, 16383, 16384, 32767, 32768, 99_999]])
    expected = get_llama_4_attn_scale(near_steps, 0.1, 16384)  # (1, 1, c, 1)
    _, _, scale = with_values(rope, 100_000, 8)(near_steps)
    assert scale.shape == (1, 6, 1, 1)
    assert torch.equal(scale, expected.transpose(1, 2))
    assert scale.flatten()[0] == 1
    assert scale.max() > 1.1


def test_there_is_no_query_scale_unless_asked_for() -> None:
    plain = RopeConfig(type="default", theta=10000.0, rotary_dim=16)
    assert query_scales(plain, 10) is None
    assert {name for name, _ in Rope(plain, 10).named_parameters()} == {"cos", "sin"}


def test_the_graph_needs_only_simple_operations_of_rank_4_at_most() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.three = Rope(RopeConfig(type="default", theta=1e4, rotary_dim=8, sections=(1, 1, 2)), 64)
            self.scaled = Rope(RopeConfig(type="default", theta=1e4, rotary_dim=8, query_scale=(0.1, 4)), 64)

        def forward(self, three: Tensor, one: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            return rotate(x, *self.three(three)), *self.scaled(one)

    feeds = torch.zeros(3, 1, 4, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 4, 2, 12)
    program = torch.export.export(Whole().eval(), feeds)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert {node.target.__name__.split(".")[0] for node in calls} <= {
        "embedding", "select", "narrow", "slice", "cat", "neg", "unsqueeze", "mul", "add",
    }  # fmt: skip
    assert max(node.meta["val"].dim() for node in calls) == 4
