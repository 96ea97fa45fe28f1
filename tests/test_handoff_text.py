"""The user's text as token ids: streams, records, chat, what is longer than L; and where a session stops in it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Recorder

from rollkv.export.handoff_runs import Recorded, Tap, calibration_stops, golden_stops, journeys, reach, record, served
from rollkv.export.handoff_text import Corpus, HandoffError, read_corpus
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import Bundle
from rollkv.runtime.loaded import LoadedBundle
from rollkv.runtime.session import Session
from rollkv.runtime.text import Tokenizer

NON_ASCII = "你好世界，你好。🙂👩‍🚀 grüße aus köln\u2028" * 400


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_bytes(text.encode())
    return file


def test_a_text_file_is_one_stream_with_bos_before_every_sequence(text_bundle: Bundle, tmp_path: Path) -> None:
    tokenizer = Tokenizer(text_bundle.path)
    corpus = read_corpus(write(tmp_path, "t.txt", NON_ASCII), text_bundle, chat=False)
    ids = tokenizer.encode(NON_ASCII)
    assert len(ids) > 3000
    assert len(corpus) == len(ids)
    assert corpus.take(0, 500) == ids[:500]
    assert corpus.take(100, 500) == [ids[0], *ids[101:600]]
    assert corpus.remarks == (
        f"the text has {len(ids) - 1} tokens, more than L = 120: it goes in, in turns of at most L",
    )


def test_a_byte_order_mark_is_no_text(text_bundle: Bundle, tmp_path: Path) -> None:
    plain = read_corpus(write(tmp_path, "t.txt", "hello"), text_bundle, chat=False)
    assert read_corpus(write(tmp_path, "t.txt", "\ufeffhello"), text_bundle, chat=False) == plain


def test_records_are_encoded_each_by_itself_and_cut_to_l(text_bundle: Bundle, tmp_path: Path) -> None:
    tokenizer = Tokenizer(text_bundle.path)
    texts = ["hello\u2028you", NON_ASCII, "now"]
    lines = [json.dumps({"prompt": texts[0]}, ensure_ascii=False), "", json.dumps({"text": texts[1]})]
    file = write(tmp_path, "t.jsonl", "\r\n".join([*lines, json.dumps({"prompt": texts[2]})]))
    corpus = read_corpus(file, text_bundle, chat=False)
    encoded = [tokenizer.encode(text) for text in texts]
    assert list(corpus.stream) == [*encoded[0], *encoded[1][:120], *encoded[2]]
    assert list(corpus.starts) == [0, len(encoded[0]), len(encoded[0]) + 120]
    assert corpus.prefix == ()
    assert corpus.remarks == (
        f"1 of 3 lines are longer than L = 120 tokens (lines 3, up to {len(encoded[1])} tokens): of each the first L "
        "are used",
    )


def test_chat_puts_the_template_around_records_and_around_lines_of_a_text_file(
    text_bundle: Bundle, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(text_bundle.path)
    said = [{"role": "system", "content": "kind"}, {"role": "user", "content": "hello"}]
    lines = [json.dumps(record) for record in ({"prompt": "a"}, {"text": "a"}, {"messages": said}, {"ids": [5, 6]})]
    corpus = read_corpus(write(tmp_path, "t.jsonl", "\n".join(lines)), text_bundle, chat=True)
    alone = tokenizer.chat_ids([{"role": "user", "content": "a"}])
    assert list(corpus.stream) == [*alone, *alone, *tokenizer.chat_ids(said), 5, 6]
    text = read_corpus(write(tmp_path, "t.txt", "a\n\nhow are\r\n"), text_bundle, chat=True)
    assert list(text.stream) == [*alone, *tokenizer.chat_ids([{"role": "user", "content": "how are"}])]
    assert list(text.starts) == [0, len(alone)]


def test_a_template_that_refuses_a_record_is_said_with_its_line(text_source: Path, tmp_path: Path) -> None:
    from toy_tokenizers import CONFIG, byte_level
    from toy_tokenizers import write as save

    folder = tmp_path / "b"
    save(folder, byte_level(), **CONFIG, chat_template="{{ raise_exception('only one') }}")
    bundle: Any = type("Opened", (), {"path": folder, "manifest": None})()
    with pytest.raises(
        HandoffError, match=r"t\.jsonl, line 2: .* the chat template refuses this conversation: only one"
    ):
        read_corpus(write(tmp_path, "t.jsonl", '\n{"prompt": "a"}'), bundle, chat=True)


def test_starts_are_spread_over_those_that_enough_tokens_follow() -> None:
    corpus = Corpus(stream=range(100), starts=range(100), prefix=(7,))
    assert [corpus.start(61, index, 4) for index in range(4)] == [0, 10, 20, 30]
    assert all(len(corpus.take(corpus.start(61, index, 4), 61)) == 61 for index in range(4))
    assert corpus.start(1000, 3, 4) == 0
    records = Corpus(stream=range(100), starts=[0, 40, 90])
    assert [records.start(60, index, 2) for index in range(2)] == [0, 40]
    assert [records.start(61, index, 2) for index in range(2)] == [0, 0]


def test_a_graph_serves_from_where_no_smaller_one_does(bundle: Callable[..., Bundle]) -> None:
    m = bundle("llama", chunk_size=(4, 8), context_buckets=(12, 24), kv_layout="bksd-kt").manifest
    ranges = {graph.file: served(m, graph) for graph in m.graphs}
    assert ranges["prefill_c8_k12.onnx"] == (0, 4)
    assert ranges["prefill_c8_k24.onnx"] == (5, 16)
    assert ranges["prefill_c8_k48.onnx"] == (17, 40)
    assert ranges["decode_k48.onnx"] == (24, 47)
    for graph in m.graphs:
        least, most = ranges[graph.file]
        for stop in (*calibration_stops(m, graph, 500, 11), *golden_stops(m, graph, 500)):
            assert least <= stop.position <= most
        assert reach(m, graph, 500) == most


def test_sequences_pass_their_stops_in_order(bundle: Callable[..., Bundle]) -> None:
    m = bundle("llama").manifest
    stops = calibration_stops(m, m.graphs[0], 500, 17)
    planned = journeys(stops)
    assert sorted((s.position, s.tokens) for j in planned for s in j) == sorted((s.position, s.tokens) for s in stops)
    for journey in planned:
        assert all(a.end <= b.position for a, b in itertools.pairwise(journey))


@pytest.mark.parametrize("kv_layout", ["bskd", "bksd-kt"])
def test_what_is_recorded_is_what_a_session_feeds_for_those_tokens(
    kv_layout: str, bundle: Callable[..., Bundle]
) -> None:
    """Against a session of its own that takes the tokens before a run in one go, and then the run."""
    opened = bundle("llama", kv_layout=kv_layout)
    ids = np.random.default_rng(5).integers(0, opened.manifest.vocab_size, 200).tolist()
    corpus = Corpus(stream=ids, starts=range(200))
    tap = Tap(OrtBackend(opened))
    loaded = LoadedBundle(opened, backend=tap)
    runs: list[Recorded] = []
    for graph in opened.manifest.graphs:
        record(loaded, tap, corpus, calibration_stops(opened.manifest, graph, 200, 8), runs.append)
    assert len(runs) == 16
    for run in runs:
        recorder = Recorder(OrtBackend(opened))
        session = Session(opened, backend=recorder)
        before = corpus.take(run.start, run.stop.position)
        for at in range(0, len(before), 40):
            session.prefill(before[at : at + 40])
        if run.stop.graph.role == "decode":
            session.decode(run.ids[0])
        else:
            session.prefill(run.ids)
        graph, feeds = recorder.runs[-1]
        assert graph.file == run.stop.graph.file
        assert list(feeds) == list(run.inputs)
        for name, array in feeds.items():
            if not name.startswith("past"):
                assert np.array_equal(array, run.inputs[name]), name
            else:
                assert np.allclose(array, run.inputs[name], atol=1e-4 * np.abs(array).max() + 1e-12), name


def test_where_the_text_has_ended_the_model_goes_on(bundle: Callable[..., Bundle]) -> None:
    opened = bundle("llama")
    corpus = Corpus(stream=[3, 4, 5], starts=[0])
    tap = Tap(OrtBackend(opened))
    runs: list[Recorded] = []
    decode = opened.manifest.graphs[-1]
    record(LoadedBundle(opened, backend=tap), tap, corpus, golden_stops(opened.manifest, decode, 3), runs.append)
    session = Session(opened)
    want = list(session.generate([3, 4, 5], max_new_tokens=1, ignore_eos=True))
    assert [run.ids for run in runs][:1] == [(5,)]
    assert runs[1].ids == tuple(want)
    assert [run.stop.position for run in runs] == [2, 3, 4]
