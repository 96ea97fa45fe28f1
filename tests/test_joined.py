"""The joined form: the same numbers as the separate one, from weights that are made while they stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from test_layers import close
from test_trace import EXPERTS, ROPE, config, layers, options, random_decoder, random_feeds, run_torch

from rollkv.export.trace import make_decoder
from rollkv.models.checkpoint import Weight
from rollkv.models.config import NORMS, ORDERS, QK_NORMS, DecoderConfig
from rollkv.models.decoder import Decoder
from rollkv.models.joined import JoinedWeight, joined_weights
from rollkv.models.joined_layers import JoinedAttention, JoinedMLP
from rollkv.models.layers import MLP, Experts, LayerNorm, RMSNorm, ScaledToOne
from rollkv.models.projections import Projections, joined_projections
from rollkv.models.tensor_views import Plus

ALL_BIASES = frozenset({"qkv", "out", "mlp", "head"})


@dataclass(frozen=True)
class Held:
    """A tensor in memory."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.array[start:stop]


def weights_of(decoder: Decoder) -> list[Weight]:
    """A decoder's parameters, as a checkpoint would have them: matrices of linear maps as (out, in)."""
    tables = ("embedding.", "positions.")
    made = []
    for name, parameter in decoder.named_parameters():
        array = parameter.detach().numpy()
        turned = array.ndim == 2 and not name.startswith(tables) and "_norm" not in name
        made.append(Weight(name, Held(array.T if turned else array), turned, f"file: tensor {name}"))
    return made


def joined_twin(decoder: Decoder, cfg: DecoderConfig) -> Decoder:
    """The joined decoder with the numbers of a separate one."""
    twin = make_decoder(cfg, options(projections="joined"), 4).eval()
    left = dict(twin.named_parameters())
    with torch.no_grad():
        for weight in joined_weights(cfg, weights_of(decoder)):
            weight.copy_to(left.pop(weight.name).numpy())
    assert not left
    return twin


def forms() -> Iterator[tuple[str, dict[str, Any]]]:
    for order in ORDERS:
        for norm in NORMS:
            yield f"{order}-{norm}", {"order": order, "norm": norm}
        yield f"{order}-ungated", {"order": order, "gated_mlp": False, "activation": "gelu", "biases": ALL_BIASES}
    for kind in QK_NORMS:
        yield f"qk-{kind}", {"qk_norm": kind, "biases": ALL_BIASES}
    still = layers(None, rope=None)
    yield "unturned", {"layers": still, "ropes": ()}
    yield "unturned-late", {"layers": still, "ropes": (), "qk_norm": "rms-head-late"}
    yield "partly-turned", {"ropes": (dataclasses.replace(ROPE, rotary_dim=4),), "biases": frozenset({"qkv"})}
    yield "scaled", {"attention_scale": 0.7, "biases": frozenset({"qkv"})}
    yield "capped", {"attention_scale": 0.7, "attention_softcap": 2.0}
    yield "scale-1", {"attention_scale": 1.0}
    yield "query-scale", {"ropes": (dataclasses.replace(ROPE, query_scale=(0.5, 3)),)}
    yield "wide", {"num_heads": 9, "layers": layers(None, 5, kv_heads=3), "tied_head": True, "residual_scale": 0.4}
    yield "learned", {"learned_positions": True, "norm": "layer-bias"}
    for order in ("pre", "parallel", "parallel-two", "sandwich"):
        mixed = (*layers(None), *layers(None, sparse=True))
        yield f"experts-{order}", {"order": order, "layers": mixed, "experts": EXPERTS}


FORMS = dict(forms())


@pytest.mark.parametrize("name", FORMS)
def test_the_joined_decoder_gives_what_the_separate_one_gives(name: str) -> None:
    cfg = config(**FORMS[name])
    decoder = random_decoder(cfg, options())
    twin = joined_twin(decoder, cfg)
    for rows in (4, 1):
        feeds = random_feeds(cfg, options(), rows, rows)
        wanted, got = run_torch(decoder, feeds), run_torch(twin, feeds)
        assert wanted.keys() == got.keys()
        for output, array in wanted.items():
            close(torch.from_numpy(got[output]), torch.from_numpy(array), 2e-5)


def test_what_is_joined_and_folded_is_what_the_layer_can_take() -> None:
    def form(sparse: bool = False, **more: Any) -> Projections:
        cfg = config(layers=layers(None, sparse=sparse), experts=EXPERTS, **more)
        return joined_projections(cfg, cfg.layers[0])

    whole = Projections(qkv=True, gate_up=True, into_qkv="attention_norm", into_mlp="mlp_norm", into_q=True)
    assert form() == form(order="parallel-two") == form(order="sandwich") == whole
    assert form(order="parallel") == dataclasses.replace(whole, into_mlp="attention_norm")
    assert form(order="post") == form(norm="layer") == dataclasses.replace(whole, into_qkv=None, into_mlp=None)
    assert form(sparse=True) == dataclasses.replace(whole, gate_up=False, into_mlp=None)
    assert form(sparse=True, order="parallel") == Projections(qkv=True, into_q=True)
    assert form(gated_mlp=False) == dataclasses.replace(whole, gate_up=False)
    assert {form(qk_norm=kind) for kind in QK_NORMS} == {dataclasses.replace(whole, into_q=False)}


def test_a_joined_layer_has_a_module_for_each_product_and_no_weight_where_a_norm_was_folded() -> None:
    cfg = config(layers=(*layers(None), *layers(None, sparse=True)), experts=EXPERTS, order="sandwich")
    dense, sparse = make_decoder(cfg, options(projections="joined"), 4).layers
    assert (type(dense.attention), type(dense.mlp)) == (JoinedAttention, JoinedMLP)
    assert (type(sparse.attention), type(sparse.mlp), type(sparse.mlp.shared)) == (JoinedAttention, Experts, MLP)
    assert (type(dense.attention_norm), type(dense.mlp_norm)) == (ScaledToOne, ScaledToOne)
    assert (type(sparse.attention_norm), type(sparse.mlp_norm)) == (ScaledToOne, RMSNorm)
    assert {type(layer.mlp_post_norm) for layer in (dense, sparse)} == {RMSNorm}
    other = config(norm="layer")
    assert type(make_decoder(other, options(projections="joined"), 4).layers[0].mlp_norm) is LayerNorm


# Weights


def pieces(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Weight], np.ndarray, np.ndarray]:
    """Two weights of 5 rows, 6 and 4 columns, one of them transposed, and a norm; blocks of a few values."""
    monkeypatch.setattr("rollkv.models.checkpoint.BLOCK_BYTES", 4 * 11)
    draw = np.random.default_rng(3)
    arrays = [draw.normal(size=shape).astype(np.float32) for shape in ((6, 5), (5, 4), (5,))]
    parts = [
        Weight("a", Held(arrays[0]), True, "folder: 1: tensor a"),
        Weight("b", Held(arrays[1]), False, "folder: 1: tensor b"),
        Weight("norm", Plus(Held(arrays[2]), 1.0), False, "folder: 1: tensor n"),
    ]
    return parts, np.concatenate((arrays[0].T, arrays[1]), 1), arrays[2] + np.float32(1)


def test_blocks_put_together_are_the_joined_weight_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    (a, b, norm), whole, rows = pieces(monkeypatch)
    joined = JoinedWeight("ab", (a, b), (0.3, 1.0), norm)
    assert joined.shape == (5, 10)
    assert joined.origin == "folder: 1: tensor a or tensor b or tensor n"
    target = np.full(joined.shape, np.nan, np.float32)
    joined.copy_to(target)
    wanted = whole * rows[:, None]
    wanted[:, :6] *= np.float32(0.3)
    np.testing.assert_array_equal(target, wanted)
    assert len(list(joined.blocks())) == 3 + 3
    for place, block in joined.blocks():
        assert block.dtype == np.float32
        np.testing.assert_array_equal(target[place], block)


def test_biases_lie_side_by_side_and_take_the_factor_of_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, rows = pieces(monkeypatch)
    parts = tuple(Weight(name, Held(rows[:n]), False, "f: t") for name, n in (("q", 5), ("k", 2), ("v", 2)))
    target = np.full(9, np.nan, np.float32)
    JoinedWeight("qkv", parts, (0.5, 1.0, 1.0)).copy_to(target)
    np.testing.assert_array_equal(target, np.concatenate((rows * np.float32(0.5), rows[:2], rows[:2])))


def test_a_value_that_is_not_finite_stays_so_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, b, norm), _, _ = pieces(monkeypatch)
    broken = Weight("a", Held(np.full((2, 5), np.inf, np.float32)), True, "f: tensor a")
    nothing = Weight("n", Held(np.zeros(5, np.float32)), False, "f: tensor n")
    for rows in (norm, nothing):
        with np.errstate(all="raise"):
            assert not np.isfinite(
                dict(enumerate(JoinedWeight("ab", (broken, b), (2.0, 1.0), rows).blocks()))[0][1]
            ).any()


def test_the_weights_are_the_parameters_of_the_joined_decoder() -> None:
    cfg = config((None,), biases=frozenset({"qkv"}), tied_head=True)
    names = [weight.name for weight in joined_weights(cfg, weights_of(random_decoder(cfg, options())))]
    layer = ["attention.qkv.weight", "attention.qkv.bias", "attention.out.weight", "mlp.gate_up.weight"]
    inside = [name.removeprefix("layers.0.") for name in names if name.startswith("layers.")]
    assert inside == [*layer, "mlp.down.weight"]
    with torch.device("meta"):
        parameters = dict(make_decoder(cfg, options(projections="joined"), 4).named_parameters())
    assert sorted(names) == sorted(parameters)


def test_a_model_of_gemma_4_keeps_its_weights() -> None:
    from rollkv.models.config import Gemma4Config

    gemma4 = Gemma4Config(per_layer_width=0, per_layer_vocab=0, per_layer_scale=1.0, values_from_keys=False)
    cfg = config(gemma4=gemma4, order="sandwich", qk_norm="rms-head", attention_scale=1.0)
    weights = weights_of(random_decoder(config((None,)), options()))
    assert joined_weights(cfg, weights) == weights
