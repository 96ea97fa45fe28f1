import itertools
import json
import random
import struct
import tracemalloc

import numpy as np
import pytest
import tiny_gguf
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from tiny_gguf import metadata, random_blocks, random_tensors, shapes, write_gguf
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollkv.models.config import CheckpointError
from rollkv.models.gguf_file import read_gguf

HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    *layer, part, suffix = name.split(".")
    return ".".join(([f"model.layers.{layer[1]}"] if layer else []) + [HF_NAMES[part], suffix])


@pytest.fixture
def tiny(tmp_path):
    """Write a tiny llama file with some keys and tensors changed; None leaves one out."""

    def write(values=None, tensors=None, **kwargs):
        found = random_tensors(shapes()) | (tensors or {})
        found = {name: tensor for name, tensor in found.items() if tensor is not None}
        return write_gguf(tmp_path / "tiny.gguf", metadata() | (values or {}), found, **kwargs)

    return write


def reference(path, config) -> dict[str, np.ndarray]:
    """The state dict that transformers reads from the same file."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    return {name: tensor.float().numpy() for name, tensor in loaded.items()}


def assert_same_tensors(path):
    file = read_gguf(path)
    expected = reference(path, file.config)
    assert {hf_name(name) for name in file.tensors} == set(expected)
    for name, tensor in file.tensors.items():
        wanted = expected[hf_name(name)]
        assert tensor.shape == wanted.shape
        cuts = sorted({0, 1, 5, tensor.shape[0] - 3, tensor.shape[0]})
        parts = [tensor.read(start, stop) for start, stop in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), wanted, err_msg=name)
        np.testing.assert_array_equal(tensor.read(0, tensor.shape[0]), wanted, err_msg=name)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize(("architecture", "bias"), [("llama", ""), ("qwen2", "qkv")])
def test_every_tensor_is_what_transformers_reads(tmp_path, architecture, bias, kind):
    tensors = random_tensors(shapes(bias=bias, tied=architecture == "llama"))
    path = write_gguf(tmp_path / "m", metadata(architecture), tensors, architecture=architecture, kind=kind)
    assert_same_tensors(path)


def test_biases_of_a_llama_are_what_transformers_reads(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", metadata(), random_tensors(shapes(bias="qkvo", tied=False)))
    assert read_gguf(path).config["attention_bias"] is True
    assert read_gguf(path).config["tie_word_embeddings"] is False
    assert_same_tensors(path)


def test_a_qwen3_with_norms_of_its_heads_is_what_transformers_reads(tmp_path, monkeypatch):
    monkeypatch.setitem(HF_NAMES, "attn_q_norm", "self_attn.q_norm")
    monkeypatch.setitem(HF_NAMES, "attn_k_norm", "self_attn.k_norm")
    wide = {"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32}  # 4 heads x 32 is not 64
    wanted = shapes()
    for i in range(tiny_gguf.LAYERS):
        wanted |= {f"blk.{i}.attn_{part}_norm.weight": (32,) for part in "qk"}
        wanted |= {f"blk.{i}.attn_q.weight": (128, 64), f"blk.{i}.attn_output.weight": (64, 128)}
        wanted |= {f"blk.{i}.attn_{part}.weight": (64, 64) for part in "kv"}
    path = write_gguf(tmp_path / "m", metadata("qwen3") | wide, random_tensors(wanted), architecture="qwen3")
    assert read_gguf(path).config["head_dim"] == 32
    assert_same_tensors(path)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_super_blocks_are_what_transformers_reads(tmp_path, kind):
    stored = GGMLQuantizationType[kind]
    tensors = random_tensors(shapes(hidden=256))
    tensors = {name: t if t.ndim == 1 else random_blocks(t.shape, stored) for name, t in tensors.items()}
    assert_same_tensors(write_gguf(tmp_path / "m.gguf", metadata(hidden=256), tensors, kind=kind))


def test_rows_of_q_and_k_come_in_rotate_half_order_in_any_slice(tiny):
    heads, size = tiny_gguf.KV_HEADS, tiny_gguf.HIDDEN // tiny_gguf.HEADS
    original = np.arange(heads * size, dtype=np.float32)[:, None] * np.ones(tiny_gguf.HIDDEN, np.float32)
    interleaved = original.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(original.shape)
    tensor = read_gguf(tiny(tensors={"blk.0.attn_k.weight": interleaved})).tensors["blk.0.attn_k.weight"]
    for start in range(heads * size):
        for stop in range(start, heads * size + 1):
            np.testing.assert_array_equal(tensor.read(start, stop), original[start:stop])


def test_reading_a_slice_takes_memory_for_the_slice_only(tmp_path):
    table = np.zeros((40_000, 64), np.float32)
    values = metadata() | {"tokenizer.ggml.token_type": None}
    path = write_gguf(tmp_path / "m", values, random_tensors(shapes()) | {"token_embd.weight": table}, kind="Q8_0")
    tensor = read_gguf(path).tensors["token_embd.weight"]
    tensor.read(0, 1)
    tracemalloc.start()
    tensor.read(20_000, 20_100)
    small = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    whole = tensor.read(0, 40_000).nbytes
    large = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert small < 20 * 100 * 64 * 4
    assert large < 1.5 * whole


def test_the_config_speaks_the_words_of_config_json(tiny):
    extra = {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.ggml.eom_token_id": 1,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 7,
        "llama.expert_count": 0,
    }
    assert read_gguf(tiny(extra)).config == {
        "model_type": "llama",
        "vocab_size": 7,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": [1, 4],
    }


def test_biases_are_in_the_config(tiny):
    config = read_gguf(tiny({}, {"blk.0.ffn_up.bias": np.zeros(96, np.float32)})).config
    assert (config["mlp_bias"], config["attention_bias"]) == (True, False)


@pytest.mark.parametrize("number", [1e-5, 1e-6, 0.1, 3e-7, 123456.7])
def test_a_float32_is_the_shortest_decimal_that_means_it(tiny, number):
    config = read_gguf(tiny({"llama.attention.layer_norm_rms_epsilon": number, "llama.rope.freq_base": number})).config
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (number, number)


@pytest.mark.parametrize(
    ("values", "rope"),
    [
        ({"scaling.type": "none"}, {"rope_type": "default"}),
        ({"scaling.type": "linear", "scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.type": "linear", "scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.type": "none", "scale_linear": 4.0, "scaling.factor": 2.0}, {"rope_type": "default"}),
    ],
)
def test_rope_scaling_is_in_the_config(tiny, values, rope):
    config = read_gguf(tiny({f"llama.rope.{key}": value for key, value in values.items()})).config
    assert config["rope_parameters"] == {"rope_theta": 10000.0} | rope


def llama3_divisors(factor: float, low: float = 1.0) -> np.ndarray:
    """What llama.cpp's converter stores, from the frequencies of transformers."""
    scaling = {"factor": factor, "low_freq_factor": low, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192} | scaling
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2).float() / 128)
    return (plain / scaled).numpy().astype(np.float32)


LONG_HEADS = {"llama.attention.key_length": 128, "llama.attention.value_length": 128, "llama.rope.freq_base": 500000.0}
LONG_TENSORS = {
    f"blk.{i}.attn_{part}.weight": np.zeros((128 * heads, 64), np.float32)
    for i in range(tiny_gguf.LAYERS)
    for part, heads in (("q", 4), ("k", 2), ("v", 2))
}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_divisors_of_llama3_become_its_scaling(tiny, factor):
    file = read_gguf(tiny(LONG_HEADS, LONG_TENSORS | {"rope_freqs.weight": llama3_divisors(factor)}))
    assert file.config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in file.tensors


def test_rotary_divisors_of_one_scale_nothing(tiny):
    config = read_gguf(tiny(tensors={"rope_freqs.weight": np.ones(8, np.float32)})).config
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("divisors", [llama3_divisors(16.0), llama3_divisors(8.0, low=2.0), np.ones(9, np.float32)])
def test_other_rotary_divisors_are_refused(tiny, divisors):
    path = tiny(LONG_HEADS, LONG_TENSORS | {"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: tensor 'rope_freqs.weight' of shape .* in another way"):
        read_gguf(path)


def test_the_text_files_carry_template_and_ends(tiny):
    files = read_gguf(tiny({"tokenizer.chat_template": "{{ héllo }}", "tokenizer.ggml.eot_token_id": 4})).text_files()
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert files["chat_template.jinja"].decode() == "{{ héllo }}"
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 0, "eos_token_id": [1, 4]}
    assert "chat_template.jinja" not in read_gguf(tiny()).text_files()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"general.alignment": 24}, "general.alignment is 24, not a power of two"),
        ({"split.count": 3}, r"one of 3 parts of a split GGUF file; join them with `llama-gguf-split --merge` first"),
        ({"llama.block_count": None}, "the metadata has no key 'llama.block_count'"),
        ({"llama.block_count": "2"}, "metadata key 'llama.block_count' is '2', not an integer of 1 to 2147483647"),
        ({"llama.block_count": 3}, "block_count is 3, but the file has tensors of 2 layers, the last 1"),
        (
            {"llama.feed_forward_length": [1, 2]},
            r"'llama.feed_forward_length' is an array of 2 x int32, not an",
        ),
        ({"llama.rope.freq_base": float("nan")}, "'llama.rope.freq_base' is nan, not a finite number above 0"),
        ({"llama.attention.causal": False}, "llama.attention.causal is false; only causal attention"),
        ({"llama.attention.causal": 1}, "metadata key 'llama.attention.causal' is 1, not true or false"),
        ({"llama.expert_count": 8}, r"a mixture of 8 experts \(llama.expert_count\) is not supported"),
        ({"llama.logit_scale": 0.5}, "metadata key 'llama.logit_scale' = 0.5 is not understood"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8; only the head's size, 16, is supported"),
        ({"llama.attention.key_length": 15}, "heads of odd size 15 cannot be rotated"),
        ({"llama.attention.head_count": 7}, "embedding_length 64 is no multiple of llama.attention.head_count 7"),
        ({"llama.attention.head_count_kv": 4}, "tensor 'blk.0.attn_k.weight' has 32 rows, not 4 heads x 16"),
        ({"llama.embedding_length": 32}, r"'token_embd.weight' has shape \[7, 64\], not \[vocabulary, 32\]"),
        ({"llama.vocab_size": 9}, "llama.vocab_size is 9, 'token_embd.weight' has 7 rows"),
        ({"tokenizer.ggml.tokens": list("abcdefgh")}, "8 tokens, but 'token_embd.weight' has 7 rows"),
        ({"tokenizer.ggml.tokens": "ab"}, "'tokenizer.ggml.tokens' is 'ab', not an array of strings"),
        ({"tokenizer.ggml.eos_token_id": 7}, "'tokenizer.ggml.eos_token_id' is 7, not one of 7 tokens"),
        ({"llama.rope.scaling.type": "yarn"}, "type is 'yarn'; supported: 'none', 'linear'"),
        ({"llama.rope.scaling.type": 1}, "'llama.rope.scaling.type' is 1, not a string"),
        ({"llama.rope.scaling.type": "linear"}, "the metadata has no key 'llama.rope.scaling.factor'"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(tiny, values, message):
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: .*{message}"):
        read_gguf(tiny(values))


def test_an_architecture_that_is_not_supported_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {}, {}, architecture="mamba")
    allowed = "llama, qwen2, qwen3, gemma2, gemma3, phi3"
    with pytest.raises(CheckpointError, match=rf"m\.gguf: architecture 'mamba' .* supported: {allowed}$"):
        read_gguf(path)


def test_a_window_whose_layers_are_unknown_is_refused(tmp_path):
    values = metadata("qwen2") | {"qwen2.attention.sliding_window": 64}
    path = write_gguf(tmp_path / "m.gguf", values, random_tensors(shapes(bias="qkv")), architecture="qwen2")
    with pytest.raises(CheckpointError, match=r"attention.sliding_window is 64, and the file does not say which"):
        read_gguf(path)


def test_two_kinds_of_rope_scaling_in_one_file_are_refused(tiny):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    path = tiny(scaling, {"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(CheckpointError, match=r"has both llama.rope.scaling.type 'linear' and tensor 'rope_freqs"):
        read_gguf(path)


def test_a_file_without_an_embedding_table_is_refused(tiny):
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: has no tensor 'token_embd.weight'"):
        read_gguf(tiny(tensors={"token_embd.weight": None}))


def test_a_type_that_cannot_be_dequantised_is_refused(tiny):
    with pytest.raises(CheckpointError, match=r"tensor 'blk.0.attn_norm.weight' has type I32, which cannot be read"):
        read_gguf(tiny(tensors={"blk.0.attn_norm.weight": np.zeros(64, np.int32)}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a Git LFS pointer, .* run `git lfs pull`"),
        (b"PK\x03\x04" + bytes(40), r"not a GGUF file: it starts with b'PK\\x03\\x04', not b'GGUF'"),
        (b"GGUF\x03\x00\x00\x00", "the file ends inside its header, after 8 bytes"),
        (b"GGUF\x00\x00\x00\x03" + bytes(40), "a big-endian GGUF file; only little-endian files are read"),
        (b"GGUF\x01\x00\x00\x00" + bytes(40), "GGUF version 1; versions read: 2, 3"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 40, 0), "damaged header: 1099511627776 tensors, at most 65536"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), "damaged header: .* metadata keys, at most 65536"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 99), "a metadata key at byte 32 takes 99 bytes, the file has 32"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 999), "a metadata key has 999 bytes, at most 128 are read"),
        (struct.pack("<4sIQQQ2s", b"GGUF", 3, 0, 1, 2, b"\xff\xff"), "a metadata key at byte 32 is not UTF-8"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77), "key 'k' has unknown value type 77"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 1 << 50), "'k' has 1125899906842624 strings, at"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 6, 1 << 50), "k at byte 49 takes .* truncated or"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + 2 * struct.pack("<Q1sIB", 1, b"k", 0, 5), "key 'k' occurs twice"),
    ],
)
def test_a_file_that_is_no_complete_gguf_file_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"bad\.gguf: .*{message}"):
        read_gguf(path)


def entry(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return struct.pack(f"<Q{len(name)}sI{len(dims)}QIQ", len(name), name, len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(b"t", [1, 1, 1, 1, 1])], "tensor 't' has 5 dimensions, not 1 to 4"),
        ([entry(b"t", [1], 99)], "tensor 't' has type 99, which gguf does not know"),
        ([entry(b"t", [33, 2], 8)], r"'t' of type Q8_0 has shape \[2, 33\]: a row must be a positive multiple of 32"),
        ([entry(b"t", [0])], r"tensor 't' of type F32 has shape \[0\]"),
        ([entry(b"t", [1], offset=32)], "tensor 't' is said to lie at 32, its turn is at 0"),
        ([entry(b"t", [1]), entry(b"t", [1], offset=32)], "tensor 't' occurs twice"),
        ([entry(b"t", [1 << 40])], "the file is truncated: tensor 't' ends at byte 4398046511168, the file has"),
    ],
)
def test_a_tensor_table_that_does_not_fit_the_file_is_refused(tmp_path, entries, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, len(entries), 0) + b"".join(entries) + bytes(200))
    with pytest.raises(CheckpointError, match=rf"bad\.gguf: .*{message}"):
        read_gguf(path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be read: No such file"):
        read_gguf(tmp_path / "none.gguf")


def test_a_truncated_file_is_an_error_wherever_it_ends(tiny):
    path = tiny()
    content = path.read_bytes()
    for size in [*range(1, 2400, 37), len(content) // 2, len(content) - 64]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            read_gguf(path)


def test_a_damaged_header_gives_no_other_error(tiny):
    path = tiny({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    content = path.read_bytes()
    header = content.index(b"blk.0.") + 200
    chance = random.Random(0)
    messages = []
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(header)] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            file = read_gguf(path)
            file.text_files()
            for tensor in file.tensors.values():
                tensor.read(0, tensor.shape[0])
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 200
    assert all("tiny.gguf" in message for message in messages)
