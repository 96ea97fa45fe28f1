"""A checkpoint on disk: a Hugging Face folder (safetensors) or a GGUF file, as a config and tensors read in slices.

Names are complete both ways: a tensor that is missing, or that no part of the decoder uses, is an error.
Knows nothing of ONNX; torch only in `load_decoder`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollkv.models.config import CheckpointError, DecoderConfig
from rollkv.models.families import FAMILIES
from rollkv.models.hf_files import open_safetensors, read_json
from rollkv.models.joined import joined_weights
from rollkv.models.lora import Lora, open_lora
from rollkv.models.names import PER_LAYER_TABLE, head_name, tensor_names, unread_names
from rollkv.models.presets import PRESETS, cache_folder, fetch_preset, hash_file
from rollkv.models.setting_values import token_ids
from rollkv.models.settings import read_config
from rollkv.models.tensor_views import Joined
from rollkv.models.tensors import StoredTensor
from rollkv.models.wrappers import TextNames, read_model, text_names

if TYPE_CHECKING:
    from rollkv.models.decoder import Decoder

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
BLOCK_BYTES = 16 << 20  # of float32 read at a time
# Tables and causal masks that older checkpoints hold and the decoder makes itself.
_RECOMPUTED = re.compile(
    r"(model|gpt_neox)\.layers\.\d+\.(self_attn|attention)\.rotary_emb\.inv_freq|rope_freqs\.weight"
    r"|(gpt_neox\.layers|(transformer\.)?h)\.\d+\.(attention|attn)\.(bias|masked_bias)"
)


@dataclass(frozen=True)
class Weight:
    """One parameter of the decoder, and where its values come from."""

    name: str  # in decoder.Decoder
    stored: StoredTensor
    transposed: bool
    origin: str = ""  # file or folder, and the names there, for messages

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the decoder."""
        return self.stored.shape[::-1] if self.transposed else self.stored.shape

    def blocks(self) -> Iterator[tuple[tuple[slice, ...], NDArray[np.float32]]]:
        """The values, a block at a time, each with the place in an array of `shape` where it belongs.

        Parts that lie side by side and are transposed come one after the other: a block across all of them would be a
        few columns wide, and touch every page of a mapped target each time.
        """
        parts: tuple[StoredTensor, ...] = (self.stored,)
        if self.transposed and isinstance(self.stored, Joined) and self.stored.axis == 1:
            parts = self.stored.parts
        before = 0  # rows of the target
        for part in parts:
            count, inner = part.shape[0], part.shape[1:]
            step = max(1, BLOCK_BYTES // (4 * max(1, int(np.prod(inner, dtype=np.int64)))))
            for start in range(0, count, step):
                block = part.read(start, min(start + step, count))
                rows = slice(start, start + len(block))
                if self.transposed:
                    yield (slice(before, before + inner[0]), rows), block.T
                else:
                    yield (rows,), block
            before += inner[0] if self.transposed else 0

    def copy_to(self, target: NDArray[np.float32]) -> None:
        """Fill target, of this shape, block by block."""
        for place, block in self.blocks():
            target[place] = block


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds; nothing but headers has been read."""

    kind: str  # "preset", "hub", "folder" or "file"
    id: str  # what the user called it, without its path
    model_type: str  # of config.json, or what a GGUF architecture is called there
    path: Path  # folder or file
    config: DecoderConfig
    weights: tuple[Weight, ...]
    text: Mapping[str, bytes]  # tokenizer and generation files by name
    files: tuple[Path, ...]  # whose content decides the numbers
    lora: Path | None = None  # folder of the adapter that is merged into the weights
    image_attention: str = "causal"  # see Manifest.image_attention

    def sha256(self) -> str:
        """Hash over the config and weight files: of a single file its own, else of the files' hashes in order."""
        hashes = [hash_file(path) for path in self.files]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def open_checkpoint(
    model: str, report: Callable[[str], None] = lambda line: None, lora: Path | None = None
) -> Checkpoint:
    """A preset's name, a Hugging Face folder, a .gguf file or a hub id, opened.

    report: is told of downloads, and of text files of an adapter that are not used, a line each.
    lora: folder of a PEFT LoRA adapter; its update is added to the weights as they are read. Folder and hub id only.
    Raises CheckpointError: no such model, a file that is missing, damaged or of another model, unknown settings.
    """
    if model in PRESETS:
        _refuse_lora(lora, model)
        return replace(_open_gguf(fetch_preset(model, cache_folder(), report)), kind="preset", id=model)
    path = Path(model)
    with _readable(model):
        if path.is_file():
            _refuse_lora(lora, model)
            return _open_gguf(path)
        adapter = None if lora is None else open_lora(lora)
        if model and path.is_dir():
            return _open_folder(path, adapter, report)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.endswith(".gguf") and not model.startswith("."):
        return replace(_open_folder(_hub_folder(model), adapter, report), kind="hub", id=model)
    raise CheckpointError(
        f"no such model: {model!r}; give a preset ({', '.join(PRESETS)}), a Hugging Face folder, a .gguf file "
        "or a hub id"
    )


def _refuse_lora(lora: Path | None, model: str) -> None:
    if lora is not None:
        raise CheckpointError(
            f"--lora {lora}: {model} is a GGUF file; an adapter can be merged into a Hugging Face folder or hub id of "
            "the same model"
        )


def load_decoder(decoder: Decoder, checkpoint: Checkpoint, slots: int) -> None:
    """Fill every parameter of a torch decoder, of either form; float32, the whole model in memory. slots: C."""
    import torch

    from rollkv.models.decoder import position_tables

    config = checkpoint.config
    parameters = dict(decoder.named_parameters())  # a shared one appears once, under its first name
    with torch.no_grad():
        for weight in joined_weights(config, checkpoint.weights) if decoder.joined else checkpoint.weights:
            if weight.name == PER_LAYER_TABLE:
                continue  # the host looks its rows up
            weight.copy_to(parameters.pop(weight.name).numpy())
        tables = {} if decoder.fed else position_tables(config, slots)
        for name, table in tables.items():
            parameters.pop(name).copy_(table)
    assert not parameters, f"never filled: {sorted(parameters)}"


def _open_folder(folder: Path, lora: Lora | None, report: Callable[[str], None]) -> Checkpoint:
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{folder}: no config.json in this folder, so it is no Hugging Face checkpoint")
    raw = read_json(config_file)
    model = read_model(raw, str(config_file))
    config, wrapper = model.config, model.wrapper
    aside = wrapper.aside if wrapper else ()
    shards = _shards(folder, report)
    found: dict[str, StoredTensor] = {}
    for shard, listed in shards.items():
        held = open_safetensors(shard, aside, _RECOMPUTED)
        for name in sorted(n for n in listed - held.keys() if not n.startswith(aside) and not _RECOMPUTED.fullmatch(n)):
            raise CheckpointError(f"{shard}: tensor {name} should be in this shard and is not; is it of another model?")
        for name in sorted(held.keys() & found.keys()):
            other = next(file.name for file, there in shards.items() if name in there)
            raise CheckpointError(f"{shard}: tensor {name} is in another shard too ({other})")
        found.update(held)
    names = text_names(model, found, str(folder))
    if model.tied_unless_stored and names.stored(head_name(config)) in found:
        config = replace(config, tied_head=False)
    if lora is not None:
        if names != TextNames():
            both = len(lora.updates) + len(lora.replaced)
            lora = lora.renamed(names.of_adapter)
            if others := both - len(lora.updates) - len(lora.replaced):
                report(f"{lora.folder}: {others} updates are of the vision part, which is not in the bundle")
        found = lora.apply(found, tied_rows=config.vocab_size if config.tied_head else None)
    text = {name: (folder / name).read_bytes() for name in TEXT_FILES if (folder / name).is_file()}
    text |= _older_template(folder) if "chat_template.jinja" not in text else {}
    for name in TEXT_FILES:
        if lora and (lora.folder / name).is_file() and (lora.folder / name).read_bytes() != text.get(name):
            report(f"{lora.folder / name} differs from the checkpoint's; the checkpoint's goes into the bundle")
    config = replace(config, eos_token_ids=_all_eos(config, text, folder))
    _check_tokenizer(text, folder)
    return Checkpoint(
        kind="folder",
        id=folder.resolve().name,
        model_type=raw["model_type"],
        path=folder,
        config=config,
        weights=_weights(config, found, "hf", str(folder), names),
        text=text,
        files=(config_file, *shards, *(lora.files if lora else ())),
        lora=lora.folder if lora else None,
        image_attention=model.image_attention,
    )


def _older_template(folder: Path) -> dict[str, bytes]:
    """The chat template where vision-language checkpoints of 2024 have it, as the file of today."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return {}
    template = read_json(file).get("chat_template")
    if not isinstance(template, str):
        raise CheckpointError(f"{file}: chat_template is {str(template)[:80]!r}, must be a string")
    return {"chat_template.jinja": template.encode()}


def _open_gguf(path: Path) -> Checkpoint:
    from rollkv.models.gguf_file import read_gguf

    file = read_gguf(path)
    config = read_config(file.config, str(path))
    return Checkpoint(
        kind="file",
        id=path.name,
        model_type=config.family,
        path=path,
        config=config,
        weights=_weights(config, file.tensors, "gguf", str(path)),
        text=file.text_files(),
        files=(path,),
        image_attention=FAMILIES[config.family].image_attention,
    )


def _weights(
    config: DecoderConfig,
    found: Mapping[str, StoredTensor],
    column: str,
    where: str,
    names: TextNames = TextNames(),  # noqa: B008  (frozen)
) -> tuple[Weight, ...]:
    """The decoder's parameters out of the tensors found; every name on either side must have its partner."""
    left = set(found) - set(map(names.stored, unread_names(config)))
    weights = []
    for own in tensor_names(config, column):
        name = replace(own, stored=tuple(map(names.stored, own.stored)))
        stored = name.assemble(found, where)
        left.difference_update(name.stored)
        weights.append(Weight(name.decoder, stored, name.transposed, f"{where}: {_those(name.stored)}"))
    if config.tied_head:
        head = names.stored(head_name(config, column))
        if head in left and not _equal(found[head], weights[0].stored):
            raise CheckpointError(
                f"{where}: tie_word_embeddings is true, but {head} differs from the embedding; set it to false"
            )
        left.discard(head)
    extra = [name for name in found if name in left and not _RECOMPUTED.fullmatch(names.own(name))]
    if extra:
        raise CheckpointError(
            f"{where}: {len(extra)} tensors are not used by a {config.family} decoder, among them {extra[0]}"
        )
    return tuple(weights)


def _those(stored: tuple[str, ...]) -> str:
    """The tensors that a parameter is made of, for messages."""
    return f"tensor {stored[0]}" if len(stored) == 1 else f"one of {len(stored)} tensors, {stored[0]} .. {stored[-1]}"


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    step = 1024
    return a.shape == b.shape and all(
        np.array_equal(a.read(i, min(i + step, a.shape[0])), b.read(i, min(i + step, a.shape[0])))
        for i in range(0, a.shape[0], step)
    )


def _shards(folder: Path, report: Callable[[str], None]) -> dict[Path, set[str]]:
    """Weight files of a folder in order, with the tensors that the index says each holds."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        if index.is_file():
            report(f"{index} is passed over: {single.name} is there, which transformers reads too")
        return {single: set()}
    if index.is_file():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where or not all(isinstance(v, str) for v in where.values()):
            raise CheckpointError(f"{index}: no weight_map of tensor names to files")
        for name in where.values():
            if Path(name).name != name:
                raise CheckpointError(f"{index}: file {name!r} lies outside of the folder")
        return {folder / file: {k for k, v in where.items() if v == file} for file in sorted(set(where.values()))}
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    hint = f"; found {', '.join(others[:3])}: convert to safetensors, or pass a .gguf file itself" if others else ""
    raise CheckpointError(f"{folder}: neither model.safetensors nor model.safetensors.index.json{hint}")


def _check_tokenizer(text: Mapping[str, bytes], folder: Path) -> None:
    if "tokenizer.json" in text:
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_buffer(text["tokenizer.json"])
        except Exception as error:  # tokenizers raises no narrower class
            raise CheckpointError(f"{folder / 'tokenizer.json'}: not a tokenizer that can be read: {error}") from None


def _all_eos(config: DecoderConfig, text: Mapping[str, bytes], folder: Path) -> tuple[int, ...]:
    """EOS ids of config, generation_config and tokenizer_config together."""
    ids = list(config.eos_token_ids)
    if "generation_config.json" in text:
        file = folder / "generation_config.json"
        ids += token_ids(read_json(file).get("eos_token_id"), f"{file}: eos_token_id")
    if "tokenizer_config.json" in text and "tokenizer.json" in text:
        token = read_json(folder / "tokenizer_config.json").get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        tokenizer = read_json(folder / "tokenizer.json")
        known = _token_table(tokenizer, folder / "tokenizer.json")
        if isinstance(token, str) and token in known:
            ids += token_ids(known[token], f"{folder / 'tokenizer.json'}: the id of {token!r}")
    return tuple(sorted({i for i in ids if i < config.vocab_size}))


def _token_table(tokenizer: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Ids by token, of a tokenizer.json: its vocabulary (a table, or a list in order) and the added tokens."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):
        table = {
            piece[0]: i
            for i, piece in enumerate(vocab)
            if isinstance(piece, list) and piece and isinstance(piece[0], str)
        }
    else:
        table = {**vocab} if isinstance(vocab, dict) else {}
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(
        isinstance(t, dict) and isinstance(t.get("content"), str) and "id" in t for t in added
    ):
        raise CheckpointError(f"{where}: added_tokens must be a list of objects with content and id")
    return table | {t["content"]: t["id"] for t in added}


def _hub_folder(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # the library raises many kinds: no network, no such model, no right to it
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"hub id {model!r} cannot be had ({type(error).__name__}: {said[0][:160]}); offline, pass a Hugging Face "
            f"folder, a .gguf file or a preset ({', '.join(PRESETS)})"
        ) from None


@contextlib.contextmanager
def _readable(model: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise CheckpointError(f"{error.filename or model}: {error.strerror}") from None
