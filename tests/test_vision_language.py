"""Text decoders out of vision-language checkpoints, against transformers' whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import export
from family_shapes import make_family
from proof import RowsBackend, prove
from vision_models import IMAGE, MODELS, PAD, change_config, features, image_inputs, load, some_ids

from rollkv.export.reference import LiteralHost, Reference
from rollkv.models.checkpoint import open_checkpoint
from rollkv.runtime.align import PromptError, three_part_positions
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle
from rollkv.runtime.session import Session

QWENS = ("qwen2_vl", "qwen2_5_vl")
BOUND = 1e-4  # of the largest logit


@pytest.fixture(scope="session")
def bundle(saved: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    made: dict[Any, Bundle] = {}

    def get(name: str, take: str = "ids") -> Bundle:
        if (name, take) not in made:
            output = tmp_path_factory.mktemp("bundle") / name
            made[name, take] = export(saved(name).folder, output, head="all", input=take)
        return made[name, take]

    return get


def prefill(session: Session, *given: Any, **more: Any) -> np.ndarray:
    """The logits (n, V) of every real row of a prompt in a new session."""
    session.reset()
    session.backend.rows.clear()
    session.prefill(*given, **more)
    return np.concatenate(session.backend.rows)[-session.position :]


def rows_session(bundle: Bundle) -> Session:
    return Session(bundle, backend=RowsBackend(OrtBackend(bundle)))


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= BOUND * np.abs(want).max()


# The same numbers as transformers


@pytest.mark.parametrize("name", MODELS)
def test_every_row_of_a_text_and_every_rung_equals_the_whole_model(name: str, saved: Any, tmp_path: Path) -> None:
    prove(saved(name).folder, tmp_path / "bundle")


@pytest.mark.parametrize("name", QWENS)
def test_three_different_position_rows_turn_each_their_section(name: str, saved: Any, bundle: Any) -> None:
    session, model = rows_session(bundle(name)), saved(name).model
    for n in (5, 8, 19):
        ids = some_ids(n)
        positions = np.random.default_rng(n).integers(0, 256, (3, n))
        with torch.no_grad():
            hidden = model.model.language_model(
                torch.tensor([ids]), position_ids=torch.from_numpy(positions)[:, None]
            ).last_hidden_state
            want = model.lm_head(hidden)[0].numpy()
        got = prefill(session, ids, positions=positions)
        assert_close(got, want)
        assert np.abs(got - prefill(session, ids, positions=positions[[1, 0, 2]])).max() > 0.01


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma3"])
def test_an_image_among_the_text_gives_the_logits_of_the_whole_model(name: str, saved: Any, bundle: Any) -> None:
    model = saved(name).model
    inputs, tokens, grid = image_inputs(name)
    before, after = some_ids(5), some_ids(6)
    ids = [*before, *[IMAGE] * tokens, *after]
    session = rows_session(bundle(name, "embeds"))
    rows = session.lookup(ids)
    rows[5 : 5 + tokens] = features(model, inputs)
    positions = None
    if name in QWENS:
        inputs["mm_token_type_ids"] = torch.tensor([[0] * 5 + [1] * tokens + [0] * 6])
        positions = three_part_positions(len(ids), [(5, *grid)])
    known = [PAD if i == IMAGE else i for i in ids] if name == "gemma4" else None  # for the rows of each layer
    with torch.no_grad():
        want = model(torch.tensor([ids]), **inputs).logits[0].numpy()
        blind = model(torch.tensor([ids])).logits[0].numpy()
    assert_close(prefill(session, known, embeds=rows, positions=positions), want)
    assert np.abs(want - blind)[5:].max() > 0.01 * np.abs(want).max()


def test_gemma_3_refuses_an_image_whose_tokens_would_have_to_see_each_other_both_ways(bundle: Any) -> None:
    assert bundle("gemma3").manifest.image_attention == "bidirectional"
    with pytest.raises(PromptError, match="both ways and the graphs are causal; allowed: text, as ids"):
        Session(bundle("gemma3")).prefill(embeds=np.zeros((3, 36), np.float32))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma3"])
def test_other_models_show_the_text_decoder_a_causal_image(name: str, saved: Any) -> None:
    model = saved(name).model
    inputs, tokens, _ = image_inputs(name)
    ids = [*some_ids(2), *[IMAGE] * tokens, *some_ids(2)]
    if name in QWENS:
        inputs["mm_token_type_ids"] = torch.tensor([[0] * 2 + [1] * tokens + [0] * 2])
    with torch.no_grad():
        full = model(torch.tensor([ids]), **inputs).logits[0]
        changed = torch.tensor([[*ids[:-1], 200]])
        model.model.rope_deltas = None
        assert torch.equal(model(changed, **inputs).logits[0, :-1], full[:-1])
        attentions = model(torch.tensor([ids]), **inputs, output_attentions=True).attentions
    assert open_checkpoint(str(saved(name).folder)).image_attention == "causal"
    for attention in attentions:
        assert not torch.triu(attention[0].sum(0), 1).any()


def test_the_text_half_of_gemma_3_alone_refuses_an_image_too(tmp_path: Path) -> None:
    """A GGUF file and a gemma3_text folder may be the half of a whole model: they do not say."""
    source = make_family(tmp_path / "source", "gemma3")
    session = Session(export(source, tmp_path / "bundle", input="embeds"))
    with pytest.raises(PromptError, match="image"):
        session.prefill(embeds=session.lookup([3, 4, 5]))
    session.prefill([3, 4, 5])


def test_gemma_4_takes_the_rows_of_each_layer_from_the_pad_token_where_an_image_is(saved: Any, bundle: Any) -> None:
    inputs, tokens, _ = image_inputs("gemma4")
    ids = [*some_ids(5), *[IMAGE] * tokens, *some_ids(6)]
    session = rows_session(bundle("gemma4", "embeds"))
    rows = session.lookup(ids)
    rows[5 : 5 + tokens] = features(saved("gemma4").model, inputs)
    with torch.no_grad():
        want = saved("gemma4").model(torch.tensor([ids]), **inputs).logits[0].numpy()
    for wrong in (IMAGE, 0):
        got = prefill(session, [wrong if i == IMAGE else i for i in ids], embeds=rows)
        assert np.abs(got - want)[5:].max() > 0.01 * np.abs(want).max()
    with pytest.raises(PromptError, match="embeds without ids: this bundle looks up per-layer inputs by id"):
        session.prefill(embeds=rows)


def test_gemma_4_with_bidirectional_images_runs_text_and_refuses_an_image(saved: Any, tmp_path: Path) -> None:
    def large(raw: dict[str, Any]) -> None:
        raw["text_config"]["use_bidirectional_attention"] = "vision"

    folder = change_config(saved("gemma4").folder, tmp_path / "large", large)
    model, made = load(folder), export(folder, tmp_path / "bundle", head="all")
    session = rows_session(made)
    for n in (3, 16, 29):
        ids = some_ids(n)
        with torch.no_grad():  # what the processor gives for a text, too
            want = model(torch.tensor([ids]), mm_token_type_ids=torch.zeros(1, n, dtype=torch.long)).logits[0].numpy()
        assert_close(prefill(session, ids), want)
    inputs, tokens, _ = image_inputs("gemma4")
    inputs["mm_token_type_ids"] = torch.tensor([[0] * 2 + [1] * tokens])
    ids = torch.tensor([[*some_ids(2), *[IMAGE] * tokens]])
    with torch.no_grad():  # an image would be another matter: its first token sees its last
        assert not torch.equal(model(ids, **inputs).logits[0, 2], saved("gemma4").model(ids, **inputs).logits[0, 2])
    assert made.manifest.image_attention == "bidirectional"
    with pytest.raises(PromptError, match="both ways and the graphs are causal; allowed: text, as ids"):
        Session(made).prefill(ids[0].tolist(), embeds=np.zeros((6, 36), np.float32))


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "gemma4"])
def test_the_reference_of_verify_is_the_whole_model(name: str, saved: Any, bundle: Any) -> None:
    reference = Reference(open_checkpoint(str(saved(name).folder)), 48)
    ids = some_ids(13)
    trail, tokens = reference.greedy(ids, 5)
    session = Session(bundle(name))
    assert list(session.generate(ids, max_new_tokens=5, ignore_eos=True)) == tokens
    causal = np.tril(np.ones((13, 13), bool))
    assert_close(reference.masked(ids, causal, 1)[0], trail.logits[0])
    known = [*ids[:3], IMAGE, 8, 9, *ids[3:]]  # as text the ids of images are ordinary ids
    assert_close(prefill(rows_session(bundle(name)), known), np.stack(reference.rows(known)))
    literal = LiteralHost(bundle(name), OrtBackend(bundle(name))).follow(ids, tokens)
    for got, want in zip(literal.logits, trail.logits, strict=True):
        assert_close(got, want)


def test_the_manifest_names_the_whole_models_type(bundle: Any, saved: Any) -> None:
    assert bundle("llava").manifest.source.family == "llava"
    assert bundle("llava").manifest.image_attention == "causal"
    opened = open_checkpoint(str(saved("llava").folder))
    assert (opened.model_type, opened.config.family) == ("llava", "llama")
