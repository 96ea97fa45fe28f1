"""What `rollkv families` prints: for each `model_type` what is special to it, and what it was proved with.

Reads the rows of the tables; knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollkv.models.families import FAMILIES
from rollkv.models.family import Family, Key, Source
from rollkv.models.wrappers import FAMILY_OF, WRAPPERS, Wrapper

# The class of transformers with whose random models the tests prove a family (docs/families.md has the errors).
REFERENCES = {
    "arcee": "ArceeForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "granite": "GraniteForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "internlm3": "LlamaForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}
_ORDERS = {
    "parallel": "parallel residual",
    "parallel-two": "parallel residual, two norms",
    "sandwich": "norms before and after",
    "post": "norms after",
}
_QK_NORMS = {
    "rms-head": "q/k norm by head",
    "rms-head-late": "q/k norm after the rotation",
    "rms-width": "q/k norm over all heads",
    "layer-head": "q/k layer norm",
    "layer-heads": "q/k layer norm, a weight for each head",
}
_TURNS = {
    "windowed": "no rotation without a window",
    "windowed-if-any": "no rotation in global layers",
    "listed": "layers without rotation",
}
_BIASES = {"qkv": "q/k/v", "out": "out", "mlp": "MLP", "head": "head"}
_FUSED = {
    "qkv": "fused qkv",
    "qkv-by-head": "fused qkv by head",
    "conv-qkv": "fused qkv, Conv1D",
    "gate-up": "fused gate/up",
}


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    model_type: str
    features: tuple[str, ...]  # in which it differs from llama
    proved_with: str


def entries() -> list[Entry]:
    """Every supported `model_type`: families first, then the models that hold one of them, each group by name."""
    table = []
    for name in sorted(FAMILIES):
        features = [*_features(FAMILIES[name]), *(["GGUF"] if FAMILIES[name].gguf is not None else [])]
        table.append(Entry(name, tuple(features), f"transformers' {REFERENCES[name]}"))
    for name in sorted(WRAPPERS):
        table.append(Entry(name, tuple(_wrapper_features(WRAPPERS[name])), f"transformers' {REFERENCES[name]}"))
    return table


def _features(family: Family) -> Iterator[str]:
    """In what a family differs from llama."""
    fields = family.fields
    if "order" in fields:
        order = fields["order"]
        yield "parallel residual on request" if isinstance(order, Key) else _ORDERS[order]
    if "norm" in fields:
        yield "layer norm" + (" without bias" if fields["norm"] == "layer" else "")
    if family.norm_plus:
        yield "norm + 1"
    if "qk_norm" in fields:
        norm = fields["qk_norm"]
        yield "q/k norm on request" if isinstance(norm, Key) else _QK_NORMS[norm]
    if fields.get("learned_positions"):
        yield "learned positions"
    if family.turns in _TURNS:
        yield _TURNS[family.turns]
    if family.rotary_factor != 1:
        yield "partial rotation"
    elif "partial_rotary_factor" in family.settings:
        yield "partial rotation on request"
    if family.interleaved:
        yield "interleaved rotation"
    if len(family.ropes) > 1:
        yield "two rotations"
    if family.windows != "none":
        asked = " on request" if "use_sliding_window" in family.settings else ""
        yield f"sliding window{asked}" + (f", one layer in {family.pattern} without" if family.pattern else "")
    for name, text in (("attention_softcap", "attention softcap"), ("logit_softcap", "logit softcap")):
        if name in fields:
            yield text + (" on request" if family.settings[fields[name].name] is None else "")
    scales = [name.partition("_")[0] for name in fields if name.endswith("_scale")]
    if scales:
        yield f"scales: {', '.join(scales)}"
    if fields.get("gated_mlp") is False:
        yield "MLP without gate"
    act = family.settings.get(family.keys.get("hidden_act", "hidden_act"))
    if act != "silu":
        yield {"relu2": "squared ReLU"}.get(str(act), "GELU")
    if family.experts is not None:
        shared = "shared_expert_intermediate_size" in family.settings
        yield "mixture of experts" + (" and one for every token" if shared else "")
    for when, said in (("always", True), ("on request", False)):
        parts = [_BIASES[name] for name, on in family.biases.items() if (on is True) is said]
        if parts:
            yield f"biases {when}: {', '.join(parts)}"
    yield from family.notes
    yield from dict.fromkeys(
        _FUSED[source.layout]
        for source in family.names.values()
        if isinstance(source, Source) and source.layout in _FUSED
    )


def _wrapper_features(wrapper: Wrapper) -> Iterator[str]:
    """What decoder a vision-language model holds."""
    family = FAMILY_OF.get(wrapper.text_type, wrapper.text_type)
    yield f"text decoder {family}" + ("" if wrapper.only else ", or another of the above")
    if wrapper.three_part:
        yield "three-part rotation"
    images = "images with --input embeds"
    by_text = f"{images}, or text only if images are bidirectional"
    yield {"causal": images, "bidirectional": "text only", None: by_text}[wrapper.image_attention]
