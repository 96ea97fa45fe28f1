"""A LoRA adapter as PEFT saves it, merged into a checkpoint's tensors while they are read.

The rules are those of `merge_and_unload` in peft 0.21 (tuners/lora/layer.py, utils/save_and_load.py). Every tensor of
the adapter must find its place; a feature that changes numbers and is not computed here is refused. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollkv.models.config import CheckpointError
from rollkv.models.hf_files import open_safetensors, read_json
from rollkv.models.tensor_views import LowRank
from rollkv.models.tensors import StoredTensor

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB](?=\.weight$)|lora_embedding_[AB]$)(\.weight)?")
_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
_TIED = ("embed_tokens", "lm_head")

_READ = frozenset(
    ["r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "target_modules",
     "modules_to_save", "peft_type", "task_type", "init_lora_weights", "exclude_modules", "layers_pattern",
     "layers_to_transform"]
)  # fmt: skip
# About training, about what was chosen (the file's tensors say that), or about the start of A and B.
_HARMLESS = frozenset(
    ["auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
     "inference_mode", "loftq_config", "lora_dropout",
     "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"]
)  # fmt: skip
# Ways to start A and B that leave the base's weights alone.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Factors:
    """The update of one weight: scale * (b @ a)."""

    a: StoredTensor  # (r, in)
    b: StoredTensor  # (out, r)
    scale: float
    fan_in_fan_out: bool  # the weight is stored as (in, out)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that they fit."""
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.fan_in_fan_out else shape


@dataclass(frozen=True, kw_only=True)
class Lora:
    """An adapter, its headers read. Tensors go by the name that the checkpoint should have for them."""

    folder: Path
    files: tuple[Path, ...]  # whose content decides the numbers
    updates: Mapping[str, Factors]
    replaced: Mapping[str, StoredTensor]  # whole tensors that take the place of the checkpoint's

    def renamed(self, rename: Callable[[str], str | None]) -> Lora:
        """The same adapter under other names; what rename gives None for is left out.

        Raises CheckpointError: two tensors get one name, or none is left.
        """
        where = self.folder / WEIGHTS_FILE
        taken: set[str] = set()
        sorted_out: list[dict[str, Any]] = []
        for tensors in (self.updates, self.replaced):
            kept: dict[str, Any] = {}
            for name, tensor in tensors.items():
                new = rename(name)
                if new is None:
                    continue
                if new in taken:
                    raise CheckpointError(f"{where}: holds {new} twice, the second time as {name}")
                taken.add(new)
                kept[new] = tensor
            sorted_out.append(kept)
        if not taken:
            raise CheckpointError(f"{where}: changes no tensor of the text decoder; it is about images alone")
        return replace(self, updates=sorted_out[0], replaced=sorted_out[1])

    def apply(self, found: Mapping[str, StoredTensor], tied_rows: int | None = None) -> dict[str, StoredTensor]:
        """The tensors of a checkpoint by name, with the adapter in them.

        tied_rows: V where the head is the embedding table, else None. There the embedding and the head are refused:
        merged, the update of one would reach the other, which is not what was trained.
        Raises CheckpointError: a tensor that the checkpoint does not have, or that has another shape.
        """
        where = self.folder / WEIGHTS_FILE
        merged = dict(found)
        shapes = [(name, tensor.shape) for name, tensor in self.replaced.items()]
        shapes += [(name, factors.shape) for name, factors in self.updates.items()]
        for name, shape in shapes:
            if tied_rows is not None and (f".{name}".split(".")[-2] in _TIED or shape[:1] + shape[2:] == (tied_rows,)):
                raise CheckpointError(
                    f"{where}: changes {name}, but the checkpoint's embedding and head are one tensor "
                    "(tie_word_embeddings); untie the checkpoint, then merge"
                )
            if name not in found:
                raise CheckpointError(
                    f"{where}: is for {name}, which the checkpoint does not have; is it of another model?"
                )
            if shape != found[name].shape:
                raise CheckpointError(f"{where}: fits {name} of shape {shape}, the checkpoint's is {found[name].shape}")
        merged.update(self.replaced)
        for name, factors in self.updates.items():
            merged[name] = LowRank(merged[name], factors.a, factors.b, factors.scale, factors.fan_in_fan_out)
        return merged


def open_lora(folder: Path) -> Lora:
    """Open the folder of an adapter.

    Raises CheckpointError: no such folder or file, damage, no LoRA, a setting that would change the numbers and is not
    computed, tensors that do not belong together.
    """
    if not folder.is_dir():
        raise CheckpointError(f"--lora {folder}: no such folder; give the folder of a PEFT adapter")
    config_file, weights_file = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    if not config_file.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG_FILE} in this folder, so it is no PEFT adapter")
    config = read_json(config_file)
    _check(config, str(config_file))
    if not weights_file.is_file():
        old = (folder / "adapter_model.bin").is_file()
        hint = "; found adapter_model.bin: convert it to safetensors (peft's save_pretrained does)" if old else ""
        raise CheckpointError(f"{folder}: no {WEIGHTS_FILE}{hint}")
    pairs: dict[str, dict[str, StoredTensor]] = {}
    replaced: dict[str, StoredTensor] = {}
    for name, tensor in open_safetensors(weights_file).items():
        match, path = _FACTOR.fullmatch(name), name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if path in replaced:
            raise CheckpointError(f"{weights_file}: holds {path} twice")
        if not name.startswith(_PREFIX) or (match is None and (".lora_" in name or ".token_adapter." in name)):
            raise CheckpointError(
                f"{weights_file}: tensor {name} is not understood; allowed under {_PREFIX}: MODULE.lora_A.weight, "
                "MODULE.lora_B.weight, MODULE.lora_embedding_A, MODULE.lora_embedding_B, whole tensors"
            )
        if match is None:
            replaced[path] = tensor
        else:
            pairs.setdefault(match["module"].removeprefix(_PREFIX), {})[match["part"]] = tensor
    if not pairs:
        raise CheckpointError(f"{weights_file}: holds no lora_A and lora_B")
    for saved in config.get("modules_to_save") or ():
        if not any(f"{saved}." in name for name in replaced):
            raise CheckpointError(f"{weights_file}: no tensor of {saved}, which modules_to_save in {CONFIG_FILE} names")
    return Lora(
        folder=folder,
        files=(config_file, weights_file),
        updates={f"{module}.weight": _factors(module, parts, config, folder) for module, parts in pairs.items()},
        replaced=replaced,
    )


def _check(config: Mapping[str, Any], where: str) -> None:
    """Refuse what is no plain LoRA."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type is {config.get('peft_type')!r}; allowed: 'LORA'")
    if config.get("use_dora"):
        raise CheckpointError(f"{where}: use_dora is true; DoRA is not supported, merge it with peft first")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise CheckpointError(f"{where}: task_type is {config['task_type']!r}; allowed: 'CAUSAL_LM' or null")
    init = config.get("init_lora_weights")
    if not any(init is known or (isinstance(init, str) and init == known) for known in _INITS):
        raise CheckpointError(
            f"{where}: init_lora_weights {init!r} changes the base's weights; allowed: true, false, 'gaussian', 'eva', "
            "'orthogonal' (peft's save_pretrained converts with path_initial_model_for_weight_conversion)"
        )
    unknown = [key for key, value in config.items() if value and key not in _READ | _HARMLESS]
    if unknown:
        raise CheckpointError(f"{where}: not understood, and may change the numbers: {', '.join(sorted(unknown))}")
    saved, targets = config.get("modules_to_save"), config.get("target_modules")
    if saved is not None and not _is_names(saved):
        raise CheckpointError(f"{where}: modules_to_save is {saved!r}, must be a list of names or null")
    if not isinstance(targets, str) and not _is_names(targets):
        raise CheckpointError(f"{where}: target_modules is {targets!r}, must be a list of names or a pattern")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise CheckpointError(f"{where}: {key} is {config[key]!r}, must be an object of patterns")
    for key in ("use_rslora", "fan_in_fan_out"):
        if not isinstance(config.get(key, False), bool):
            raise CheckpointError(f"{where}: {key} is {config[key]!r}, must be true or false")


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _factors(module: str, parts: Mapping[str, StoredTensor], config: Mapping[str, Any], folder: Path) -> Factors:
    where = f"{folder / WEIGHTS_FILE}: {module}"
    if tuple(sorted(parts)) not in _PAIRS:
        raise CheckpointError(f"{where} has {', '.join(sorted(parts))}; a module needs an A and its B")
    (_, a), (_, b) = sorted(parts.items())
    if not _targeted(module, config["target_modules"], folder):
        raise CheckpointError(f"{where} is in the file, but not among target_modules of {CONFIG_FILE}")
    excluded = config.get("exclude_modules")
    if excluded and _targeted(module, excluded, folder):
        raise CheckpointError(f"{where} is in the file, and among exclude_modules of {CONFIG_FILE}")
    if not _in_layers(module, config, folder):
        raise CheckpointError(f"{where} is in the file, but not in layers_to_transform of {CONFIG_FILE}")
    rank = _value(config, "r", "rank_pattern", module, folder)
    alpha = _value(config, "lora_alpha", "alpha_pattern", module, folder)
    if not (len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank):
        raise CheckpointError(
            f"{where} has an A of shape {a.shape} and a B of shape {b.shape}; {CONFIG_FILE} asks for rank r = {rank}: "
            "(r, in) and (out, r)"
        )
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return Factors(a, b, scale, "lora_embedding_A" in parts or bool(config.get("fan_in_fan_out")))


def _targeted(module: str, targets: str | list[str], folder: Path) -> bool:
    """Whether peft would put an adapter on this module: a pattern for the whole path, or names at its end."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return _matches(targets, module, "target_modules", folder)
    return any(f".{module}".endswith(f".{name}") for name in targets)


def _in_layers(module: str, config: Mapping[str, Any], folder: Path) -> bool:
    """Whether a module is in layers_to_transform, if there are any; its layer is the first number in its path."""
    chosen, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or r"[^.]*"
    if chosen is None or chosen == []:
        return True
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if found := _compiled(rf".*?\.(?:{pattern})\.(\d+)\.", "layers_pattern", folder).match(module):
            return int(found[1]) in (chosen if isinstance(chosen, list) else [chosen])
    return False


def _value(config: Mapping[str, Any], key: str, patterns: str, module: str, folder: Path) -> float:
    """r or lora_alpha of a module: of the first pattern that matches the end of its path, else the general one."""
    value = config.get(key)
    for pattern, special in (config.get(patterns) or {}).items():
        if _matches(rf"(.*\.)?({pattern})", module, patterns, folder):
            value = special
            break
    if isinstance(value, bool) or not isinstance(value, int if key == "r" else int | float) or not 0 < value < 2**31:
        kind = "positive integer" if key == "r" else "positive number"
        raise CheckpointError(f"{folder / CONFIG_FILE}: {key} of {module} is {value!r}, must be a {kind}")
    return value


def _matches(pattern: str, module: str, key: str, folder: Path) -> bool:
    return _compiled(pattern, key, folder).fullmatch(module) is not None


def _compiled(pattern: str, key: str, folder: Path) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {key} {pattern!r} is no pattern: {error}") from None
