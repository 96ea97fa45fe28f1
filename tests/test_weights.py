"""Parameters of the decoder, made of what a checkpoint stores: where their values come from, and in which blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from family_shapes import make_family

from rollkv.models.checkpoint import Weight, open_checkpoint
from rollkv.models.tensor_views import Joined


@dataclass(frozen=True)
class Held:
    """A tensor in memory."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.array[start:stop]


def test_a_parameter_of_several_tensors_says_so_and_one_of_a_single_tensor_names_it(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "m", "mixtral")
    origins = {weight.name: weight.origin for weight in open_checkpoint(str(folder)).weights}
    assert origins["head.norm.weight"] == f"{folder}: tensor model.norm.weight"
    experts = "model.layers.1.block_sparse_moe.experts"
    assert origins["layers.1.mlp.up.weight"] == (
        f"{folder}: one of 5 tensors, {experts}.0.w3.weight .. {experts}.4.w3.weight"
    )


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_put_together_are_the_weight(axis: int, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollkv.models.checkpoint.BLOCK_BYTES", 4 * 12)  # two rows of a part
    draw = np.random.default_rng(3)
    parts = tuple(Held(draw.normal(size=(5, 6)).astype(np.float32)) for _ in range(3))
    whole = np.concatenate([part.array for part in parts], axis)
    weight = Weight("w", Joined(parts, axis), transposed)
    target = np.full(weight.shape, np.nan, np.float32)
    weight.copy_to(target)
    np.testing.assert_array_equal(target, whole.T if transposed else whole)


def test_experts_side_by_side_fill_the_rows_of_the_weight_from_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollkv.models.checkpoint.BLOCK_BYTES", 4 * 12)
    weight = Weight("w", Joined((Held(np.ones((5, 6), np.float32)),) * 3, 1), True)
    rows = [place[0] for place, _ in weight.blocks()]
    assert rows == [slice(start, start + 6) for start in (0, 6, 12) for _ in range(3)]
