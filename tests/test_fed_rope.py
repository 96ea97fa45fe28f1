"""Rotations that the host feeds: their numbers against the graphs' tables, and sessions of graphs that take them."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import Recorder
from test_loaded import BindingBackend
from toy_forms import FormsBackend, forms_manifest, forms_toy, save_forms
from toy_model import close, run_ends, some_ids, whole_pass

from rollkv.export.pipeline import rope_info
from rollkv.models.config import RopeConfig
from rollkv.models.rope import FedRope, Rope, query_scales, rope_tables
from rollkv.runtime.align import LimitError, three_part_positions
from rollkv.runtime.manifest import RopeInfo
from rollkv.runtime.prefix import PrefixError
from rollkv.runtime.rope import Rotation, cos_and_sin, query_scale
from rollkv.runtime.session import Session

LAST = 100_000
LONG = {"factor": 4.0, "original_max_position": 4096}
FACTORS = {"short_factor": (1.0,) * 16, "long_factor": tuple(1.0 + 0.3 * i for i in range(16))}
ROPES = {
    "default": RopeConfig(type="default", theta=10000.0, rotary_dim=64),
    "large theta": RopeConfig(type="default", theta=5e6, rotary_dim=128),
    "linear": RopeConfig(type="linear", theta=10000.0, rotary_dim=64, factor=8.0),
    "dynamic": RopeConfig(type="dynamic", theta=10000.0, rotary_dim=64, factor=4.0, original_max_position=512),
    "llama3": RopeConfig(type="llama3", theta=5e5, rotary_dim=64, low_freq_factor=1.0, high_freq_factor=4.0, **LONG),
    "yarn": RopeConfig(type="yarn", theta=10000.0, rotary_dim=64, beta_fast=32.0, beta_slow=1.0, **LONG),
    "longrope": RopeConfig(type="longrope", theta=10000.0, rotary_dim=32, original_max_position=512, **FACTORS),
    "proportional": RopeConfig(type="proportional", theta=1e6, rotary_dim=64, rotated_pairs=8),
}


def ulps(a, b):
    """How many float32 numbers lie between, elementwise."""
    a, b = (np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64) for x in (a, b))
    a, b = (np.where(x < 0, -(x & 0x7FFFFFFF), x) for x in (a, b))
    return np.abs(a - b)


@pytest.mark.parametrize("name", ROPES)
def test_cos_and_sin_are_those_of_the_graphs_tables_to_the_last_but_one_bit(name):
    rope = ROPES[name]
    wanted = [table.numpy() for table in rope_tables(rope, LAST + 1, 1024)]
    got = cos_and_sin(rope_info(rope, 1024), np.arange(LAST + 1))
    for table, rows in zip(wanted, got, strict=True):
        assert rows.dtype == np.float32
        assert rows.shape == (LAST + 1, rope.rotary_dim)
        assert ulps(rows[:, : rope.pairs], table).max() <= 1
        np.testing.assert_array_equal(rows[:, : rope.rotary_dim // 2], rows[:, rope.rotary_dim // 2 :])


def test_a_scaling_is_multiplied_in_after_cos_is_rounded():
    """So it may be one more float32 away than the unscaled one, which is at most one from that of torch."""
    rope = replace(ROPES["yarn"], attention_scaling=1.1386)
    plain = cos_and_sin(rope_info(ROPES["yarn"], 1024), np.arange(LAST + 1))
    scaled = cos_and_sin(rope_info(rope, 1024), np.arange(LAST + 1))
    for one, other, table in zip(plain, scaled, rope_tables(rope, LAST + 1, 1024), strict=True):
        np.testing.assert_array_equal(other, one * np.float32(1.1386))
        assert ulps(other[:, :32], table.numpy()).max() <= 2
        assert np.abs(other[:, :32] - table.numpy()).max() <= 2.0**-23  # one ulp of what is above 1


def test_pairs_at_rest_have_cos_1_and_sin_0():
    cos, sin = cos_and_sin(rope_info(ROPES["proportional"], 1024), np.array([0, 1, 77777]))
    assert (cos[:, 8:32] == 1).all()
    assert (sin[:, 8:32] == 0).all()
    assert (cos[1:, :8] != 1).all()


def test_the_numbers_of_a_small_rope_written_out():
    rope = RopeInfo(inv_freq=[1.0, 0.5], rotary_dim=4, interleaved=False, attention_scaling=2.0)
    cos, sin = cos_and_sin(rope, np.array([0, 2]))
    np.testing.assert_allclose(cos, [[2, 2, 2, 2], [-0.8322937, 1.0806046, -0.8322937, 1.0806046]], rtol=1e-6)
    np.testing.assert_allclose(sin, [[0, 0, 0, 0], [1.8185949, 1.6829420, 1.8185949, 1.6829420]], rtol=1e-6)


def test_a_float16_input_gets_the_float32_numbers_rounded_once_more():
    info, positions = rope_info(ROPES["large theta"], 1024), np.arange(LAST, LAST + 7)
    wide = cos_and_sin(info, positions)
    narrow = [np.zeros((7, 128), np.float16) for _ in range(2)]
    Rotation(info, 7).fill(positions, *narrow)
    for half, whole in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(half, whole.astype(np.float16))


def test_sections_turn_by_the_position_that_the_graphs_own_look_up_takes():
    rope = replace(ROPES["default"], sections=(8, 12, 12))
    module = Rope(rope, 64)
    module.cos.data, module.sin.data = rope_tables(rope, 64, 1024)
    positions = three_part_positions(30, [(4, 3, 5)])
    want = module(torch.from_numpy(positions)[:, None])
    cos, sin = map(torch.from_numpy, cos_and_sin(rope_info(rope, 1024), positions))
    for ours, theirs in zip(FedRope()(cos[None], sin[None]), want, strict=True):
        assert ulps(ours.numpy(), theirs.detach().numpy()).max() <= 1


@pytest.mark.parametrize("length", [16, 8192])
def test_the_scale_of_queries_is_that_of_the_graphs_table(length):
    rope = replace(ROPES["default"], query_scale=(0.1, length))
    got = query_scale(rope_info(rope, 1024), np.arange(LAST + 1))
    wanted = query_scales(rope, LAST + 1)
    assert wanted is not None
    assert got.shape == (LAST + 1, 1)
    assert ulps(got, wanted.numpy()).max() <= 2
    assert (got[:length] == 1).all()
    assert got[length, 0] == np.float32(1 + 0.1 * np.log(2))


# Sessions: the toy model finds the position that cos and sin belong to


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("c", [1, 3, 4])
def test_every_prompt_length_gives_the_logits_of_one_pass(tmp_path, c, window):
    session, _ = forms_toy(tmp_path, hidden=False, c=c, window=window)
    ids = some_ids(24)
    for n in range(1, 25):
        session.reset()
        close(session.prefill(ids[:n]), whole_pass(ids[:n], window)[-1])


def test_turns_rewinds_and_reuse_feed_the_positions_that_follow(tmp_path):
    session, recorder = forms_toy(tmp_path, hidden=False)
    ids = some_ids(20)
    session.prefill(ids[:7])
    close(session.decode(ids[7]), whole_pass(ids[:8])[-1])
    session.rewind(5)
    close(session.prefill(ids[5:11]), whole_pass(ids[:11])[-1])
    close(session.prefill(ids[:9] + ids[12:], reuse=True), whole_pass(ids[:9] + ids[12:])[-1])
    assert all("position_ids" not in feeds for _, feeds in recorder.runs)


def test_a_pad_has_position_0(tmp_path):
    session, recorder = forms_toy(tmp_path, hidden=False)
    session.prefill(some_ids(6))
    (_, feeds), _ = recorder.runs
    assert (feeds["rope_cos"][0, :3] == 1).all()
    assert (feeds["rope_sin"][0, :3] == 0).all()
    np.testing.assert_allclose(feeds["rope_sin"][0, 3], np.sin([1, 0.4, 0.09] * 2), atol=1e-7)


@pytest.mark.parametrize(("limit", "sinks"), [({"on_limit": "roll"}, 0), ({"on_limit": "sinks", "sinks": 3}, 3)])
def test_past_the_cache_positions_go_on_and_pinned_tokens_move(tmp_path, limit, sinks):
    session, _ = forms_toy(tmp_path, hidden=False, C=24)
    ids, turns = some_ids(60), (20, 1, 1, 16, 1, 4, 1)
    ends, at = run_ends(turns, 4, 24), 0
    for n in turns:
        got = session.prefill(ids[at : at + n], **limit)
        at += n
        close(got, whole_pass(ids[:at], ends=ends[:at], kv_len=24, sinks=sinks)[-1])


def test_the_models_last_position_ends_it_with_length(tmp_path):
    session, _ = forms_toy(tmp_path, hidden=False, C=24, most=30)
    answer = session.generate(some_ids(20), max_new_tokens=100, ignore_eos=True, on_limit="roll")
    assert len(list(answer)) == 11
    assert answer.finish_reason == "length"
    with pytest.raises(LimitError, match="pass the model's positions = 30"):
        session.prefill([1, 2], on_limit="roll")


def test_three_positions_of_a_token_are_fed_by_section(tmp_path):
    bundle = save_forms(tmp_path, forms_manifest(hidden=False, three_part=True))
    session = Session(bundle, backend=Recorder())
    positions = three_part_positions(10, [(2, 2, 3)])
    session.prefill(some_ids(10), positions=positions)
    session.decode(3)
    fed = np.concatenate([feeds["rope_sin"][0] for _, feeds in session.backend.runs])[2:]  # two pads
    turned = np.hstack((positions, [[6 + 1]] * 3)) * np.array([[1.0], [0.4], [0.09]])  # what follows the image goes on
    np.testing.assert_allclose(fed, np.tile(np.sin(turned), (2, 1)).T, atol=1e-6)


def test_a_float16_bundle_is_fed_float16(tmp_path):
    session, recorder = forms_toy(tmp_path, hidden=False, dtype="float16")
    session.prefill(some_ids(5))
    assert {feeds[name].dtype for _, feeds in recorder.runs for name in ("rope_cos", "rope_sin")} == {np.dtype("f2")}


def test_a_saved_prefix_goes_on_and_belongs_to_its_bundle_alone(tmp_path):
    session, _ = forms_toy(tmp_path / "a", hidden=True)
    ids = some_ids(15)
    session.prefill(ids[:9])
    session.save(tmp_path / "saved")
    again, _ = forms_toy(tmp_path / "b", hidden=True)
    again.load_prefix(tmp_path / "saved")
    close(again.prefill(ids[9:]), whole_pass(ids)[-1])
    for settings in ({"hidden": False}, {"feed": False}, {"cap": 3.0}):
        other, _ = forms_toy(tmp_path / str(settings), **settings)
        with pytest.raises(PrefixError, match="saved from the bundle with sha256"):
            other.load_prefix(tmp_path / "saved")


@pytest.mark.parametrize("hidden", [False, True])
def test_a_step_allocates_no_arrays(tmp_path, hidden):
    """What stays the same however long the cache: views, the token, a generator's frame."""
    peaks = []
    for slots in (64, 1024):
        bundle = save_forms(tmp_path / str(slots), forms_manifest(hidden=hidden, c=8, C=slots, most=5000))
        session = Session(bundle, backend=BindingBackend(bundle, silent=True))
        generation = session.generate(some_ids(40), max_new_tokens=500, ignore_eos=True, on_limit="roll")
        for _ in range(50):
            next(generation)
        tracemalloc.start()
        for _ in range(20):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            next(generation)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
    assert max(peaks) < 6000, peaks


def test_the_rotation_of_a_large_head_is_filled_into_memory_that_is_there():
    rotation = Rotation(rope_info(ROPES["large theta"], 1024), 128)
    cos, sin, positions = np.zeros((128, 128), np.float32), np.zeros((128, 128), np.float32), np.arange(128)
    rotation.fill(positions, cos, sin)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    rotation.fill(positions, cos, sin)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 4000  # one line of float64 for each row would be 65,536 bytes


def test_the_backend_of_these_tests_knows_a_wrong_position(tmp_path):
    bundle = save_forms(tmp_path, forms_manifest(hidden=False))
    backend = FormsBackend(bundle)
    good = cos_and_sin(bundle.manifest.rope["full"], np.array([17]))
    assert backend.positions({"rope_cos": good[0][None], "rope_sin": good[1][None]}) == [17]
    with pytest.raises(AssertionError):
        backend.positions({"rope_cos": good[0][None], "rope_sin": -good[1][None]})
