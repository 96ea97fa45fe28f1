"""Turns, rewinds and appends: whatever was kept, the logits are those of a cold prefill of all tokens."""

import dataclasses

import numpy as np
import pytest
from toy_embeds import ROWS, embeds_toy
from toy_model import V, close, some_ids, toy, whole_pass
from toy_reference import Record

from rollkv.runtime.session import LimitError

C, c = 24, 4
PASTS = (C - c - 1, C - c, C - c + 1, C - 2)
SUFFIXES = (1, c - 1, c, c + 1)
SETTINGS = [
    {"addresses": addresses, "c": sizes, "layout": layout, "window": window}
    for addresses in ("moving", "fixed")
    for sizes in (c, (2, c, 7), (c, C))
    for layout in ("bskd", "bksd", "bksd-kt")
    for window in (None, 5)
]
FITTING = [(past, n) for past in PASTS for n in SUFFIXES if past + n <= C]


def named(settings):
    return "-".join(str(value).replace(" ", "") for value in settings.values())


def others(ids):
    """As many tokens, each another one."""
    return [(token + 1) % 23 for token in ids]


def feeds_of(recorder):
    return [feeds for _, feeds in recorder.runs]


# Kept


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_a_second_turn_equals_a_cold_prefill(settings):
    ids = some_ids(C, seed=2)
    want = whole_pass(ids, settings["window"])
    session, recorder = toy(C=C, **settings)
    for past, n in FITTING:
        session.reset()
        session.prefill(ids[:past])
        recorder.runs.clear()
        close(session.prefill(ids[past : past + n]), want[past + n - 1])
        assert sum(graph.rows for graph, _ in recorder.runs) >= n
        assert session.tokens == ids[: past + n]


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_a_turn_after_a_rewind_equals_a_cold_prefill(settings):
    """One layer is full, so nothing may have been evicted: P never passes C."""
    ids = some_ids(C, seed=3)
    want = whole_pass(ids, settings["window"])
    session, _ = toy(C=C, **settings)
    for past, n in FITTING:
        for back in (1, 2, 4):  # Cs - (W - 1) is c or more
            ahead = min(past + back, C)
            session.reset()
            session.prefill(ids[:past] + others(ids[past:ahead]))
            session.rewind(past)
            assert (session.position, session.tokens) == (past, ids[:past])
            close(session.prefill(ids[past : past + n]), want[past + n - 1])
            assert session.tokens == ids[: past + n]


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_a_whole_sequence_runs_from_the_first_token_that_differs(settings):
    ids = some_ids(C, seed=4)
    want = whole_pass(ids, settings["window"])
    session, recorder = toy(C=C, **settings)
    for past, n in FITTING:
        for differing in (0, 2):  # tokens after `past` that are others
            session.reset()
            session.prefill(ids[:past] + others(ids[past : past + differing]))
            recorder.runs.clear()
            close(session.prefill(ids[: past + n], reuse=True), want[past + n - 1])
            assert session.tokens == ids[: past + n]
            first = recorder.runs[0][1]
            assert first["position_ids"].max() < past + first["position_ids"].size
            taken = sum(graph.rows for graph, _ in recorder.runs)
            pads = sum(int((feeds["attention_mask"] != 0).all(-1).sum()) for feeds in feeds_of(recorder))
            assert taken - pads == n


def test_the_same_sequence_again_runs_its_last_token_alone():
    ids = some_ids(13)
    session, recorder = toy(c=4)
    session.prefill(ids)
    for given in (ids, ids[:9]):
        recorder.runs.clear()
        close(session.prefill(given, reuse=True), whole_pass(given)[-1])
        assert [feeds["position_ids"].max() for feeds in feeds_of(recorder)] == [len(given) - 1]
        assert session.tokens == given


def test_a_reply_that_was_generated_is_part_of_what_is_kept():
    ids = some_ids(9)
    session, recorder = toy(c=4)
    reply = list(session.generate(ids, max_new_tokens=5))
    recorder.runs.clear()
    whole = [*ids, *reply, 3, 4]
    close(session.prefill(whole, reuse=True), whole_pass(whole)[-1])
    first = recorder.runs[0][1]
    assert first["position_ids"][0, -1] - (first["attention_mask"][0, 0] == 0).any(-1).sum() + 1 == 13


# Not kept


def test_where_nothing_can_be_kept_the_whole_sequence_runs_again():
    ids = some_ids(40, seed=1)
    session, recorder = toy(c=4)
    session.prefill(ids[:30], on_limit="roll")
    with pytest.raises(LimitError):
        session.rewind(20)
    assert session.tokens == ids[:30]
    recorder.runs.clear()
    given = [*ids[:20], *some_ids(3, seed=9)]
    close(session.prefill(given, reuse=True), whole_pass(given)[-1])
    assert session.tokens == given
    assert recorder.runs[0][1]["position_ids"][0, -1] == 2


@pytest.mark.parametrize("addresses", ["moving", "fixed"])
@pytest.mark.parametrize(("window", "cs"), [(3, 6), (5, 8), (9, 12)])
def test_layers_with_a_window_go_back_as_far_as_their_slots_allow(addresses, window, cs):
    ids = some_ids(40, seed=2)
    for back in range(1, cs - (window - 1) + 1):
        session, _ = toy(c=4, C=24, window=window, full=False, addresses=addresses)
        session.prefill(ids[:23])
        with pytest.raises(LimitError):
            session.rewind(23 - (cs - (window - 1)) - 1)
        assert session.tokens == ids[:23]
        session.rewind(23 - back)
        given = [*ids[: 23 - back], 7, 8]
        if len(given) <= 24:
            close(session.prefill([7, 8]), whole_pass(given, window, full=False)[-1])


def test_rewinds_count_from_the_farthest_token():
    ids = some_ids(23, seed=2)
    session, _ = toy(c=4, C=24, window=5, full=False)
    session.prefill(ids)  # Cs = 8: four can be taken back
    session.rewind(21)
    session.rewind(19)
    with pytest.raises(LimitError):
        session.rewind(18)
    session.rewind(19)
    close(session.decode(4), whole_pass([*ids[:19], 4], 5, full=False)[-1])


def test_a_rewind_to_where_it_is_changes_nothing():
    ids = some_ids(31, seed=2)
    session, _ = toy(c=4, C=24, window=5)
    session.prefill(ids[:30], on_limit="roll")
    session.rewind(30)
    assert session.tokens == ids[:30]


@pytest.mark.parametrize("position", [-1, 6, 100])
def test_a_rewind_to_a_position_that_was_not_reached_is_refused(position):
    session, _ = toy(c=4)
    session.prefill(some_ids(5))
    with pytest.raises(ValueError, match=str(position)) as caught:
        session.rewind(position)
    assert caught.value.exit_code == 2
    assert session.tokens == some_ids(5)


# Saved states


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
@pytest.mark.parametrize("past", [1, C - 1, C])
def test_a_snapshot_stays_as_it_was_whatever_the_session_does_next(past, settings):
    """At P = C the whole window is copied, not looked at."""
    ids = some_ids(C, seed=5)
    session, _ = toy(C=C, **settings)
    session.prefill(ids[:past])
    snapshot = session.snapshot()
    session.decode(3, on_limit="roll")
    session.reset()
    session.prefill(others(ids))
    session.restore(snapshot)
    assert session.tokens == ids[:past]
    given = [*ids[: past - 1], 7, 8][:C]
    close(session.prefill(given, reuse=True), whole_pass(given, settings["window"])[-1])


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_snapshot_after_the_longest_rewind_goes_on(tmp_path, window):
    """With a window of one token nothing of the layers may be held any more."""
    ids = some_ids(20, seed=2)
    session, _ = toy(c=4, C=24, window=window, full=False)
    session.prefill(ids)
    session.rewind(16)
    session.save(tmp_path / "file")
    snapshot = session.snapshot()
    for back in (lambda: session.restore(snapshot), lambda: session.load_prefix(tmp_path / "file")):
        session.reset()
        back()
        if window > 1:
            with pytest.raises(LimitError):
                session.rewind(15)
        close(session.prefill([7, 8]), whole_pass([*ids[:16], 7, 8], window, full=False)[-1])


# Pinned tokens


@pytest.mark.parametrize("layout", ["bskd", "bksd", "bksd-kt"])
@pytest.mark.parametrize("c", [1, 4, 9, 10, 11, 12])
def test_runs_past_the_end_see_every_pinned_token_whatever_their_number(c, layout):
    """A run of c rows sees C - c slots of the cache: with more pinned tokens smaller graphs take its place."""
    for sinks in sorted({1, 3, *(s for s in (11 - c, 12 - c, 13 - c, 11) if 1 <= s < 12)}):
        session, recorder = toy(c=c, C=12, layout=layout)
        for seed, n in enumerate((7, 12, 1, 13, 3)):
            logits = session.prefill(some_ids(n, seed), on_limit="sinks", sinks=sinks)
            record = Record()
            for _, feeds in recorder.runs:
                record.take(feeds, sinks)
            assert session.tokens == record.tokens
            close(logits, record.logits(session.bundle)[-1])


# Tokens that came as embeddings


def test_matching_stops_at_a_token_that_came_as_an_embedding(tmp_path):
    ids = some_ids(14)
    picture = np.random.default_rng(1).standard_normal((3, 12)).astype(np.float32)
    session, recorder = embeds_toy(tmp_path / "b", c=4)
    session.prefill(ids[:5])
    session.prefill(embeds=picture)
    session.prefill(ids[8:11])
    assert session.tokens == [*ids[:5], -1, -1, -1, *ids[8:11]]
    recorder.runs.clear()
    close(session.prefill(ids, reuse=True), whole_pass(None, embeds=ROWS[ids])[-1])
    pads = int((recorder.runs[0][1]["attention_mask"] != 0).all(-1).sum())
    assert recorder.runs[0][1]["position_ids"][0, pads] == 5
    assert session.tokens == ids


def test_tokens_after_an_embedding_go_on_from_it(tmp_path):
    ids = some_ids(8)
    picture = np.random.default_rng(1).standard_normal((3, 12)).astype(np.float32)
    session, _ = embeds_toy(tmp_path / "b", c=4)
    session.prefill(embeds=picture)
    session.prefill(others(ids))
    session.rewind(3)
    close(session.prefill(ids), whole_pass(None, embeds=np.concatenate((picture, ROWS[ids])))[-1])


def test_a_whole_sequence_under_another_limit_policy_runs_anew():
    session, recorder = toy(c=4, C=24)
    ids = some_ids(26)
    session.prefill(ids[:24])
    session.prefill(ids[24:], on_limit="sinks", sinks=2)
    other, _ = toy(c=4, C=24)
    whole = [*session.tokens, 5]
    with pytest.raises(LimitError, match="cannot go on by roll"):
        session.prefill([5], on_limit="roll")
    runs = len(recorder.runs)
    np.testing.assert_array_equal(
        session.prefill(whole, reuse=True, on_limit="roll"), other.prefill(whole, on_limit="roll")
    )
    assert len(recorder.runs) - runs == 7  # of 27 tokens


def test_a_snapshot_with_ids_or_positions_that_the_model_does_not_have_is_refused():
    session, _ = toy(c=4, C=24, most=24)
    session.prefill(some_ids(10))
    saved = session.snapshot()
    with pytest.raises(LimitError, match=f"the saved tokens hold the id {V}, the vocabulary ends at {V - 1}"):
        session.restore(dataclasses.replace(saved, tokens=(*saved.tokens[:-1], V)))
    with pytest.raises(LimitError, match="reach a rotary position beyond the model's 24"):
        session.restore(dataclasses.replace(saved, offsets=((0, 0), (5, 15))))
    assert session.tokens == list(saved.tokens)
