"""Tiny vision-language models of transformers' own classes, their checkpoints, and one image for each.

Some have the same text decoder, so that its graphs are traced once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from family_shapes import BASE as SHAPE
from gemma4_models import BASE, SHARED
from safetensors.numpy import load_file, save_file

IMAGE = 7  # id of the token that an image's features take the place of
PAD = 3  # of gemma4: whose per-layer rows an image's tokens have
TEXT = {key: value for key, value in SHAPE.items() if key != "initializer_range"}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN_TOWER = {"depth": 1, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
# Sections of unequal length, so that a wrong order shows.
QWEN_TEXT = {
    **TEXT,
    "hidden_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10}
GEMMA_TEXT = {
    **TEXT,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {**QWEN_TOWER, "embed_dim": 16, "hidden_size": 48},
        **QWEN_IDS,
    },
    "qwen2_5_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {
            **QWEN_TOWER,
            "hidden_size": 16,
            "intermediate_size": 20,
            "out_hidden_size": 48,
            "fullatt_block_indexes": [0],
            "window_size": 16,
        },
        **QWEN_IDS,
    },
    "gemma3": {
        "text_config": GEMMA_TEXT,
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
    },
    "gemma4": {
        "text_config": {
            **BASE,
            **SHARED,
            "pad_token_id": PAD,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 5.0,
        },
        "vision_config": {
            **TOWER,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 8,
        },
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 2],
            "output_proj_dims": 20,
        },
        "image_token_id": IMAGE,
        "video_token_id": 8,
        "audio_token_id": 9,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
    },
    "smolvlm": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": TOWER, "image_token_id": IMAGE},
    "idefics3": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": TOWER, "image_token_id": IMAGE},
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
    },
}
# The other names that a checkpoint of a kind may have, beside those that save_pretrained of transformers 5 writes.
LLAVA_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
OTHER_NAMES = {
    "qwen2_vl": {"model.": "model.language_model.", "visual.": "model.visual."},
    "qwen2_5_vl": {"model.": "model.language_model.", "visual.": "model.visual."},
    "gemma3": LLAVA_NAMES,
    "internvl": LLAVA_NAMES,
    "llava": LLAVA_NAMES,
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and transformers' model read back from it in float32."""

    folder: Path
    model: Any


def save(folder: Path, name: str, **settings: Any) -> Path:
    """Save a random model; norms, biases and weights large enough that an error shows."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(len(name))
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **{**MODELS[name], **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
            elif float(parameter.std()) < 0.1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """transformers' model of a folder, float32 and eager."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def rename(source: Path, folder: Path, prefixes: dict[str, str]) -> Path:
    """A copy of a checkpoint whose tensors have other prefixes."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, array in load_file(source / "model.safetensors").items():
        old = next((old for old in prefixes if name.startswith(old)), "")
        tensors[prefixes.get(old, "") + name.removeprefix(old)] = array
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def change_config(source: Path, folder: Path, change: Any) -> Path:
    """A copy of a checkpoint whose config.json went through `change`, a function on the object."""
    rename(source, folder, {})
    raw = json.loads((source / "config.json").read_text("utf-8"))
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw), "utf-8")
    return folder


def image_inputs(name: str) -> tuple[dict[str, Any], int, tuple[int, int]]:
    """What transformers' model takes for one image beside the ids, how many tokens it is, and their (h, w)."""
    torch.manual_seed(11)
    if name.startswith("qwen"):
        inputs = {"pixel_values": torch.randn(24, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 6]])}
        return inputs, 6, (2, 3)
    if name == "gemma4":  # 2 x 8 patches of 3 x 4 x 4 values, pooled by 2 x 2
        places = torch.tensor([[(x, y) for y in range(2) for x in range(8)]])
        return {"pixel_values": torch.rand(1, 16, 48), "image_position_ids": places}, 4, (1, 4)
    shape = (1, 1, 3, 16, 16) if name in ("smolvlm", "idefics3") else (1, 3, 16, 16)
    return {"pixel_values": torch.randn(shape)}, 16 if name == "llava" else 4, (1, 1)


def features(model: Any, inputs: dict[str, Any]) -> np.ndarray:
    """The rows (tokens, H) that transformers' model puts in the place of the image's tokens."""
    with torch.no_grad():
        rows = model.get_image_features(**inputs, return_dict=True).pooler_output
    rows = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    return rows.reshape(-1, rows.shape[-1]).numpy()


def some_ids(n: int) -> list[int]:
    """Random ids that are not special."""
    return np.random.default_rng(n).integers(11, 211, n).tolist()


def contents(checkpoint: Any) -> dict[str, np.ndarray]:
    """Every weight of the decoder by its name there."""
    return {weight.name: np.concatenate([block for _, block in weight.blocks()]) for weight in checkpoint.weights}
