"""The list of calls: which part takes and makes which value, and what the ends of the decoder compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_layers import close, filled
from test_trace import MIXED, ROPE, SLIDING, config, layers, options

from rollkv.export.signature import graph_inputs, graph_outputs
from rollkv.models.decoder import Decoder, Embedding, Head, position_tables


def decoder(cfg: Any, **more: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(cfg, **more)


@pytest.mark.parametrize("source", ["ids", "embeds"])
@pytest.mark.parametrize("learned", [True, False])
def test_calls_take_every_input_of_the_graph_and_make_every_output(learned: bool, source: str) -> None:
    cfg = config(ropes=(ROPE, SLIDING), layers=MIXED, learned_positions=learned)
    opts = options(input=source)
    taken: set[str] = set()
    made: list[str] = []
    for call in decoder(cfg, source=source).calls():
        taken |= set(call.inputs.values()) - set(made)
        made += call.outputs
    assert taken == {value.name for value in graph_inputs(cfg, opts, 4)}
    assert set(made) >= {value.name for value in graph_outputs(cfg, opts, 4)}
    assert len(set(made)) == len(made)


def test_each_layer_reads_the_layer_before_it_its_own_mask_and_its_own_rope() -> None:
    cfg = config(ropes=(ROPE, SLIDING), layers=MIXED)
    calls = {call.module: call for call in decoder(cfg).calls()}
    inputs = [calls[f"layers.{i}"].inputs for i in range(4)]
    assert [given["x"] for given in inputs] == ["embedding/x", "layers.0/x", "layers.1/x", "layers.2/x"]
    sliding = [given["mask"] == "sliding_attention_mask" for given in inputs]
    assert sliding == [layer.window is not None for layer in MIXED]
    assert [given.get("cos") for given in inputs] == ["rope.sliding/cos", "rope.full/cos", None, "rope.sliding/cos"]
    assert [given["past_value"] for given in inputs] == [f"past_value_{i}" for i in range(4)]
    assert calls["head"].inputs == {"x": "layers.3/x"}
    kinds = [calls[f"layers.{i}"].kind for i in range(4)]
    assert kinds[0] == kinds[3]
    assert len(set(kinds)) == 3


def test_a_query_scale_is_handed_to_the_layers() -> None:
    cfg = config(ropes=(replace(ROPE, query_scale=(0.1, 16)),))
    assert all(
        call.inputs["query_scale"] == "rope.full/query_scale" for call in decoder(cfg).calls() if "layer " in call.kind
    )


def test_the_tables_of_positions_are_the_parameters_that_no_checkpoint_holds() -> None:
    cfg = config(ropes=(replace(ROPE, query_scale=(0.1, 16)), SLIDING), layers=MIXED)
    shapes = {name: tuple(table.shape) for name, table in position_tables(cfg, 24).items()}
    own = {name: tuple(p.shape) for name, p in decoder(cfg).named_parameters() if name.startswith("rope.")}
    assert shapes == own
    assert shapes["rope.full.query_scale"] == (64, 1)
    assert (shapes["rope.full.cos"], shapes["rope.sliding.sin"]) == ((64, 3), (64, 2))


def test_the_embedding_is_a_table_times_its_scale() -> None:
    ids = torch.tensor([[3, 0, 5, 3]])
    for scale in (1.0, 6.5):
        embedding = filled(Embedding(7, 4, scale))
        assert torch.equal(embedding(ids), embedding.weight[ids] * scale)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_the_product_with_the_vocabulary_scaled_then_capped(tied: bool) -> None:
    cfg = config(tied_head=tied, biases=frozenset({"head"}), logit_scale=0.5, logit_softcap=2.0)
    table = torch.nn.Parameter(torch.empty(61, 20))
    x = torch.randn(1, 4, 20)
    head = filled(Head(cfg, "all", table))
    weight = table if tied else head.weight.T
    normed = F.rms_norm(x, (20,), head.norm.weight, 1e-5)
    wanted = 2 * torch.tanh(0.5 * F.linear(normed, weight, head.bias) / 2)
    close(head(x), wanted, 1e-5)
    assert head(x).abs().max() <= 2
    head.rows = "last"
    close(head(x), wanted[:, -1:], 1e-5)


def test_a_tied_head_is_the_embedding() -> None:
    tied = decoder(config(tied_head=True))
    assert tied.head.weight is tied.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())


def test_learned_positions_are_added_to_the_embedding() -> None:
    cfg = config(layers=layers(None, rope=None), ropes=(), learned_positions=True)
    whole = filled(Decoder(cfg))
    positions = torch.tensor([[0, 5, 63]])
    x = torch.randn(1, 3, 20)
    assert torch.equal(whole.positions(x, positions), x + whole.positions.weight[positions])
