"""Keys that are turned to another position: what transformers' rotary embedding gives there."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from rollkv.runtime.manifest import RopeInfo
from rollkv.runtime.sinks import pinned_delta, turn_keys

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def llama_rotary(dim, scaling=None):
    """transformers' rotary embedding, and the same as a manifest says it."""
    rope = {"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(
        hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, max_position_embeddings=256, rope_parameters=rope
    )
    module = LlamaRotaryEmbedding(config)
    frequencies = module.inv_freq.double().tolist()
    return module, info(frequencies, attention_scaling=module.attention_scaling)


def info(frequencies, **changes):
    settings = {"rotary_dim": 2 * len(frequencies), "interleaved": False, "attention_scaling": 1.0}
    return RopeInfo(inv_freq=list(frequencies), **{**settings, **changes})


def at_positions(module, keys, positions):
    """keys (n, heads, D) at positions (n,), turned by transformers."""
    k = torch.from_numpy(keys).permute(1, 0, 2)[None]  # (1, heads, n, D)
    cos, sin = module(k, torch.tensor(positions)[None])
    return apply_rotary_pos_emb(k, k, cos, sin)[1][0].permute(1, 0, 2).numpy()


def some_keys(*shape, dtype=np.float32):
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("scaling", [None, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("delta", [1, 7, 90, -3])
def test_a_turned_key_is_the_key_of_the_later_position(scaling, delta):
    module, rope = llama_rotary(16, scaling)
    assert (rope.attention_scaling != 1.0) == (scaling is not None)
    keys, positions = some_keys(5, 2, 16), np.array([3, 4, 10, 33, 57])
    turned = turn_keys(at_positions(module, keys, positions), delta, rope)
    np.testing.assert_allclose(turned, at_positions(module, keys, positions + delta), atol=1e-5, rtol=0)


def test_dimensions_beyond_the_rotary_ones_stay():
    module, rope = llama_rotary(8)
    keys, positions = some_keys(4, 2, 12), np.arange(4)

    def turned_to(where):
        return np.concatenate([at_positions(module, keys[..., :8], where), keys[..., 8:]], -1)

    turned = turn_keys(turned_to(positions), 20, rope)
    np.testing.assert_allclose(turned, turned_to(positions + 20), atol=1e-5, rtol=0)
    np.testing.assert_array_equal(turned[..., 8:], keys[..., 8:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("delta", [1, -100, 131_072, 1_000_003])
def test_each_pair_turns_as_a_complex_number_does(interleaved, delta):
    frequencies = 10000.0 ** -(np.arange(4) / 4)
    keys = some_keys(3, 5, 10, dtype=np.float64)
    a, b = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    want = (keys[..., a] + 1j * keys[..., b]) * np.exp(1j * delta * frequencies)
    turned = turn_keys(keys, delta, info(frequencies, interleaved=interleaved))
    np.testing.assert_allclose(turned[..., a], want.real, atol=1e-9, rtol=0)
    np.testing.assert_allclose(turned[..., b], want.imag, atol=1e-9, rtol=0)
    np.testing.assert_array_equal(turned[..., 8:], keys[..., 8:])


def test_pairs_that_rest_keep_their_numbers():
    keys = some_keys(6, 8)
    turned = turn_keys(keys, 1000, info([1.0, 0.1, 0.0, 0.0]))  # as rope type proportional has them
    np.testing.assert_array_equal(turned[:, [2, 3, 6, 7]], keys[:, [2, 3, 6, 7]])
    assert np.abs(turned[:, [0, 1, 4, 5]] - keys[:, [0, 1, 4, 5]]).min() > 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_dtype_stays_and_the_angle_is_not_rounded_to_it(dtype):
    rope = info([1.0, 0.0123])
    keys = some_keys(9, 4, dtype=dtype)
    turned = turn_keys(keys, 70_001, rope)
    assert turned.dtype == dtype
    want = turn_keys(keys.astype(np.float64), 70_001, rope)
    np.testing.assert_allclose(turned, want, atol=4 * np.finfo(dtype).eps, rtol=2 * np.finfo(dtype).eps)


@pytest.mark.parametrize(("delta", "rope"), [(5, None), (0, info([1.0, 0.5]))])
def test_keys_that_do_not_turn_are_copied(delta, rope):
    keys = some_keys(3, 4)
    turned = turn_keys(keys, delta, rope)
    np.testing.assert_array_equal(turned, keys)
    assert not np.shares_memory(turned, keys)


def test_the_keys_that_are_given_are_not_written_to():
    keys = some_keys(3, 4)
    before = keys.copy()
    keys.flags.writeable = False
    turn_keys(keys, 9, info([1.0, 0.5]))[:] = 0
    np.testing.assert_array_equal(keys, before)


def test_pinned_tokens_move_beside_the_oldest_token_that_is_seen():
    kv_len, sinks = 16, 4
    for end in range(1, 60):
        delta = pinned_delta(end, kv_len)
        seen = range(max(0, end - kv_len), end)
        assert [s + delta for s in range(min(sinks, end))] == list(seen[:sinks])
