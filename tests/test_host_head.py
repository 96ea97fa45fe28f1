"""A head on the host: its product against NumPy's in float64, and sessions of graphs that give hidden states."""

import numpy as np
import pytest
from conftest import Recorder
from toy_forms import BIAS, FormsBackend, forms_manifest, forms_toy, read, save_forms
from toy_model import WEIGHTS, H, V, close, some_ids, whole_pass
from toy_reference import run_ends

from rollkv.runtime import head as head_module
from rollkv.runtime.align import PromptError
from rollkv.runtime.bundle import BundleError
from rollkv.runtime.head import HostHead
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.manifest import TableInfo
from rollkv.runtime.sampling import NonFiniteLogits, SamplingOptions, token_logprobs
from rollkv.runtime.session import Session
from rollkv.runtime.speculation import PromptLookup


@pytest.mark.parametrize("block", [1, 5 * H, 1 << 18])
@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "settings", [{}, {"bias": True}, {"scale": 0.4}, {"cap": 2.0}, {"bias": True, "scale": -3.0, "cap": 5.0}], ids=str
)
def test_the_product_equals_that_in_float64_on_what_is_stored(tmp_path, monkeypatch, block, storage, settings):
    monkeypatch.setattr(head_module, "_BLOCK", block)
    bundle = save_forms(tmp_path, forms_manifest(storage=storage, **settings))
    head, hidden = HostHead(bundle.path, bundle.manifest), np.random.default_rng(1).standard_normal(H)
    out = np.full(V, np.nan, np.float32)
    head.logits(hidden.astype(np.float32), out, head.scratch())
    want = read(WEIGHTS.head.T, storage) @ hidden.astype(np.float32)
    want = want + (read(BIAS, storage) if settings.get("bias") else 0)
    want = want * settings.get("scale", 1.0)
    if "cap" in settings:
        want = settings["cap"] * np.tanh(want / settings["cap"])
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_a_float16_hidden_state_is_widened_first(tmp_path):
    bundle = save_forms(tmp_path, forms_manifest(storage="float16"))
    head, hidden = HostHead(bundle.path, bundle.manifest), np.linspace(-2, 2, H).astype(np.float16)
    out = np.empty(V, np.float32)
    head.logits(hidden, out, head.scratch())
    want = read(WEIGHTS.head.T, "float16") @ hidden.astype(np.float64)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_a_table_that_is_shorter_than_its_shape_is_refused(tmp_path):
    bundle = save_forms(tmp_path, forms_manifest())
    (tmp_path / "head.bin").write_bytes(b"\0" * 40)
    with pytest.raises(BundleError, match=r"head\.bin: cannot be mapped as \[23, 12\] of float32"):
        LoadedBundle(bundle, backend=FormsBackend(bundle))


# Sessions


@pytest.mark.parametrize("feed", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_every_prompt_length_gives_the_logits_of_one_pass(tmp_path, feed, window):
    session, _ = forms_toy(tmp_path, feed=feed, window=window)
    ids = some_ids(24)
    for n in range(1, 24):
        session.reset()
        close(session.prefill(ids[:n]), whole_pass(ids[:n], window)[-1])
        close(session.decode(ids[n]), whole_pass(ids[: n + 1], window)[-1])


def test_with_embeddings_as_input_too_the_host_has_both_ends(tmp_path):
    session, recorder = forms_toy(tmp_path, tokens="embeds")
    ids = some_ids(13)
    close(session.prefill(ids), whole_pass(ids)[-1])
    assert {value.role for value in recorder.runs[0][0].inputs} == {
        "embeds", "rope_cos", "rope_sin", "attention_mask", "past_key", "past_value"
    }  # fmt: skip


@pytest.mark.parametrize(("limit", "sinks"), [({"on_limit": "roll"}, 0), ({"on_limit": "sinks", "sinks": 3}, 3)])
def test_rewinds_turns_and_a_full_cache_give_what_graphs_with_logits_give(tmp_path, limit, sinks):
    session, _ = forms_toy(tmp_path)
    ids, turns = some_ids(40), (4, 16, 1, 4, 8, 1, 1)
    ends, at = run_ends(turns, 4, 24), 4
    session.prefill(ids[:9])
    session.rewind(4)
    for n in turns[1:]:
        got = session.prefill(ids[at : at + n], **limit)
        at += n
        close(got, whole_pass(ids[:at], ends=ends[:at], kv_len=24, sinks=sinks)[-1])


def test_generation_picks_and_notes_by_the_hosts_logits(tmp_path):
    ids = some_ids(7)
    session, _ = forms_toy(tmp_path)
    answer = session.generate(ids, max_new_tokens=8, logprobs=3, ignore_eos=True)
    tokens = list(answer)
    rows = whole_pass([*ids, *tokens[:-1]])[6:]
    assert tokens == rows.argmax(-1).tolist()
    for noted, row, token in zip(answer.logprobs, rows, tokens, strict=True):
        want = token_logprobs(row, token, 3)
        assert [t for t, _ in noted.top] == [t for t, _ in want.top]
        assert noted.logprob == pytest.approx(want.logprob, abs=1e-4)
    session.reset()
    sampled = list(session.generate(ids, max_new_tokens=8, sampling=SamplingOptions(temperature=1.0, seed=3)))
    session.reset()
    assert sampled == list(session.generate(ids, max_new_tokens=8, sampling=SamplingOptions(temperature=1.0, seed=3)))


def test_the_product_is_made_for_the_last_run_of_a_prompt_alone(tmp_path, monkeypatch):
    made = []
    right = HostHead.logits
    monkeypatch.setattr(HostHead, "logits", lambda self, *given: made.append(1) or right(self, *given))
    session, recorder = forms_toy(tmp_path)
    close(session.prefill(some_ids(15)), whole_pass(some_ids(15))[-1])
    assert (len(recorder.runs), len(made)) == (4, 1)
    session.decode(3)
    assert len(made) == 2


def test_logits_belong_to_the_caller(tmp_path):
    session, _ = forms_toy(tmp_path)
    first = session.prefill([1, 2, 3])
    before = first.copy()
    session.decode(4)
    np.testing.assert_array_equal(first, before)
    assert first.dtype == np.float32


def test_a_product_that_is_not_finite_is_refused_and_the_run_leaves_no_trace(tmp_path):
    table = WEIGHTS.head.T.copy()
    table[5, 2] = np.inf
    session, _ = forms_toy(tmp_path, table=table)
    with pytest.raises(NonFiniteLogits, match=r"1 of 23 logits of graph prefill\.onnx are not finite"):
        session.prefill([1, 2, 3])
    assert session.position == 0


def test_hidden_states_that_are_not_finite_are_refused_by_that_name(tmp_path):
    bundle = save_forms(tmp_path, forms_manifest())

    class Broken(FormsBackend):
        def run(self, graph, feeds):
            outputs = super().run(graph, feeds)
            if graph.rows == 1:
                outputs["hidden_states"][0, 0, :2] = np.nan
            return outputs

    session = Session(bundle, backend=Broken(bundle))
    logits = session.prefill([1, 2, 3])
    with pytest.raises(NonFiniteLogits, match=r"2 of 12 hidden values of graph decode\.onnx are not finite"):
        session.decode(3)
    assert session.position == 3
    session.reset()
    np.testing.assert_array_equal(session.prefill([1, 2, 3]), logits)


def test_speculation_needs_a_graph_that_gives_all_logits(tmp_path):
    session, _ = forms_toy(tmp_path)
    with pytest.raises(PromptError, match="has no graph that gives the logits of every row"):
        session.generate([1, 2], speculate=PromptLookup())


def test_a_head_in_the_embeddings_file_is_not_scaled_as_embeddings_are(tmp_path):
    """A tied head: the toy model's embedding is stored over its scale, and so are the head's rows here."""
    manifest = forms_manifest(tokens="embeds")
    assert manifest.embedding is not None
    shared = TableInfo(file="embedding.bin", shape=[V, H], dtype="float32", scale=1.0)
    bundle = save_forms(tmp_path, type(manifest)(**{**vars(manifest), "head_table": shared}))
    session = Session(bundle, backend=Recorder(FormsBackend(bundle)))
    got = session.prefill([4, 9])
    hidden = session.sequence.arrays(session.loaded.prefill[4])._ends[0].astype(np.float64)
    want = hidden @ (WEIGHTS.embedding / manifest.embedding.scale).T
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
