"""Exports whose rotations or head are on the host: what is in them, the ladder on them, and what it finds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import export, make_checkpoint
from proof import MODELS, prove
from test_verify import _resign, climb

from rollkv.export.artefact import stored_weights
from rollkv.export.host_forms import fed_rotation, head_product
from rollkv.export.signature import ExportError, graph_inputs, graph_outputs, resolve
from rollkv.models.checkpoint import open_checkpoint
from rollkv.models.config import DecoderConfig
from rollkv.runtime.align import PromptError
from rollkv.runtime.bundle import Bundle, ValueInfo, open_bundle
from rollkv.runtime.head import HostHead
from rollkv.runtime.rope import cos_and_sin
from rollkv.runtime.session import Session

BOTH = {"rope": "feed", "head": "none"}
LADDER = ["files", "torch", "traced", "graph", "runtime", "roll", "feeds"]
Source = Callable[[str], Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """source(name): the folder of a model of proof.MODELS, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name].save(tmp_path_factory.mktemp("source") / name)
        return made[name]

    return get


# The ladder


@pytest.mark.parametrize("name", ["gemma3", "gemma4-shared", "qwen2_vl-whole", "phi3-longrope", "ministral3"])
def test_every_row_with_fed_rotations_equals_transformers(source: Source, tmp_path: Path, name: str) -> None:
    prove(source(name), tmp_path / "bundle", rope="feed")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", BOTH),  # a head of its own
        ("llama-square", BOTH),  # tied
        ("llama-square", {**BOTH, "input": "embeds"}),
        ("qwen3", {**BOTH, "input": "embeds", "kv_layout": "bksd-kt", "chunk_size": (4, 8), "context_buckets": (16,)}),
        ("gemma2", {"head": "none"}),  # a soft-cap
        ("phi", {**BOTH, "input": "embeds"}),  # a bias of the head, part of a head turns
        ("granite", {"head": "none", "ids": "int64"}),  # scaled logits
        ("gemma3", {**BOTH, "input": "embeds"}),  # two ropes, an embedding with a scale that is the head's table
        ("gemma4-shared", {**BOTH, "input": "embeds"}),  # pairs at rest, layers without a cache, a bfloat16 table
        ("qwen2_vl-whole", {**BOTH, "input": "embeds"}),  # three-part positions
        ("gpt2", {**BOTH, "input": "embeds"}),  # learned positions stay
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_the_ladder_holds(source: Source, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    report = climb(export(source(name), tmp_path / "bundle", **settings), source(name))
    assert report.fault is None
    assert {row.rung.split()[0] for row in report.rows} == set(LADDER)
    assert all(row.skipped is None for row in report.rows)


# What is in the bundle


def test_the_graphs_take_a_pair_for_each_rope_and_no_positions(source: Source, tmp_path: Path) -> None:
    m = export(source("gemma3"), tmp_path / "bundle", rope="feed").manifest
    fed = [(v.name, v.shape, v.role, v.rope) for v in m.graphs[0].inputs if v.rope is not None]
    assert fed == [
        ("rope_cos_full", [1, 8, 16], "rope_cos", "full"),
        ("rope_sin_full", [1, 8, 16], "rope_sin", "full"),
        ("rope_cos_sliding", [1, 8, 16], "rope_cos", "sliding"),
        ("rope_sin_sliding", [1, 8, 16], "rope_sin", "sliding"),
    ]
    assert all(value.role != "position_ids" for graph in m.graphs for value in graph.inputs)


def test_a_scale_of_queries_is_a_third_input(source: Source) -> None:
    config = open_checkpoint(str(source("ministral3"))).config
    options = resolve(config, max_lm_input_len=40, chunk_size=8, max_kvcache_len=48, rope="feed")
    fed = [(v.name, v.shape, v.role) for v in graph_inputs(config, options, 8) if v.rope == "full"]
    assert fed == [
        ("rope_cos", [1, 8, 16], "rope_cos"),
        ("rope_sin", [1, 8, 16], "rope_sin"),
        ("rope_query_scale", [1, 8, 1], "rope_query_scale"),
    ]


def test_names_of_ropes_are_made_safe_for_onnx(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollkv.models import config as module

    config = open_checkpoint(str(source("gemma3"))).config
    monkeypatch.setattr(module, "ROPE_NAMES", ("full", "far away/é.1"))
    odd = replace(config, ropes=(config.ropes[0], replace(config.ropes[0], name="far away/é.1")))
    assert odd.fed_rotations["far away/é.1"] == {"cos": "rope_cos_far_away___1", "sin": "rope_sin_far_away___1"}


def test_learned_positions_still_need_their_ids(source: Source) -> None:
    config = open_checkpoint(str(source("gpt2"))).config
    options = resolve(config, max_lm_input_len=40, chunk_size=8, max_kvcache_len=48, rope="feed")
    assert [v.role for v in graph_inputs(config, options, 8)][:3] == ["ids", "attention_mask", "position_ids"]


def parameters(config: DecoderConfig, source: Path) -> dict[str, int]:
    return {w.name: 4 * int(np.prod(w.shape)) for w in open_checkpoint(str(source)).weights}


@pytest.mark.parametrize(
    ("name", "settings", "outside", "files"),
    [
        ("llama", {"rope": "feed"}, [], []),
        ("llama", {"head": "none"}, ["head.weight"], ["head.bin"]),
        ("llama", {**BOTH, "input": "embeds"}, ["head.weight", "embedding.weight"], ["head.bin", "embedding.bin"]),
        ("llama-square", {"head": "none"}, [], ["head.bin"]),  # the graph looks its rows up
        ("llama-square", {"head": "none", "input": "embeds"}, ["embedding.weight"], ["embedding.bin"]),
        ("phi", {"head": "none"}, ["head.weight", "head.bias"], ["head.bin", "head_bias.bin"]),
    ],
    ids=str,
)
def test_what_the_host_has_is_in_no_weight_file(
    source: Source, tmp_path: Path, name: str, settings: dict[str, Any], outside: list[str], files: list[str]
) -> None:
    made = export(source(name), tmp_path / "bundle", **settings)
    sizes = parameters(open_checkpoint(str(source(name))).config, source(name))
    stored = stored_weights(made)
    tables = {weight for weight in stored if weight.startswith("rope.")}
    assert stored.keys() - tables == sizes.keys() - outside
    assert bool(tables) == (settings.get("rope") != "feed")
    assert made.manifest.weights.unique_bytes == sum(4 * array.size for array in stored.values())
    assert {file for file in made.manifest.files if file.endswith(".bin")} == {"weights.bin", *files}
    end = max(4096 * -(-4 * array.size // 4096) for array in stored.values())
    assert made.manifest.files["weights.bin"].size <= sum(4 * a.size + 4096 for a in stored.values()) + end


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")]
)
def test_the_head_is_written_as_the_checkpoint_has_it(tmp_path: Path, dtype: torch.dtype, stored: str) -> None:
    from safetensors.torch import load_file

    source = make_checkpoint(tmp_path / "source", "llama", dtype=dtype)
    made = export(source, tmp_path / "bundle", head="none")
    table = made.manifest.head_table
    assert table is not None
    assert (table.shape, table.dtype, table.scale) == ([307, 36], stored, 1.0)
    weight = load_file(source / "model.safetensors")["lm_head.weight"]
    assert (made.path / "head.bin").read_bytes() == weight.contiguous().view(torch.uint8).numpy().tobytes()


def test_softcap_and_scale_are_in_the_manifest_only_where_the_host_applies_them(source: Source, tmp_path: Path) -> None:
    for name, scale, cap in (("gemma2", 1.0, 3.0), ("granite", 1 / 2.5, None)):
        ours = export(source(name), tmp_path / name, head="none").manifest
        theirs = export(source(name), tmp_path / f"{name}-last").manifest
        assert (ours.logit_scale, ours.logit_softcap) == (scale, cap)
        assert (theirs.logit_scale, theirs.logit_softcap, theirs.head_table) == (1.0, None, None)


def test_a_graph_without_a_head_gives_one_hidden_row(checkpoint: Source) -> None:
    config = open_checkpoint(str(checkpoint("llama"))).config
    options = resolve(config, max_lm_input_len=40, chunk_size=8, max_kvcache_len=48, head="none")
    want = ValueInfo(name="hidden_states", shape=[1, 1, 36], dtype="float32", role="hidden_states")
    assert graph_outputs(config, options, 8)[0] == graph_outputs(config, options, 1)[0] == want
    with pytest.raises(ExportError) as caught:
        resolve(config, max_lm_input_len=40, chunk_size=8, max_kvcache_len=48, head="none", speculate=4)
    assert str(caught.value) == (
        "--speculate is 4, but --head none gives the hidden state of the last row alone; allowed: either"
    )


def test_no_op_is_left_that_looks_ids_or_positions_up(checkpoint: Source, bundle: Callable[..., Bundle]) -> None:
    made = bundle("llama", **BOTH, input="embeds")
    for info in made.manifest.graphs:
        graph = onnx.load(made.path / info.file, load_external_data=False).graph
        assert "Gather" not in {node.op_type for node in graph.node}


# Sessions


@pytest.mark.parametrize("settings", [{}, {"input": "embeds"}, {"input": "embeds", "kv_layout": "bksd"}], ids=str)
def test_answers_are_those_of_the_plain_bundle(bundle: Callable[..., Bundle], settings: dict[str, str]) -> None:
    plain, ours = Session(bundle("llama")), Session(bundle("llama", **BOTH, **settings))
    ids = np.random.default_rng(4).integers(3, 300, 30).tolist()
    for session in (plain, ours):
        session.prefill(ids[:21])
        session.rewind(13)
    limits: list[dict[str, Any]] = [{}, {"on_limit": "roll"}]
    for limit in limits:
        got = [list(s.generate(ids, reuse=True, max_new_tokens=40, ignore_eos=True, **limit)) for s in (plain, ours)]
        assert got[0] == got[1]


def test_a_prefix_that_was_saved_goes_on_in_its_own_bundle(bundle: Callable[..., Bundle], tmp_path: Path) -> None:
    from rollkv.runtime.prefix import PrefixError

    made = bundle("llama", **BOTH)
    first, second, ids = Session(made), Session(made), list(range(3, 25))
    first.prefill(ids[:15])
    first.save(tmp_path / "prefix")
    second.load_prefix(tmp_path / "prefix")
    np.testing.assert_array_equal(first.prefill(ids[15:]), second.prefill(ids[15:]))
    with pytest.raises(PrefixError, match="saved from the bundle with sha256"):
        Session(bundle("llama")).load_prefix(tmp_path / "prefix")


def test_positions_of_an_image_turn_as_in_the_plain_bundle(source: Source, tmp_path: Path) -> None:
    from rollkv.runtime.align import three_part_positions

    name = "qwen2_vl-whole"
    positions, ids = three_part_positions(20, [(3, 3, 4)]), np.random.default_rng(4).integers(11, 200, 20).tolist()
    logits = []
    for form in ({}, {"rope": "feed"}):
        session = Session(export(source(name), tmp_path / str(form), **form))
        logits.append(session.prefill(ids, positions=positions))
        logits.append(session.decode(ids[0]))
    np.testing.assert_allclose(logits[2:], logits[:2], rtol=0, atol=1e-5 * np.abs(logits).max())
    session.reset()
    assert np.abs(session.prefill(ids) - logits[0]).max() > 1e-2 * np.abs(logits[0]).max()


def test_bench_and_info_know_a_head_on_the_host(
    bundle: Callable[..., Bundle], run: Callable[..., tuple[int, str, str]]
) -> None:
    made = bundle("llama", **BOTH)
    code, out, err = run("bench", made.path, "--prompts", "9", "--steps", "3", "--rounds", "1", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["prompts"][0]["n"] == 9
    code, out, _ = run("info", made.path)
    assert code == 0
    assert "head       head.bin: 307 x 36, float32, 43.2 KiB" in out
    assert "positions  256, cos and sin are fed" in out
    assert "prefill.onnx: prefill, 8 rows, 48 slots, hidden state of last, opset 17" in out


def test_the_command_answers_as_with_the_plain_bundle(
    text_source: Path, text_bundle: Bundle, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    lengths = {"max_lm_input_len": 120, "max_kvcache_len": 160}
    made = export(text_source, tmp_path / "bundle", **lengths, **BOTH, input="embeds")
    flags = ("--prompt", "one two three", "--max-new-tokens", "12", "--json", "--logprobs", "2")
    answers = [json.loads(run("run", each.path, *flags)[1]) for each in (text_bundle, made)]
    plain, ours = ([noted["id"] for noted in answer["logprobs"]] for answer in answers)
    assert plain == ours
    assert len(ours) > 1
    assert answers[0]["text"] == answers[1]["text"]
    chatting = ("--chat", "--prompt", "hello", "--max-new-tokens", "6")
    assert run("run", text_bundle.path, *chatting)[:2] == run("run", made.path, *chatting)[:2]


def test_speculation_is_refused_and_drafting_for_another_is_not(bundle: Callable[..., Bundle]) -> None:
    from rollkv.runtime.speculation import DraftModel, PromptLookup

    ids, target = list(range(3, 12)), Session(bundle("llama", speculate=4))
    answer = target.generate(
        ids, max_new_tokens=9, ignore_eos=True, speculate=DraftModel(Session(bundle("llama", **BOTH)))
    )
    assert list(answer) == list(Session(bundle("llama")).generate(ids, max_new_tokens=9, ignore_eos=True))
    assert answer.speculation is not None
    assert answer.speculation.accepted == answer.speculation.drafted > 0
    with pytest.raises(PromptError, match="has no graph that gives the logits of every row"):
        Session(bundle("llama", **BOTH)).generate([1, 2], speculate=PromptLookup())


# What the ladder finds


@pytest.fixture
def damaged(bundle: Callable[..., Bundle], tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(bundle("llama", **BOTH).path, tmp_path / "copy"))


def test_a_wrong_row_of_the_head_is_found_among_the_files(checkpoint: Source, damaged: Bundle) -> None:
    table = np.memmap(damaged.path / "head.bin", np.float32, "r+")
    table[77 * 36] *= 1.01
    table.flush()
    assert climb(_resign(damaged), checkpoint("llama")).fault == "rung files, head.bin: differs from the checkpoint"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda cos, sin: (cos, -sin), "rope_sin is off by"),
        (lambda cos, sin: (sin, cos), "rope_cos is off by"),
        (lambda cos, sin: (cos.astype(np.float16), sin), "rope_cos is off by"),
        (lambda cos, sin: (cos, np.hstack((-sin[:, :3], sin[:, 3:]))), "rope_sin is off by"),
    ],
    ids=["negated", "swapped", "through float16", "with the graph's own sign"],
)
def test_a_host_that_feeds_another_rotation_is_found(
    checkpoint: Source, bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch, wrong: Any, says: str
) -> None:
    from rollkv.runtime.rope import Rotation

    right = Rotation.fill

    def fill(self: Any, positions: Any, cos: Any, sin: Any) -> None:
        right(self, positions, cos, sin)
        a, b = wrong(cos.copy(), sin.copy())
        cos[...], sin[...] = a, b

    monkeypatch.setattr(Rotation, "fill", fill)
    report = climb(bundle("llama", **BOTH), checkpoint("llama"))
    assert {row.rung for row in report.rows if not row.holds} <= {"runtime", "roll", "feeds"}
    assert any(row.rung == "feeds" and row.fault and says in row.fault for row in report.rows)


def test_a_host_whose_positions_are_off_by_one_is_found_by_the_audit_of_the_feeds(
    checkpoint: Source, bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollkv.runtime import feeds

    right = feeds.run_positions
    monkeypatch.setattr(feeds, "run_positions", lambda past, pads, rows: right(past + 1, pads, rows))
    report = climb(bundle("llama", **BOTH), checkpoint("llama"))
    # distances are right, so logits are; but not the keys
    assert {row.rung for row in report.rows if not row.holds} == {"runtime", "feeds"}
    assert any(row.rung == "feeds" and "rope_cos is off by" in str(row.fault) for row in report.rows)


def test_a_session_that_multiplies_by_another_head_is_found_on_its_rung(
    checkpoint: Source, bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = HostHead.logits

    def wrong(self: Any, hidden: Any, out: Any, scratch: Any) -> None:
        right(self, hidden, out, scratch)
        out[:5] = out[:5][::-1].copy()

    monkeypatch.setattr(HostHead, "logits", wrong)
    report = climb(bundle("llama", **BOTH), checkpoint("llama"))
    assert {row.rung for row in report.rows if not row.holds} == {"runtime", "roll"}


def test_the_hosts_of_the_ladder_and_of_the_session_agree_and_share_nothing(source: Source, tmp_path: Path) -> None:
    made = export(source("phi"), tmp_path / "bundle", **BOTH)
    m, hidden = made.manifest, np.random.default_rng(0).standard_normal((1, made.manifest.hidden_size))
    head, out = HostHead(made.path, m), np.empty(m.vocab_size, np.float32)
    head.logits(hidden[0].astype(np.float32), out, head.scratch())
    theirs = head_product(made, hidden)[0]
    np.testing.assert_allclose(out, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
    positions = np.array([0, 1, 200])
    for value in m.graphs[0].inputs:
        if value.role == "rope_cos":
            cos, _ = cos_and_sin(m.rope["full"], positions)
            np.testing.assert_allclose(cos, fed_rotation(value, m.rope["full"], positions), rtol=0, atol=2.0**-23)
