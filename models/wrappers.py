"""Vision-language checkpoints as data: where the text decoder stands in each, and how its config is read.

A row says for an outer `model_type` which text decoders it holds, which settings are about images alone, and which
names lead to the decoder's tensors. The text decoder is one of `families.py`; towers and projectors are left
aside. Facts are those of transformers 5.24: configuration classes, `_tied_weights_keys`, `conversion_mapping.py`.
Knows no file format and no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollkv.models.config import CheckpointError, DecoderConfig
from rollkv.models.families import FAMILIES
from rollkv.models.names import head_name, tensor_names
from rollkv.models.setting_values import token_ids
from rollkv.models.settings import read_config


@dataclass(frozen=True)
class Form:
    """One way to name the text decoder's tensors: what stands for llama's "model." and for its "lm_head."."""

    body: str
    head: str


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """One outer `model_type`."""

    model_type: str
    text_type: str  # of a text_config that does not say
    only: bool = False  # no other text_type is allowed; else any family
    flat: bool = False  # older configs have the text's settings at the outer level
    three_part: bool = False  # rotary positions have three parts
    tied: bool = False  # whether the head is the embedding table when neither level says
    tied_by_text: bool = False  # the text level's true counts, whatever the outer level says
    image_attention: str | None = "causal"  # see Manifest.image_attention; None: the text level says
    capped: bool = False  # the head caps its logits as the text level says
    settings: frozenset[str]  # of the outer level, that are about images alone
    forms: tuple[Form, ...]
    aside: tuple[str, ...]  # prefixes of tensors that are no part of the text decoder


_LLAVA_FORMS = (
    Form("model.language_model.", "lm_head."),  # as the classes of transformers name them since 4.52
    Form("language_model.model.", "language_model.lm_head."),  # as published, and as save_pretrained writes
)
_PROJECTOR = frozenset(
    {"image_seq_length", "image_token_id", "projector_hidden_act", "vision_feature_layer",
     "vision_feature_select_strategy"}
)  # fmt: skip
_LLAVA_ASIDE = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_GEMMA4_SETTINGS = frozenset(
    {"audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index",
     "eoi_token_id", "image_token_id", "video_token_id", "vision_soft_tokens_per_image"}
)  # fmt: skip
_QWEN: dict[str, Any] = {
    "only": True,
    "flat": True,
    "three_part": True,
    "tied_by_text": True,
    "settings": frozenset(
        {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"}
    ),
    "forms": (Form("model.language_model.", "lm_head."), Form("model.", "lm_head.")),
    "aside": ("visual.", "model.visual."),
}
_IDEFICS: dict[str, Any] = {
    "text_type": "llama",
    "settings": frozenset({"image_token_id", "scale_factor", "_pad_token_id"}),
    "forms": (Form("model.text_model.", "lm_head."),),
    "aside": ("model.vision_model.", "model.connector."),
}

_ROWS = (
    Wrapper(model_type="qwen2_vl", text_type="qwen2_vl_text", **_QWEN),
    Wrapper(model_type="qwen2_5_vl", text_type="qwen2_5_vl_text", **_QWEN),
    Wrapper(
        model_type="gemma3",
        text_type="gemma3_text",
        only=True,
        tied=True,
        image_attention="bidirectional",  # create_masks_for_vision_model
        settings=frozenset({"boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"}),
        forms=_LLAVA_FORMS,
        aside=_LLAVA_ASIDE,
    ),
    Wrapper(
        model_type="gemma4",
        text_type="gemma4_text",
        only=True,
        tied=True,
        image_attention=None,  # the large models have bidirectional images, the small ones do not
        capped=True,
        settings=_GEMMA4_SETTINGS,
        forms=(Form("model.language_model.", "lm_head."),),  # published and saved alike
        aside=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    ),
    Wrapper(
        model_type="internvl",
        text_type="qwen2",
        tied=True,
        settings=_PROJECTOR | {"downsample_ratio"},
        forms=_LLAVA_FORMS,
        aside=_LLAVA_ASIDE,
    ),
    Wrapper(model_type="smolvlm", **_IDEFICS),
    Wrapper(model_type="idefics3", **_IDEFICS),
    Wrapper(
        model_type="llava",
        text_type="llama",
        tied_by_text=True,
        settings=_PROJECTOR | {"ignore_index", "image_token_index", "multimodal_projector_bias"},
        forms=_LLAVA_FORMS,
        aside=_LLAVA_ASIDE,
    ),
)
WRAPPERS: Mapping[str, Wrapper] = {row.model_type: row for row in _ROWS}

_QWEN_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# A text_config leaves out what its class has by default, the geometry too. Text types that are not here must say it.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
    "gemma4_text": {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2_vl_text": _QWEN_TEXT,
    "qwen2_5_vl_text": _QWEN_TEXT,
}
FAMILY_OF = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"}  # text types that are a family by another name
# Read here, or about the vision tower.
_OUTER = frozenset(
    {"model_type", "text_config", "vision_config", "tie_word_embeddings", "bos_token_id", "eos_token_id"}
)  # fmt: skip
# What transformers 4 wrote into a text_config and its decoder does not read: defaults of `generate`, marks of training.
_UNREAD = frozenset(
    {"_flash_attn_2_enabled", "begin_suppress_tokens", "cross_attention_hidden_size", "decoder_start_token_id",
     "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
     "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
     "max_length", "min_length", "neftune_noise_alpha", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
     "num_return_sequences", "output_scores", "perceiver_config", "pixel_shuffle_factor", "prefix",
     "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature",
     "tf_legacy_loss", "tie_encoder_decoder", "top_k", "top_p", "torchscript", "typical_p", "use_bfloat16",
     "use_resampler"}
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A config.json, read."""

    config: DecoderConfig
    wrapper: Wrapper | None = None  # None: a text model
    tied_unless_stored: bool = False  # the outer level does not say: a head that is in the file is the head
    image_attention: str = "causal"  # see Manifest.image_attention


def read_model(raw: Mapping[str, Any], where: str) -> Model:
    """The content of the config.json of a text model, or of a vision-language model for its text decoder.

    where: the file's name, for messages.
    Raises CheckpointError: an unknown model_type, a setting that is unknown or cannot be computed.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in {**FAMILIES, **WRAPPERS}:
        supported = ", ".join(sorted({**FAMILIES, **WRAPPERS}))
        raise CheckpointError(f"{where}: model_type {model_type!r} is not supported; supported: {supported}")
    wrapper = WRAPPERS.get(model_type)
    if wrapper is None:
        plain = read_config(raw, where)
        _refuse_sections(plain, model_type, where)
        return Model(plain, image_attention=_image_attention(None, raw))
    text, inside = _text_settings(wrapper, raw, where)
    said = [raw.get("tie_word_embeddings"), text.get("tie_word_embeddings")]
    for value in said:
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{where}: tie_word_embeddings is {value!r}, must be true or false")
    by_text = wrapper.tied_by_text and said[1] is True
    text["tie_word_embeddings"] = by_text or (said[0] if said[0] is not None else wrapper.tied or said[1] is True)
    config = read_config(_with_ids(text, raw, where), inside)
    if "text_config" in raw:
        _check_outer(wrapper, raw, text, where)
    if wrapper.three_part and config.ropes[0].sections is None:
        raise CheckpointError(f"{inside}: mrope_section is missing; a {model_type} model has three rotary positions")
    if not wrapper.three_part:
        _refuse_sections(config, model_type, inside)
    capped = config.logit_softcap is not None and not wrapper.capped
    if capped or config.logit_scale != 1 or "head" in config.biases:
        raise CheckpointError(
            f"{inside}: a {config.family} decoder caps, scales or biases its logits, which the head of a {model_type} "
            "model does not do"
        )
    return Model(config, wrapper, said[0] is None and not by_text, _image_attention(wrapper, text))


def _refuse_sections(config: DecoderConfig, model_type: str, where: str) -> None:
    if any(rope.sections is not None for rope in config.ropes):
        raise CheckpointError(f"{where}: rope setting 'mrope_section' is not understood for {model_type}")


def _image_attention(wrapper: Wrapper | None, text: Mapping[str, Any]) -> str:
    """How the tokens of one image see each other. text: settings that the family's row has let through."""
    if wrapper is not None and wrapper.image_attention is not None:
        return wrapper.image_attention
    if text.get("use_bidirectional_attention") == "vision":
        return "bidirectional"
    return FAMILIES[text["model_type"]].image_attention if wrapper is None else "causal"


def _text_settings(wrapper: Wrapper, raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The settings of the text decoder as its family's row reads them, and where they stand."""
    given, inside = raw.get("text_config"), f"{where}: text_config"
    if given is None and wrapper.flat:
        given = {key: value for key, value in raw.items() if key != "vision_config"}
        given["model_type"], inside = wrapper.text_type, where
    if not isinstance(given, dict):
        raise CheckpointError(f"{inside} is {str(given)[:80]!r}, must be an object")
    kind = given.get("model_type", wrapper.text_type)
    if wrapper.only and kind != wrapper.text_type:
        raise CheckpointError(
            f"{inside}: model_type {kind!r} is not supported in a {wrapper.model_type} model; supported: "
            f"{wrapper.text_type}"
        )
    known = isinstance(kind, str)
    said = {
        key: value
        for key, value in given.items()
        if key not in _UNREAD | wrapper.settings and (key, value) != ("pruned_heads", {})
    }
    defaults = TEXT_DEFAULTS.get(kind, {}) if known else {}
    return {**defaults, **said, "model_type": FAMILY_OF.get(kind, kind) if known else kind}, inside


def _with_ids(text: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings with the BOS and EOS ids of both levels; the outer BOS id counts where the text level has none."""
    merged = dict(text)
    outer = token_ids(raw.get("eos_token_id"), f"{where}: eos_token_id")
    if outer:
        inner = (raw.get("text_config") or {}).get("eos_token_id")
        merged["eos_token_id"] = [*outer, *token_ids(inner, f"{where}: text_config: eos_token_id")]
    bos = raw.get("bos_token_id")
    if bos is not None and (raw.get("text_config") or {}).get("bos_token_id") is None:
        merged["bos_token_id"] = bos
    return merged


def _check_outer(wrapper: Wrapper, raw: Mapping[str, Any], text: Mapping[str, Any], where: str) -> None:
    """Refuse a setting of the outer level that may be meant for the text decoder and is not what its config says.

    transformers reads the text decoder from text_config alone; some releases wrote its settings at both levels.
    """
    plain = read_config(text, where)
    for key in sorted(raw.keys() - wrapper.settings - _OUTER - _UNREAD):
        try:
            moved = {**text, key: raw[key]}
            same = read_config(moved, where) == plain
            same = same and _image_attention(wrapper, moved) == _image_attention(wrapper, text)
        except CheckpointError:
            same = False
        if not same:
            value, inside = str(raw[key])[:80], text.get(key)
            raise CheckpointError(
                f"{where}: setting {key!r} = {value!r} is not understood for {wrapper.model_type}"
                + (f"; text_config says {str(inside)[:80]!r}" if inside is not None else "")
            )


@dataclass(frozen=True)
class TextNames:
    """What the tensors of a text decoder are called in one checkpoint, and back."""

    wrapper: Wrapper | None = None
    form: Form = Form("model.", "lm_head.")  # in the checkpoint
    family: Form = Form("model.", "lm_head.")  # by the family's own names

    def stored(self, name: str) -> str:
        """The checkpoint's name for the one that the family's row gives."""
        return _moved(name, self.family, self.form) or name

    def own(self, name: str) -> str:
        """The family's name for the one in the checkpoint."""
        return _moved(name, self.form, self.family) or name

    def of_adapter(self, name: str) -> str | None:
        """The checkpoint's name for the one that an adapter has, which may be of another form; None: left aside."""
        if self.wrapper is None:
            return self.stored(name)
        if name.startswith(self.wrapper.aside):
            return None
        return next((new for form in self.wrapper.forms if (new := _moved(name, form, self.form))), name)


def text_names(model: Model, found: Iterable[str], where: str) -> TextNames:
    """The names of a model's text decoder among those found.

    Raises CheckpointError: no form of the wrapper's fits, or more than one.
    """
    wrapper, config = model.wrapper, model.config
    names, table = set(found), next(tensor_names(config)).stored[0]
    family = Form(table.partition(".")[0] + ".", head_name(config).removesuffix("weight"))
    if wrapper is None:
        prefix = FAMILIES[config.family].prefix
        bare = prefix and table not in names and table.removeprefix(prefix) in names
        return TextNames(form=Form("", family.head), family=family) if bare else TextNames()
    forms = [form for form in wrapper.forms if _moved(table, family, form) in names]
    if len(forms) != 1:
        wanted = [str(_moved(table, family, form)) for form in forms or wrapper.forms]
        if forms:
            raise CheckpointError(f"{where}: tensors {' and '.join(wanted)} are both here; allowed: one text decoder")
        raise CheckpointError(f"{where}: tensor {' or '.join(wanted)} is missing")
    return TextNames(wrapper, forms[0], family)


def _moved(name: str, old: Form, new: Form) -> str | None:
    """A name of one form in another; None when it is not of that form."""
    for before, after in ((old.head, new.head), (old.body, new.body)):
        if name.startswith(before):
            return after + name.removeprefix(before)
    return None
