import dataclasses
import random
import shutil
import warnings

import numpy as np
import pytest

from benchmarks.float16 import halved
from rollkv.runtime.backend import BackendError, FeedError, OrtBackend
from rollkv.runtime.bundle import Bundle, BundleError, open_bundle
from rollkv.runtime.cover import Run
from rollkv.runtime.sampling import NonFiniteLogits
from rollkv.runtime.session import Session

C, ROWS = 48, 8


@pytest.fixture(scope="module", params=["llama", "window"])
def each(request, bundle):
    """A bundle as exported by default; another with a window, int64 ids and transposed keys."""
    if request.param == "llama":
        return bundle("llama")
    return bundle("mistral-window", ids="int64", kv_layout="bksd-kt")


@pytest.fixture(scope="module")
def llama(bundle):
    return bundle("llama")


def some_ids(n, seed=0):
    return random.Random(seed).choices(range(307), k=n)


def prefill_feeds(opened, n=5):
    """The prefill graph, and the feeds of a first run of n tokens."""
    session = Session(opened)
    graph = next(graph for graph in opened.manifest.graphs if graph.role == "prefill")
    return graph, session.feeds(graph, Run(ROWS, ROWS - n), some_ids(n))


def copied(outputs):
    return {name: array.copy() for name, array in outputs.items()}


def relative(got, want):
    """Largest difference, relative to the largest value."""
    return np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()


# Feeds


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("input_ids", lambda a: a.astype(np.int64), "input input_ids got int64, want int32"),
        ("attention_mask", lambda a: a.astype(np.float64), "input attention_mask got float64, want float32"),
        ("past_key_0", lambda a: a.astype(np.float16), "input past_key_0 got float16, want float32"),
        ("position_ids", lambda a: a[:, :7], r"input position_ids got shape \(1, 7\), want \(1, 8\)"),
        ("position_ids", lambda a: a[0], r"input position_ids got shape \(8,\), want \(1, 8\)"),
        ("past_value_1", lambda a: a.swapaxes(1, 2), r"got shape \(1, 2, 48, 6\), want \(1, 48, 2, 6\)"),
        ("past_value_1", np.asfortranarray, "input past_value_1 is not C-contiguous"),
        ("past_key_1", lambda a: None, "input past_key_1 is not fed"),
    ],
)
def test_a_wrong_feed_is_refused_with_its_name_what_came_and_what_is_wanted(llama, name, change, message):
    backend = OrtBackend(llama, threads=1)
    graph, feeds = prefill_feeds(llama)
    wrong = {**feeds, name: change(feeds[name])}
    if wrong[name] is None:
        del wrong[name]
    with pytest.raises(FeedError, match=rf"graph prefill\.onnx: .*{message}") as caught:
        backend.run(graph, wrong)
    assert caught.value.exit_code == 2
    assert np.isfinite(backend.run(graph, feeds)["logits"]).all()


def test_an_input_too_many_is_refused(llama):
    graph, feeds = prefill_feeds(llama)
    with pytest.raises(FeedError, match=r"graph prefill\.onnx: 'cache' is no input of it"):
        OrtBackend(llama, threads=1).run(graph, {**feeds, "cache": feeds["input_ids"]})


# Numbers


@pytest.mark.parametrize("n", [1, ROWS - 1, ROWS, ROWS + 1])
def test_fully_masked_pad_rows_leave_every_output_finite(each, n):
    class Finite(OrtBackend):
        bind = None  # so that every run comes by here
        runs = 0

        def run(self, graph, feeds):
            outputs = super().run(graph, feeds)
            for name, array in outputs.items():
                assert np.isfinite(array).all(), name
            Finite.runs += 1
            return outputs

    Session(each, backend=Finite(each, threads=1)).prefill(some_ids(n))
    assert Finite.runs == -(-n // ROWS)


def test_chunks_give_what_the_graph_of_one_row_gives_token_by_token(each):
    backend = OrtBackend(each, threads=1)
    chunked, stepped = Session(each, backend=backend), Session(each, backend=backend)
    ids = some_ids(40, seed=2)
    for i, token in enumerate(ids):
        logits = stepped.decode(token)
        if i in (0, 6, 7, 8, 20, 39):
            chunked.reset()
            assert relative(chunked.prefill(ids[: i + 1]), logits) < 1e-4


@pytest.mark.parametrize("huge", [100.0, 1e3])
def test_huge_values_in_hidden_slots_change_nothing(each, huge):
    backend = OrtBackend(each, threads=1)
    graph, feeds = prefill_feeds(each, n=5)
    want = copied(backend.run(graph, feeds))
    signs = np.random.default_rng(0)
    filled = {
        name: array if "past" not in name else (signs.choice([-1, 1], array.shape) * huge).astype(array.dtype)
        for name, array in feeds.items()
    }
    got = backend.run(graph, filled)  # a first run: every slot of the cache is hidden
    assert all(np.isfinite(array).all() for array in got.values())
    assert relative(got["logits"], want["logits"]) < 1e-6
    for name in ("new_key_1", "new_value_1"):
        axis = want[name].shape.index(ROWS)
        mine, other = (np.take(outputs[name], range(ROWS - 5, ROWS), axis) for outputs in (got, want))
        assert relative(mine, other) < 1e-6


def test_nan_in_the_cache_stops_the_generation_instead_of_giving_token_zero(llama):
    class Poisoned(OrtBackend):
        bind = None
        poison = True

        def run(self, graph, feeds):
            if self.poison:
                feeds["past_value_0"][0, -1, 0, 0] = np.nan  # a hidden slot: 0 x NaN is NaN
            return super().run(graph, feeds)

    backend = Poisoned(llama, threads=1)
    session = Session(llama, backend=backend)
    with pytest.raises(NonFiniteLogits, match=r"307 of 307 logits of graph prefill\.onnx are not finite"):
        next(session.generate([1, 2, 3]))
    backend.poison = False
    session.reset()
    want = Session(llama, threads=1).prefill([1, 2, 3])
    np.testing.assert_array_equal(session.prefill([1, 2, 3]), want)


def test_engine_optimisations_change_little_and_not_the_best_token(each):
    import onnxruntime

    session = Session(each, threads=1)
    session.prefill(some_ids(13))
    for graph in each.manifest.graphs:
        feeds = session.feeds(graph, Run(graph.rows, 0), some_ids(graph.rows, seed=3))
        results = []
        for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
            engine = onnxruntime.InferenceSession(each.path / graph.file, options, providers=["CPUExecutionProvider"])
            results.append(engine.run(["logits"], feeds)[0])
        assert np.abs(results[0] - results[1]).max() < 1e-3
        assert results[0].argmax() == results[1].argmax()


def test_low_memory_gives_the_same_numbers(each):
    ids = some_ids(20)
    usual, low = (Session(each, backend=OrtBackend(each, threads=1, memory=choice)) for choice in ("fast", "low"))
    assert relative(low.prefill(ids), usual.prefill(ids)) < 1e-5
    assert relative(low.decode(7), usual.decode(7)) < 1e-5


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_memory_and_threads_reach_the_engine(llama, monkeypatch, memory):
    import onnxruntime

    made, make = [], onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda path, options, **more: made.append(options) or make(path, options, **more),
    )
    OrtBackend(llama, threads=2, memory=memory)
    assert [options.intra_op_num_threads for options in made] == [2, 2]
    for options in made:
        if memory == "low":
            assert options.get_session_config_entry("session.disable_prepacking") == "1"
        else:
            with pytest.raises(RuntimeError, match="disable_prepacking"):
                options.get_session_config_entry("session.disable_prepacking")


def test_more_threads_give_the_same_numbers(llama):
    ids = some_ids(20)
    one, two = (Session(llama, threads=threads).prefill(ids) for threads in (1, 2))
    assert relative(two, one) < 1e-5


def test_outputs_have_the_manifests_names_shapes_and_types(each):
    backend = OrtBackend(each, threads=1)
    session = Session(each, backend=backend)
    for graph in each.manifest.graphs:
        outputs = backend.run(graph, session.feeds(graph, Run(graph.rows, 0), some_ids(graph.rows)))
        assert [(v.name, tuple(v.shape), v.dtype) for v in graph.outputs] == [
            (name, array.shape, array.dtype.name) for name, array in outputs.items()
        ]


# Damage


@pytest.fixture
def copy(llama, tmp_path):
    shutil.copytree(llama.path, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_graph_file_replaced_by_garbage_is_found_when_the_bundle_is_opened(copy):
    file = copy / "prefill.onnx"
    file.write_bytes(b"\x07" * file.stat().st_size)
    with pytest.raises(BundleError, match=r"prefill\.onnx: its content is not what the manifest's sha256 says"):
        Session(copy)


@pytest.mark.parametrize("garbage", [b"", b"\x07" * 5000, b"<html>"])
def test_a_graph_that_the_engine_rejects_is_named(copy, garbage):
    opened = open_bundle(copy)
    (copy / "decode.onnx").write_bytes(garbage)
    with pytest.raises(BackendError, match=r"copy/decode\.onnx: ONNX Runtime cannot load it: ") as caught:
        Session(opened, threads=1)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)


def test_a_bundle_that_is_replaced_under_an_open_session_does_not_mix_with_it(copy, llama):
    here, there = Session(copy, threads=1), Session(llama, threads=1)
    here.prefill([1, 2, 3])
    for file in copy.iterdir():
        file.unlink()
    there.prefill([1, 2, 3])
    np.testing.assert_array_equal(here.decode(4), there.decode(4))


def test_weights_cut_short_after_opening_are_a_backend_error(copy):
    opened = open_bundle(copy)
    (copy / "weights.bin").write_bytes(b"")
    with pytest.raises(BackendError, match=r"prefill\.onnx: ONNX Runtime cannot load it"):
        Session(opened, threads=1).prefill([1])


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "inputs",
            {"dtype": "int64"},
            r"the manifest says \('input_ids', \[1, 8\], 'tensor\(int64\)'\), the graph has",
        ),
        ("inputs", {"shape": [1, 9]}, r"the manifest says \('input_ids', \[1, 9\]"),
        ("outputs", {"name": "scores"}, r"the manifest says \('scores', \[1, 1, 307\]"),
    ],
)
def test_a_manifest_that_does_not_fit_the_graph_is_refused(llama, part, change, message):
    graphs = list(llama.manifest.graphs)
    values = list(getattr(graphs[0], part))
    values[0] = dataclasses.replace(values[0], **change)
    graphs[0] = dataclasses.replace(graphs[0], **{part: values})
    other = Bundle(llama.path, dataclasses.replace(llama.manifest, graphs=graphs))
    with pytest.raises(BundleError, match=rf"prefill\.onnx: {message}.*export again"):
        OrtBackend(other, threads=1)


def test_a_manifest_that_lists_a_value_less_than_the_graph_has_is_refused(llama):
    graphs = list(llama.manifest.graphs)
    graphs[0] = dataclasses.replace(graphs[0], inputs=graphs[0].inputs[:-1])
    other = Bundle(llama.path, dataclasses.replace(llama.manifest, graphs=graphs))
    with pytest.raises(BundleError, match=r"prefill\.onnx: the manifest says 6, the graph has 7"):
        OrtBackend(other, threads=1)


def test_a_run_that_fails_in_the_engine_is_a_backend_error_of_one_line(llama):
    backend = OrtBackend(llama, threads=1)
    graph, feeds = prefill_feeds(llama)
    feeds["input_ids"][0, -1] = 999
    with pytest.raises(BackendError, match=r"graph prefill\.onnx: ONNX Runtime failed: .*out of data bounds") as caught:
        backend.run(graph, feeds)
    assert "\n" not in str(caught.value)
    feeds["input_ids"][0, -1] = 9
    assert np.isfinite(backend.run(graph, feeds)["logits"]).all()


# Places


def test_it_runs_moved_linked_read_only_and_from_anywhere_and_writes_nothing(llama, copy, tmp_path, monkeypatch):
    want = Session(llama, threads=1).prefill([1, 2, 3])
    moved = tmp_path / "a folder" / "模型 包"
    moved.parent.mkdir()
    copy.rename(moved)
    link = tmp_path / "link"
    link.symlink_to(moved, target_is_directory=True)
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in moved.iterdir()}
    for file in moved.iterdir():
        file.chmod(0o444)
    moved.chmod(0o555)
    monkeypatch.chdir(moved.parent)
    try:
        for path in (moved, link, "模型 包", "../link/"):
            np.testing.assert_array_equal(Session(path, threads=1).prefill([1, 2, 3]), want)
    finally:
        moved.chmod(0o755)
    assert {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in moved.iterdir()} == before


# float16


def test_a_float16_copy_of_the_graphs_stays_finite_on_a_left_padded_chunk(each, tmp_path):
    opened = halved(each, tmp_path / "half")
    with pytest.warns(UserWarning, match="this bundle is float16: the CPU computes it in float32") as caught:
        session = Session(opened, threads=1)
    ids = some_ids(11)
    single = Session(each, threads=1)
    for n in (1, ROWS - 1, ROWS + 3):
        session.reset()
        single.reset()
        got = session.prefill(ids[:n])
        assert got.dtype == np.float16
        assert np.isfinite(got).all()
        assert relative(got, single.prefill(ids[:n])) < 0.05
    assert np.isfinite(session.decode(3)).all()
    assert len(caught) == 1


def test_a_float32_bundle_warns_of_nothing(llama):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Session(llama, threads=1).prefill([1, 2, 3])
