import random
from dataclasses import replace

import numpy as np
import pytest
from conftest import Recorder
from toy_embeds import PER_LAYER, PER_LAYER_SCALE, ROWS, WIDTH, embeds_manifest, embeds_toy, save_bundle
from toy_model import D, H, K, ToyBackend, V, close, some_ids, toy, whole_pass

from rollkv.runtime.align import PromptError
from rollkv.runtime.sampling import SamplingOptions
from rollkv.runtime.session import Session

C = 24


def picture(n, seed=5):
    """Rows (n, H) that are in no table."""
    return np.random.default_rng(seed).standard_normal((n, H)).astype(np.float32)


# What equals what


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("c", [1, 3, 4, 7])
def test_ids_are_looked_up_and_every_prompt_length_gives_the_logits_of_one_pass(tmp_path, c, window):
    ids = some_ids(C, seed=c)
    want = whole_pass(ids, window)
    session, recorder = embeds_toy(tmp_path / "b", c=c, window=window)
    for n in range(1, C):
        session.reset()
        close(session.prefill(ids[:n]), want[n - 1])
        close(session.decode(ids[n]), want[n])
        assert session.tokens == ids[: n + 1]
    assert all("input_ids" not in feeds for _, feeds in recorder.runs)


@pytest.mark.parametrize("c", [1, 3, 4])
def test_a_callers_embeddings_among_text_in_any_split_equal_one_pass(tmp_path, c):
    rng = random.Random(c)
    session, _ = embeds_toy(tmp_path / "b", c=c)
    ids = some_ids(C)
    rows = np.concatenate((ROWS[ids[:6]], picture(9), ROWS[ids[15:]]))
    want = whole_pass(None, embeds=rows)
    close(session.prefill(embeds=rows[:20]), want[19])
    assert session.tokens == [-1] * 20
    for _ in range(10):
        session.reset()
        at = 0
        while at < C:
            n = rng.randint(1, C - at)
            if 6 <= at < 15 or rng.random() < 0.5:
                logits = session.prefill(embeds=rows[at : at + n])
            else:
                n = min(n, 6 - at if at < 6 else n)
                logits = session.prefill(ids[at : at + n])
            at += n
            close(logits, want[at - 1])
            assert session.position == at


def test_generation_after_embeddings_goes_on_with_ids_and_penalises_those_alone(tmp_path):
    session, _ = embeds_toy(tmp_path / "b", c=4)
    rows = picture(7)
    options = SamplingOptions(repetition_penalty=3.0)
    generated = list(session.generate(embeds=rows, max_new_tokens=9, sampling=options))
    assert session.tokens == [-1] * 7 + generated[:-1]
    for i, token in enumerate(generated):
        logits = whole_pass(None, embeds=np.concatenate((rows, ROWS[generated[:i]])))[-1]
        seen = list(set(generated[:i]))
        logits[seen] = np.where(logits[seen] < 0, logits[seen] * 3, logits[seen] / 3)
        assert token == logits.argmax()


def test_what_is_looked_up_may_be_changed_and_given_back(tmp_path):
    session, _ = embeds_toy(tmp_path / "b", c=4)
    ids = some_ids(9)
    rows = session.lookup(ids)
    np.testing.assert_array_equal(rows, ROWS[ids])
    rows[2:6] = picture(4)
    close(session.prefill(embeds=rows), whole_pass(None, embeds=rows)[-1])
    np.testing.assert_array_equal(session.lookup(ids), ROWS[ids])


# What is fed


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_rows_fed_for_five_ids_in_chunks_of_four_written_out(tmp_path, dtype):
    session, recorder = embeds_toy(tmp_path / "b", c=4, C=10, dtype=dtype)
    session.prefill([11, 12, 13, 14, 15])
    session.decode(16)
    fed = [feeds["inputs_embeds"] for _, feeds in recorder.runs]
    assert [rows.dtype for rows in fed] == [dtype] * 3
    zeros = np.zeros((3, H), np.float32)
    for rows, want in zip(fed, [[*zeros, ROWS[11]], ROWS[12:16], ROWS[16:17]], strict=True):
        np.testing.assert_array_equal(rows[0], np.asarray(want).astype(dtype))


def test_a_callers_rows_are_fed_as_they_are_and_its_pads_are_zero(tmp_path):
    session, recorder = embeds_toy(tmp_path / "b", c=4, C=10)
    rows = picture(6).astype(np.float64)
    session.prefill(embeds=rows)
    first, second = (feeds["inputs_embeds"] for _, feeds in recorder.runs)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first[0], np.concatenate((np.zeros((2, H)), rows[:2])).astype(np.float32))
    np.testing.assert_array_equal(second[0], rows[2:].astype(np.float32))


@pytest.mark.parametrize("tokens", ["ids", "embeds"])
def test_per_layer_inputs_follow_the_ids_and_are_zero_for_pads(tmp_path, tokens):
    session, recorder = embeds_toy(tmp_path / "b", c=4, C=10, tokens=tokens, per_layer=True)
    session.prefill([11, 12, 13, 14, 15])
    session.decode(16)
    rows = PER_LAYER * np.float32(PER_LAYER_SCALE)
    wanted = [[*np.zeros((3, WIDTH)), rows[11]], rows[12:16], rows[16:17]]
    for (_, feeds), want in zip(recorder.runs, wanted, strict=True):
        np.testing.assert_array_equal(feeds["per_layer_inputs"][0], np.asarray(want, np.float32))


def test_with_embeddings_the_ids_serve_per_layer_inputs_and_tokens(tmp_path):
    session, recorder = embeds_toy(tmp_path / "b", c=4, C=10, per_layer=True)
    rows = picture(3)
    session.prefill([7, 8, 9], embeds=rows)
    ((_, feeds),) = recorder.runs
    np.testing.assert_array_equal(feeds["inputs_embeds"][0, 1:], rows)
    np.testing.assert_array_equal(feeds["per_layer_inputs"][0, 1:], PER_LAYER[7:10] * np.float32(PER_LAYER_SCALE))
    assert session.tokens == [7, 8, 9]


def test_a_layer_that_reads_another_layers_cache_has_none_to_feed_or_roll(tmp_path):
    bundle = save_bundle(tmp_path / "b", embeds_manifest(c=4, C=10, tokens="ids", shared=True))
    assert bundle.manifest.layers[2].kv_from == 0
    assert bundle.manifest.layers[2].rope is None
    recorder = Recorder(ToyBackend(bundle))
    session = Session(bundle, backend=recorder)
    ids = some_ids(9)
    session.prefill(ids[:6])
    close(session.decode(ids[6]), whole_pass(ids[:7])[-1])
    for graph, feeds in recorder.runs:
        assert sorted(feeds) == sorted(value.name for value in graph.inputs)
        assert {name for name in feeds if "past" in name} == {f"past_{p}_{i}" for p in ("key", "value") for i in (0, 1)}
        assert feeds["past_key_0"].shape == (1, 10, K, D)


# Refusals


@pytest.mark.parametrize("call", ["prefill", "generate"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "neither ids nor embeds are given; allowed: ids, or embeds, or both"),
        ({"embeds": np.zeros((0, H), np.float32)}, "empty prompt: there is no token to run"),
        ({"embeds": np.zeros((2, H + 1))}, rf"embeds have shape \(2, {H + 1}\), allowed: \(n, {H}\)"),
        ({"embeds": np.zeros(H)}, rf"embeds have shape \({H},\), allowed: \(n, {H}\)"),
        ({"embeds": np.zeros((1, 2, H))}, rf"embeds have shape \(1, 2, {H}\), allowed"),
        ({"embeds": np.zeros((2, H), np.int32)}, rf"embeds have type int32; allowed: \(n, {H}\) floats"),
        ({"embeds": np.zeros((2, H), complex)}, "embeds have type complex128; allowed"),
        ({"embeds": [[0.5], [0.5, 1.0]]}, "embeds are no array; allowed"),
        ({"embeds": np.diag([1.0, np.nan] + [0] * (H - 2))}, "not finite in float32, the first at index 1"),
        ({"embeds": np.full((2, H), 1e39)}, "not finite in float32, the first at index 0"),
        ({"ids": [1, 2, 3], "embeds": np.zeros((2, H))}, "3 ids and 2 embeds are given; allowed: as many of each"),
        ({"ids": [1, V], "embeds": np.zeros((2, H))}, rf"id {V} at index 1 is not in the vocabulary"),
        ({"ids": [1, 2], "positions": np.zeros((3, 2), int)}, "positions are given, but the rotary positions of this"),
    ],
)
def test_what_cannot_be_taken_is_refused_and_nothing_runs(tmp_path, call, given, message):
    session, recorder = embeds_toy(tmp_path / "b", c=4)
    with pytest.raises(PromptError, match=message) as caught:
        getattr(session, call)(**given)
    assert caught.value.exit_code == 2
    assert not recorder.runs


def test_embeddings_for_graphs_of_ids_are_refused_with_the_flag_to_export_with():
    session, recorder = toy(c=4)
    with pytest.raises(PromptError, match="the graphs of this bundle take ids; export with --input embeds"):
        session.prefill(embeds=picture(2))
    with pytest.raises(PromptError, match="take ids and hold the embeddings; export with --input embeds"):
        session.lookup([1])
    assert not recorder.runs


def test_embeddings_without_ids_are_refused_where_per_layer_inputs_need_them(tmp_path):
    session, recorder = embeds_toy(tmp_path / "b", per_layer=True)
    with pytest.raises(PromptError, match="this bundle looks up per-layer inputs by id; give ids too"):
        session.prefill(embeds=picture(2))
    assert not recorder.runs


def test_an_id_without_a_per_layer_row_is_refused_before_anything_runs(tmp_path):
    session, recorder = embeds_toy(tmp_path / "b", c=4, per_layer=True)
    m = session.manifest
    small = replace(m, per_layer_embedding=replace(m.per_layer_embedding, shape=[9, WIDTH]))
    session = Session(replace(session.bundle, manifest=small), backend=recorder)
    with pytest.raises(PromptError, match=r"id 9 at index 6 has no per-layer input, allowed: 0 \.\. 8"):
        session.prefill([1, 2, 3, 4, 5, 6, 9])
    assert not recorder.runs


@pytest.mark.parametrize("tokens", ["ids", "embeds"])
def test_where_the_model_sees_an_image_both_ways_only_text_runs(tmp_path, tokens):
    session, recorder = embeds_toy(tmp_path / "b", c=4, tokens=tokens, image="bidirectional")
    with pytest.raises(PromptError, match=r"tokens of one image see each other both ways .*; allowed: text, as ids"):
        session.prefill([1, 2], embeds=picture(2))
    assert not recorder.runs
    ids = some_ids(6)
    close(session.prefill(ids), whole_pass(ids)[-1])


class Tensor:
    """What a tensor of another library is to NumPy where it cannot be read."""

    def __init__(self, error):
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error


@pytest.mark.parametrize(
    "error", [TypeError("unsupported type\nBFloat16"), RuntimeError("requires grad"), OSError("gone"), ValueError("x")]
)
@pytest.mark.parametrize("call", ["prefill", "generate"])
def test_what_numpy_cannot_read_is_refused_with_the_reason_and_the_cure(tmp_path, call, error):
    session, recorder = embeds_toy(tmp_path / "b", c=4, three_part=True)
    for name, given, dtype in (("embeds", {}, "float32"), ("positions", {"ids": [1]}, "int64")):
        with pytest.raises(PromptError) as caught:
            getattr(session, call)(**given, **{name: Tensor(error)})
        said = str(caught.value)
        assert said.startswith(f"{name} are no array; allowed: (")
        assert f"NumPy cannot read Tensor: {' '.join(str(error).split())}. Convert a tensor to {dtype} on" in said
        assert "\n" not in said
    assert not recorder.runs


def test_tensors_of_torch_that_numpy_cannot_read_are_refused_and_others_are_taken(tmp_path):
    torch = pytest.importorskip("torch")
    session, _ = embeds_toy(tmp_path / "b", c=4)
    rows = torch.from_numpy(picture(3))
    for given in (rows.clone().requires_grad_(), rows.to(torch.bfloat16)):
        with pytest.raises(PromptError, match=r"embeds are no array; .* Convert a tensor to float32 on the CPU first"):
            session.prefill(embeds=given)
    close(session.prefill(embeds=rows), whole_pass(None, embeds=picture(3))[-1])


@pytest.mark.parametrize("call", ["prefill", "generate"])
@pytest.mark.parametrize("truncate", ["none", "left", "middle"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"protect": (1,)}, r"protect is \(1,\), allowed: two whole numbers, start and stop"),
        ({"protect": "1:5"}, "protect is '1:5', allowed: two whole numbers"),
        ({"protect": (0.5, 3)}, r"protect is \(0.5, 3\), allowed: two whole numbers"),
        ({"protect": (3, 3)}, "protect is 3:3, allowed: start:stop with 0 <= start < stop"),
        ({"protect": (1, 10)}, "protect is 1:10, the prompt has 9 tokens"),
        ({"keep_head": 2.5}, "keep_head is 2.5, allowed: a whole number"),
        ({"keep_head": "3"}, "keep_head is '3', allowed: a whole number"),
        ({"keep_head": True}, "keep_head is True, allowed: a whole number"),
    ],
)
def test_a_wrong_span_or_head_is_refused_though_nothing_is_cut(tmp_path, call, truncate, given, message):
    session, recorder = embeds_toy(tmp_path / "b", c=4, L=12)
    with pytest.raises(PromptError, match=message):
        getattr(session, call)(some_ids(9), truncate=truncate, **given)
    assert not recorder.runs


@pytest.mark.parametrize("given", [2.5, "3", True])
def test_the_number_of_new_tokens_is_a_whole_number(tmp_path, given):
    session, _ = embeds_toy(tmp_path / "b", c=4)
    with pytest.raises(PromptError, match=rf"max_new_tokens is {given!r}, allowed: a whole number"):
        session.generate([1], max_new_tokens=given)


# Truncation


@pytest.mark.parametrize("call", ["prefill", "generate"])
@pytest.mark.parametrize("n", [9, 16, 30])
def test_a_span_does_not_guard_against_the_limit_policy_and_is_refused_with_it_alone(tmp_path, call, n):
    session, recorder = embeds_toy(tmp_path / "b", c=4, L=12)
    with pytest.raises(PromptError) as caught:
        getattr(session, call)(some_ids(n), protect=(1, 6), on_limit="roll")
    assert str(caught.value) == (
        "protect goes with truncation left or middle; without one, on_limit roll forgets those tokens too"
    )
    assert not recorder.runs


def test_with_a_truncation_the_limit_policy_may_forget_as_well(tmp_path):
    session, _ = embeds_toy(tmp_path / "b", c=5, L=12)
    ids = some_ids(16)
    with pytest.warns(UserWarning, match="the prompt was cut from 16 to 12 tokens"):
        logits = session.prefill(ids, truncate="middle", protect=(1, 6), on_limit="roll")
    close(logits, whole_pass([*ids[:6], *ids[10:]])[-1])


def test_without_truncation_and_without_forgetting_a_span_is_kept_anyhow(tmp_path):
    session, _ = embeds_toy(tmp_path / "b", c=5, L=12)
    ids = some_ids(12)
    close(session.prefill(ids, protect=(1, 12)), whole_pass(ids)[-1])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"truncate": "left"}, range(4, 16)),
        ({"truncate": "middle"}, [0, 1, 2, *range(7, 16)]),
        ({"truncate": "middle", "protect": (1, 6)}, [*range(6), *range(10, 16)]),
        ({"truncate": "middle", "protect": (6, 11)}, [0, 1, *range(6, 16)]),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_embeddings_are_cut_as_ids_are(tmp_path, settings, kept, known):
    session, _ = embeds_toy(tmp_path / "b", c=5, L=12)
    rows, ids = picture(16), some_ids(16)
    kept = list(kept)
    with pytest.warns(UserWarning, match="the prompt was cut from 16 to 12 tokens"):
        logits = session.prefill(ids if known else None, embeds=rows, **settings)
    close(logits, whole_pass(None, embeds=rows[kept])[-1])
    assert session.tokens == ([ids[i] for i in kept] if known else [-1] * 12)
    session.reset()
    reply = session.generate(embeds=rows, max_new_tokens=1, **settings)
    assert (reply.prompt_tokens, reply.truncated) == (12, 4)
    assert next(reply) == whole_pass(None, embeds=rows[kept])[-1].argmax()


@pytest.mark.parametrize("call", ["prefill", "generate"])
def test_an_image_that_truncation_would_cut_is_refused_and_nothing_runs(tmp_path, call):
    session, recorder = embeds_toy(tmp_path / "b", c=5, L=12)
    with pytest.raises(PromptError, match=r"the protected tokens 1:6 cannot be kept whole: the prompt has 16 tokens"):
        getattr(session, call)(embeds=picture(16), truncate="left", protect=(1, 6))
    assert not recorder.runs
    close(session.prefill(embeds=picture(9), truncate="left", protect=(1, 6)), whole_pass(None, embeds=picture(9))[-1])
