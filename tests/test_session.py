import random

import numpy as np
import pytest
from toy_model import M, ToyBackend, V, close, run_ends, some_ids, toy, toy_bundle, whole_pass

from rollkv.runtime.align import PromptError
from rollkv.runtime.session import LimitError, Session

C = 24


# What equals what


@pytest.mark.parametrize("window", [None, 1, 5, 23])
@pytest.mark.parametrize("c", [1, 2, 3, 4, 7, 8, C])
def test_every_prompt_length_gives_the_logits_of_one_unchunked_pass(c, window):
    ids = some_ids(C, seed=c)
    want = whole_pass(ids, window)
    session, _ = toy(c=c, window=window)
    for n in range(1, C + 1):
        session.reset()
        close(session.prefill(ids[:n]), want[n - 1])
        assert session.tokens == ids[:n]
        assert session.position == n


@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("head", ["last", "all"])
def test_layouts_and_id_types_and_heads_give_the_same(layout, kind, head):
    ids = some_ids(C)
    want = whole_pass(ids, 6)
    session, _ = toy(c=5, layout=layout, ids=kind, head=head, window=6)
    close(session.prefill(ids[:13]), want[12])
    for i in range(13, C):
        close(session.decode(ids[i]), want[i])


def test_a_float16_bundle_stays_near_the_reference():
    ids = some_ids(C)
    session, recorder = toy(c=5, dtype="float16")
    want = whole_pass(ids[:13])[-1]
    got = session.prefill(ids[:13])
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())
    assert {recorder.runs[0][1][name].dtype.name for name in ("attention_mask", "past_key_0")} == {"float16"}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("c", [3, 4, 5])
def test_a_second_turn_on_a_nearly_full_cache_equals_a_cold_prefill(c, window):
    ids = some_ids(C, seed=c)
    want = whole_pass(ids, window)
    for past in (C - c - 1, C - c, C - c + 1, C - 2):
        for n in range(1, C - past + 1):
            session, _ = toy(c=c, window=window)
            session.prefill(ids[:past])
            close(session.prefill(ids[past : past + n]), want[past + n - 1])
            for i in range(past + n, C):  # to the end of the cache
                close(session.decode(ids[i]), want[i])
            assert session.room() == 0


def test_any_split_into_turns_and_steps_gives_the_same():
    rng = random.Random(8)
    ids = some_ids(C)
    for window in (None, 4):
        want = whole_pass(ids, window)
        for _ in range(25):
            session, _ = toy(c=rng.randint(1, 9), window=window, layout=rng.choice(["bskd", "bksd", "bksd-kt"]))
            while session.room():
                at, n = session.position, rng.randint(1, session.room())
                if rng.random() < 0.3:
                    n, logits = 1, session.decode(ids[at])
                else:
                    logits = session.prefill(ids[at : at + n])
                close(logits, want[at + n - 1])


@pytest.mark.parametrize("window", [None, 5, 22])
@pytest.mark.parametrize("c", [1, 3, 4, 8])
def test_under_roll_a_query_sees_the_last_slots_of_its_own_run(c, window):
    rng = random.Random(c)
    for _ in range(4):
        turns = []
        while sum(turns) < 3 * C:
            turns.append(rng.choice([1, 2, c - 1 or 1, c, c + 1, rng.randint(1, 2 * C)]))
        ids = some_ids(sum(turns), seed=c)
        want = whole_pass(ids, window, forgets=run_ends(turns, c, C) - C)
        session, _ = toy(c=c, window=window, L=C - 1)
        for n in turns:
            at = session.position
            close(session.prefill(ids[at : at + n], on_limit="roll"), want[at + n - 1])
        assert session.tokens == ids


def test_a_prompt_longer_than_the_cache_rolls_and_leaves_the_last_tokens_visible():
    ids = some_ids(50)
    session, _ = toy(c=4, L=20)
    want = whole_pass(ids, forgets=run_ends([50], 4, C) - C)
    close(session.prefill(ids, on_limit="roll"), want[-1])


@pytest.mark.parametrize("c", [3, 4])
def test_changing_any_one_token_changes_the_last_logits_as_in_the_reference(c):
    ids = some_ids(14)
    session, _ = toy(c=c)
    base = session.prefill(ids)
    for i in range(14):
        other = [*ids[:i], (ids[i] + 1) % V, *ids[i + 1 :]]
        session.reset()
        got = session.prefill(other)
        close(got, whole_pass(other)[-1])
        assert np.abs(got - base).max() > 1e-3 * np.abs(base).max()


@pytest.mark.parametrize("special", [0, 1, 2])
def test_pad_bos_and_eos_ids_inside_a_prompt_are_ordinary_tokens(special):
    ids = [special, special, 5, special, 9, special]
    session, recorder = toy(c=4, eos=[2])
    close(session.prefill(ids), whole_pass(ids)[-1])
    plain, other = toy(c=4, eos=[2])
    plain.prefill([5] * 6)
    for (_, got), (_, want) in zip(recorder.runs, other.runs, strict=True):
        for name in ("attention_mask", "position_ids"):
            np.testing.assert_array_equal(got[name], want[name])


# What is fed


def test_the_feeds_of_five_tokens_in_chunks_of_four_written_out():
    session, recorder = toy(c=4, C=10)
    session.prefill([11, 12, 13, 14, 15])
    session.decode(16)
    (_, first), (_, second), (_, third) = recorder.runs
    assert [graph.role for graph, _ in recorder.runs] == ["prefill", "prefill", "decode"]
    assert first["input_ids"].tolist() == [[0, 0, 0, 11]]
    assert first["position_ids"].tolist() == [[0, 0, 0, 0]]
    assert second["input_ids"].tolist() == [[12, 13, 14, 15]]
    assert second["position_ids"].tolist() == [[1, 2, 3, 4]]
    assert third["input_ids"].tolist() == [[16]]
    assert third["position_ids"].tolist() == [[5]]
    assert (first["attention_mask"][0, 0, :3] == M).all()
    assert first["attention_mask"][0, 0, 3].tolist() == [M] * 9 + [0]
    assert second["attention_mask"][0, 0, 0].tolist() == [M] * 5 + [0, 0] + [M] * 3
    assert third["attention_mask"][0, 0, 0].tolist() == [M] * 4 + [0] * 6
    assert not first["past_key_0"].any()


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
def test_every_feed_has_the_manifests_name_type_shape_and_is_contiguous(kind, layout):
    bundle = toy_bundle(c=5, window=6, ids=kind, layout=layout)

    class Strict(ToyBackend):
        runs = 0

        def run(self, graph, feeds):
            Strict.runs += 1
            assert sorted(feeds) == sorted(value.name for value in graph.inputs)
            for value in graph.inputs:
                array = feeds[value.name]
                assert array.dtype == value.dtype
                assert list(array.shape) == value.shape
                assert array.flags.c_contiguous
            return super().run(graph, feeds)

    session = Session(bundle, backend=Strict(bundle))
    session.prefill(some_ids(12))
    session.prefill(some_ids(10))
    session.decode(3)
    session.prefill(some_ids(33), on_limit="roll")
    assert Strict.runs == 3 + 2 + 1 + 3 + 6


def test_the_cache_holds_the_new_keys_in_order_and_no_pads():
    session, recorder = toy(c=4, C=10)
    session.prefill([3, 4, 5, 6, 7])
    session.prefill([8, 9])
    session.decode(10)
    fed = recorder.runs[-1][1]["past_key_0"][0]
    inner = ToyBackend(session.bundle)
    want = [inner.run(graph, feeds)["new_key_0"][0].copy() for graph, feeds in recorder.runs[:-1]]
    want = np.concatenate((np.zeros((3, 2, 6)), want[0][3:], want[1], want[2][2:]))
    np.testing.assert_array_equal(fed, want)


@pytest.mark.parametrize("c", [2, 3, 5])
def test_only_the_first_run_of_a_turn_is_padded_and_only_while_it_drops_nothing(c):
    for past in range(1, C):
        for n in range(1, C - past + 1):
            session, recorder = toy(c=c)
            session.prefill(some_ids(past))
            recorder.runs.clear()
            session.prefill(some_ids(n))
            rows = [graph.rows for graph, _ in recorder.runs]
            hidden = [int((feeds["attention_mask"] != 0).all(-1).sum()) for _, feeds in recorder.runs]
            assert hidden[1:] == [0] * (len(rows) - 1)
            if past + c <= C:
                assert rows == [c] * -(-n // c)
                assert hidden[0] == -n % c
            else:
                assert rows == [1] * n


def test_one_decode_step_runs_the_graph_of_one_row_once():
    session, recorder = toy(c=4)
    session.prefill([1, 2, 3])
    session.decode(4)
    assert [graph.rows for graph, _ in recorder.runs] == [4, 1]


def test_reset_makes_a_session_as_good_as_new():
    session, recorder = toy(c=4, window=5)
    for _ in range(2):
        session.prefill(some_ids(21, seed=1))
        session.decode(3)
        session.reset()
    assert (session.position, session.tokens, session.room()) == (0, [], C)
    recorder.runs.clear()
    session.prefill([4, 5, 6, 7, 8])
    fresh, other = toy(c=4, window=5)
    fresh.prefill([4, 5, 6, 7, 8])
    for (_, got), (_, want) in zip(recorder.runs, other.runs, strict=True):
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array)


def test_two_sessions_of_one_bundle_do_not_meet():
    bundle = toy_bundle(c=4)
    one, other = (Session(bundle, backend=ToyBackend(bundle)) for _ in range(2))
    ids, others = some_ids(14, seed=1), some_ids(14, seed=2)
    one.prefill(ids[:7])
    other.prefill(others[:9])
    close(one.prefill(ids[7:]), whole_pass(ids)[-1])
    close(other.prefill(others[9:]), whole_pass(others)[-1])


def test_logits_and_token_lists_belong_to_the_caller():
    session, _ = toy(c=4)
    first = session.prefill([1, 2])
    kept = first.copy()
    second = session.decode(3)
    kept_too = second.copy()
    session.prefill([5])
    session.decode(4)
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(second, kept_too)
    session.tokens.append(9)
    assert session.tokens == [1, 2, 3, 5, 4]


# Refusals


@pytest.mark.parametrize("call", ["prefill", "generate"])
@pytest.mark.parametrize(
    ("ids", "settings", "kind", "message"),
    [
        ([], {}, PromptError, "empty prompt: there is no token to run"),
        ([1, V], {}, PromptError, rf"id {V} at index 1 is not in the vocabulary, allowed: 0 \.\. {V - 1}"),
        ([-1], {}, PromptError, "id -1 at index 0 is not in the vocabulary"),
        ([1] * 21, {}, PromptError, r"the prompt has 21 tokens, more than L = 20 \(C = 24\)"),
        ([1], {"truncate": "right"}, PromptError, "truncation 'right' is unknown; allowed: none, left, middle"),
        ([1], {"on_limit": "sink"}, PromptError, "on_limit 'sink' is unknown; allowed: stop, roll"),
        ([1], {"truncate": "middle", "keep_head": 20}, PromptError, r"keep_head is 20, allowed: 0 \.\. 19"),
        ([1] * 20, {}, LimitError, "20 tokens after 5 others pass C = 24; reset the session, or choose on-limit roll"),
        (
            [1] * 90,
            {"on_limit": "roll"},
            LimitError,
            "90 tokens after 5 others pass the model's positions = 94; reset the session$",
        ),
    ],
)
def test_a_refusal_says_what_is_wrong_and_runs_nothing(call, ids, settings, kind, message):
    session, recorder = toy(c=4, L=20, most=94)
    session.prefill([1, 2, 3, 4, 5])
    recorder.runs.clear()
    with pytest.raises(kind, match=message) as caught:
        getattr(session, call)(ids, **settings)
    assert caught.value.exit_code == 2
    assert not recorder.runs
    assert session.tokens == [1, 2, 3, 4, 5]
    close(session.decode(6), whole_pass([1, 2, 3, 4, 5, 6])[-1])


def test_decoding_past_the_cache_is_refused_and_rolls_where_that_is_allowed():
    session, _ = toy(c=4)
    ids = some_ids(C + 1)
    session.prefill(ids[:C])
    with pytest.raises(LimitError, match="1 tokens after 24 others pass C = 24"):
        session.decode(ids[C])
    forgets = run_ends([C, 1], 4, C) - C
    close(session.decode(ids[C], on_limit="roll"), whole_pass(ids, forgets=forgets)[-1])


def test_decoding_past_the_models_last_position_is_refused_under_roll():
    session, _ = toy(c=4, most=26)
    session.prefill(some_ids(26), on_limit="roll")
    with pytest.raises(LimitError, match="1 tokens after 26 others pass the model's positions = 26"):
        session.decode(1, on_limit="roll")


@pytest.mark.parametrize("token", [-1, V])
def test_decoding_an_id_outside_of_the_vocabulary_is_refused(token):
    session, recorder = toy()
    with pytest.raises(PromptError, match=f"id {token} at index 0 is not in the vocabulary"):
        session.decode(token)
    assert not recorder.runs


# Truncation


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"truncate": "left"}, list(range(4, 16))),
        ({"truncate": "middle"}, [0, 1, 2, *range(7, 16)]),  # 12 // 4 from the head
        ({"truncate": "middle", "keep_head": 1}, [0, *range(5, 16)]),
        ({"truncate": "middle", "keep_head": 11}, [*range(11), 15]),
        ({"truncate": "left", "on_limit": "roll"}, list(range(4, 16))),
    ],
)
def test_a_truncated_prompt_equals_the_reference_on_exactly_the_kept_ids(settings, kept):
    session, _ = toy(c=5, L=12)
    with pytest.warns(UserWarning, match="the prompt was cut from 16 to 12 tokens"):
        logits = session.prefill(range(16), **settings)
    close(logits, whole_pass(kept)[-1])
    assert session.tokens == kept
    session.reset()
    reply = session.generate(range(16), max_new_tokens=1, **settings)
    assert (reply.prompt_tokens, reply.truncated) == (12, 4)
    assert next(reply) == whole_pass(kept)[-1].argmax()


def test_a_prompt_that_fits_is_not_truncated():
    session, _ = toy(c=5, L=12)
    reply = session.generate(range(12), truncate="left")
    assert (reply.prompt_tokens, reply.truncated) == (12, 0)


@pytest.mark.parametrize("ids", ["123", [1.9], [1, None], [[1]]])
def test_ids_that_are_no_whole_numbers_are_refused(ids):
    session, _ = toy(c=4, L=12)
    with pytest.raises(PromptError, match="token ids must be whole numbers, got"):
        session.prefill(ids)
    assert session.prefill(np.array([1, 2], np.int32)).shape == session.prefill([3]).shape
