"""A GGUF file as a checkpoint: its config in the words of Hugging Face's config.json, and its tensors in slices.

Knows how llama.cpp's converter lays rows out. Does not know Hugging Face's tensor names, what the metadata mean
(`gguf_config.py`), what a decoder does with a config, or how text becomes token ids.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from rollkv.models.config import CheckpointError
from rollkv.models.gguf_config import ARCHITECTURES, architecture_name, config_of
from rollkv.models.gguf_header import Metadata, TensorInfo, read_header
from rollkv.models.gguf_tokenizer import tokenizer_files
from rollkv.models.tensors import StoredTensor

_CHUNK_ELEMENTS = 1 << 17  # dequantised at a time; the working memory of a read beyond its result


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """One tensor of a GGUF file; a `StoredTensor`.

    `heads` is None, or the number of heads whose rows the file has interleaved: (heads, D/2, 2, ...) there is
    (heads, 2, D/2, ...) in the rotate-half order in which `read` gives them.
    """

    info: TensorInfo
    data: NDArray[np.uint8]  # (bytes of the file,), mapped
    heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor: (out, in), or (length,)."""
        return self.info.shape

    @property
    def storage(self) -> str:
        """See `tensors.storage_type`."""
        kinds = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}
        return kinds.get(self.info.type, "float32")

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start .. stop - 1, as float32: (stop - start, *shape[1:])."""
        assert 0 <= start <= stop <= self.shape[0], (self.info.name, start, stop, self.shape)
        if self.heads is None:
            return self._stored_rows(start, stop)
        size = self.shape[0] // self.heads
        stored = np.arange(size).reshape(size // 2, 2).T.ravel()  # (D,): where the file has each row of a head
        rows = np.empty((stop - start, *self.shape[1:]), np.float32)
        for head in range(start // size, -(-stop // size)):
            first, last = max(start, head * size), min(stop, (head + 1) * size)
            of_head = self._stored_rows(head * size, (head + 1) * size)
            rows[first - start : last - start] = of_head[stored[first - head * size : last - head * size]]
        return rows

    def _stored_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows in the order of the file, dequantised chunk by chunk."""
        block, block_bytes = GGML_QUANT_SIZES[self.info.type]
        inner = math.prod(self.shape[1:])
        first, last = start * inner // block, -(-stop * inner // block)  # blocks; a vector's ends may fall inside one
        values = np.empty((last - first) * block, np.float32)
        step = max(1, _CHUNK_ELEMENTS // block)
        for chunk in range(first, last, step):
            end = min(chunk + step, last)
            at = self.info.offset
            packed = np.asarray(self.data[at + chunk * block_bytes : at + end * block_bytes]).reshape(1, -1)
            values[(chunk - first) * block : (end - first) * block] = dequantize(packed, self.info.type)[0]
        skip = start * inner - first * block
        return values[skip : skip + (stop - start) * inner].reshape(stop - start, *self.shape[1:])


@dataclass(frozen=True)
class GgufFile:
    """A GGUF checkpoint."""

    path: Path
    config: Mapping[str, object]  # in the vocabulary of config.json
    tensors: Mapping[str, StoredTensor]  # by GGUF's names
    metadata: Metadata

    def text_files(self) -> dict[str, bytes]:
        """The files that turn text into token ids and back, by the names that Hugging Face gives them.

        tokenizer.json, tokenizer_config.json, generation_config.json, and chat_template.jinja when the file has a
        template. The same file gives the same bytes. Raises CheckpointError for a tokenizer that is not understood.
        """
        files = tokenizer_files(self.metadata)
        ends = {"bos_token_id": self.config["bos_token_id"], "eos_token_id": self.config["eos_token_id"]}
        files["generation_config.json"] = (json.dumps(ends, indent=2) + "\n").encode()
        if "tokenizer.chat_template" in self.metadata:
            files["chat_template.jinja"] = self.metadata.text("tokenizer.chat_template").encode()
        return files


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's header; tensors stay in the file until they are read.

    `rope_freqs.weight`, `rope_factors_long.weight` and `rope_factors_short.weight` are not among the tensors: they say
    how the rotary frequencies are scaled, and are in the config.
    Raises CheckpointError, naming the file, for a file that is damaged, split, or of a model that is not supported.
    """
    header = read_header(path)
    metadata = header.metadata
    if metadata.integer("split.count", 1) > 1:
        raise CheckpointError(
            f"{path}: one of {metadata.integer('split.count')} parts of a split GGUF file; "
            "join them with `llama-gguf-split --merge` first"
        )
    architecture = ARCHITECTURES[architecture_name(metadata)]
    infos = {info.name: info for info in header.tensors}
    for info in header.tensors:
        if not _dequantises(info.type):
            raise CheckpointError(f"{path}: tensor {info.name!r} has type {info.type.name}, which cannot be read")

    def vector(name: str) -> NDArray[np.float32]:
        return GgufTensor(infos[name], header.data).read(0, infos[name].shape[0])

    config = config_of(metadata, {name: info.shape for name, info in infos.items()}, vector)
    tensors: dict[str, StoredTensor] = {}
    for name, info in infos.items():
        if name not in architecture.settings:
            heads = _interleaved_heads(path, info, config) if architecture.permuted else None
            tensors[name] = GgufTensor(info, header.data, heads)
    return GgufFile(path, config, tensors, metadata)


@cache
def _dequantises(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package can dequantise a type: it is tried on one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _interleaved_heads(path: Path, info: TensorInfo, config: Mapping[str, object]) -> int | None:
    """How many heads of interleaved rows a tensor of architecture llama has; None: its rows are as they should be."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", info.name)
    if match is None:
        return None
    heads, head_dim = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"], config["head_dim"]
    assert isinstance(heads, int)
    assert isinstance(head_dim, int)
    if info.shape[0] != heads * head_dim:
        raise CheckpointError(f"{path}: tensor {info.name!r} has {info.shape[0]} rows, not {heads} heads x {head_dim}")
    return heads
