"""Pinned tokens on exported graphs, against transformers' own attention and rotation.

The expectation keeps each layer's keys and values itself: before a run that forgets it puts the first S tokens, their
keys rotated by transformers' functions, before the last others, and lets transformers' model attend to just these.
"""

import numpy as np
import pytest
import torch
from conftest import export, make_checkpoint
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

from rollkv.runtime.session import Session

C, CHUNK, S = 24, 8, 3


class PinnedReference:
    """A model of full attention whose cache keeps S tokens and the last ones, C with those of the run."""

    def __init__(self, source):
        self.model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)
        self.model.eval()
        self.kept = None  # per layer: keys, values (1, K, n, D) of all tokens, as first computed

    @torch.no_grad()
    def run(self, ids):
        """Logits of the last of these tokens, which go through in one run."""
        past = 0 if self.kept is None else self.kept[0][0].shape[2]
        end = past + len(ids)
        cache, stored = DynamicCache(), 0
        for layer, (keys, values) in enumerate(self.kept or []):
            if end > C:
                oldest = end - C + S
                pinned = self.turned(keys[:, :, :S], end - C)
                keys = torch.cat((pinned, keys[:, :, oldest:]), 2)
                values = torch.cat((values[:, :, :S], values[:, :, oldest:]), 2)
            cache.update(keys, values, layer)
            stored = keys.shape[2]
        rows = torch.arange(len(ids))
        hidden = torch.arange(stored + len(ids))[None, :] > stored + rows[:, None]
        out = self.model(
            torch.tensor([ids]),
            past_key_values=cache,
            position_ids=past + rows[None],
            attention_mask=torch.where(hidden, torch.finfo(torch.float32).min, 0.0)[None, None],
            use_cache=True,
        )
        new = [(layer.keys[:, :, stored:], layer.values[:, :, stored:]) for layer in out.past_key_values.layers]
        if self.kept is None:
            self.kept = new
        else:
            self.kept = [
                tuple(torch.cat(pair, 2) for pair in zip(old, more, strict=True))
                for old, more in zip(self.kept, new, strict=True)
            ]
        return out.logits[0, -1].numpy()

    def turned(self, keys, by):
        """Rotated by so many positions more: RoPE's rotations add up (its scaling is in the keys already)."""
        rope = self.model.model.rotary_emb
        angles = by * torch.cat((rope.inv_freq, rope.inv_freq)).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        size = len(angles)
        turned, rest = keys[..., :size], keys[..., size:]
        return torch.cat((turned * cos + rotate_half(turned) * sin, rest), -1)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("addresses", ["moving", "fixed"])
@pytest.mark.parametrize(
    ("name", "layout", "more", "form"),
    [
        ("llama", "bskd", {}, {}),
        ("llama", "bksd", {}, {}),
        ("llama", "bksd-kt", {}, {}),
        ("llama3", "bskd", {}, {}),
        ("llama", "bskd", {"rope_parameters": YARN}, {}),
        ("llama", "bskd", {"rope_parameters": YARN}, {"rope": "feed", "head": "none"}),
    ],
)
def test_chunks_and_steps_far_past_the_cache_equal_transformers(tmp_path, name, layout, more, form, addresses):
    source = make_checkpoint(tmp_path / "source", name, **more)
    bundle = export(source, tmp_path / "bundle", max_lm_input_len=20, max_kvcache_len=C, kv_layout=layout, **form)
    session, reference = Session(bundle, addresses=addresses), PinnedReference(source)
    ids = np.random.default_rng(1).integers(3, 300, 90).tolist()
    limit = {"on_limit": "sinks", "sinks": S}
    at = 0
    for count in (16, 16, 1, 1, 8, 1, 24, 1, 1, 1):
        got = session.prefill(ids[at : at + count], **limit) if count > 1 else session.decode(ids[at], **limit)
        for run in [CHUNK] * (count // CHUNK) or [1]:
            want = reference.run(ids[at : at + run])
            at += run
        assert np.abs(got - want).max() < 1e-4 * np.abs(want).max(), at


def test_without_their_rotation_it_would_not(tmp_path, monkeypatch):
    from rollkv.runtime import kv

    source = make_checkpoint(tmp_path / "source", "llama")
    bundle = export(source, tmp_path / "bundle", max_lm_input_len=20, max_kvcache_len=C)
    session, reference = Session(bundle), PinnedReference(source)
    monkeypatch.setattr(kv, "turn_keys", lambda keys, delta, rope: keys)
    ids = np.random.default_rng(1).integers(3, 300, 40).tolist()
    for at in range(0, 40, CHUNK):
        got = session.prefill(ids[at : at + CHUNK], on_limit="sinks", sinks=S)
        want = reference.run(ids[at : at + CHUNK])
    assert np.abs(got - want).max() > 1e-3 * np.abs(want).max()
