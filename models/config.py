"""What a decoder is: its geometry and its features, as frozen data.

Knows nothing of any checkpoint format, of torch or of NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that asks for something this project does not compute."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one rope type.

    `factor` and the three fields after it belong to `type == "linear"` and `type == "llama3"` and are None elsewhere.
    """

    type: str  # "default", "linear" or "llama3"
    theta: float  # base of the geometric series of frequencies
    rotary_dim: int  # how many of a head's dimensions rotate
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder-only language model.

    The geometry has no defaults; a feature is off until the checkpoint asks for it.
    """

    family: str  # model_type of config.json
    vocab_size: int  # V
    hidden_size: int  # H
    intermediate_size: int  # width of the MLP
    num_heads: int  # query heads, a multiple of num_kv_heads
    num_kv_heads: int  # K
    head_dim: int  # D; num_heads * head_dim need not be H
    norm_eps: float
    max_position: int  # positions 0 .. max_position - 1 exist
    windows: tuple[int | None, ...]  # one per layer: how many tokens a query sees, itself included; None: all
    rope: RopeConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before the rotation
    tied_head: bool = False  # the head is the embedding table, transposed

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)
