"""One sequence of tokens through a bundle: chunked prefill, decode, turns, rewinds. Token ids or embeddings, no text.

The driver reads what each graph takes from the manifest, never from file names, and computes nothing itself: new
tokens are checked in `prompt.py`, `cover.py` says which runs take them, `sequence.py` runs them one by one and holds
what went through. `generation.py` goes on from there.

P is `Session.position`, the number of real tokens that went through; L, c, C and H as in the contract.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollkv.runtime.align import (
    LimitError,
    PromptError,
    check_protect,
    check_word,
    common_length,
    kept_ranges,
    whole_number,
)
from rollkv.runtime.backend import Array, Backend
from rollkv.runtime.bundle import Bundle, GraphInfo, Manifest
from rollkv.runtime.cover import Run, plan_runs
from rollkv.runtime.generation import Generation, GenerationOptions
from rollkv.runtime.limits import ADDRESSES, DEFAULT_NEW_TOKENS, DEFAULT_SINKS, ON_LIMIT
from rollkv.runtime.loaded import LoadedBundle, read_sizes
from rollkv.runtime.prefix import load_prefix, save_prefix
from rollkv.runtime.prefix_store import PrefixStore
from rollkv.runtime.prompt import Prompt, read_prompt
from rollkv.runtime.sampling import SamplingOptions
from rollkv.runtime.sequence import Admitted, Policy, TokenSequence
from rollkv.runtime.snapshot import Snapshot
from rollkv.runtime.speculation import Drafter, check_drafter

MOST_SLACK = 1 << 24  # slots

__all__ = ["DEFAULT_NEW_TOKENS", "Generation", "LimitError", "Session"]


class Session:
    """The state of one sequence: its tokens and its cache.

    Threads may share a session: each call is one whole step. Sessions over one `LoadedBundle` share graphs and weights.
    """

    def __init__(
        self,
        bundle: str | Path | Bundle | LoadedBundle,
        *,
        backend: Backend | None = None,
        threads: int | None = None,
        memory: str | None = None,
        chunk_sizes: Sequence[int] | None = None,
        addresses: str = "moving",
        slack: int | None = None,
        prefixes: PrefixStore | None = None,
    ) -> None:
        """bundle: the folder, one that is open, or one that is loaded, to which backend, threads, memory belong.

        memory: "fast" (default), where ONNX Runtime keeps a packed copy of the weights for each graph, or "low".
        chunk_sizes: rows of the prefill graphs to use, of those in the bundle; None: all.
        addresses: "moving", where past inputs move through a buffer with room for `slack` tokens more (by default as
        many as there are slots), or "fixed", for a board that registers addresses once, where every
        run moves the whole cache. prefixes: saved states that prompts with `reuse` may start from.
        Raises BundleError when the folder does not hold a bundle, PromptError for a setting that is not allowed.
        """
        sizes = read_sizes(chunk_sizes)
        if isinstance(bundle, LoadedBundle):
            if backend is not None or threads is not None or memory is not None:
                raise PromptError("backend, threads and memory belong to the LoadedBundle that is given")
            self.loaded = bundle
        else:
            self.loaded = LoadedBundle(
                bundle, backend=backend, threads=threads, memory="fast" if memory is None else memory, chunk_sizes=sizes
            )
        check_word("addresses", addresses, ADDRESSES)
        if slack is not None and not 1 <= whole_number("slack", slack) <= MOST_SLACK:
            raise PromptError(f"slack is {slack}, allowed: 1 .. {MOST_SLACK}")
        if prefixes is not None and not isinstance(prefixes, PrefixStore):
            raise PromptError(f"prefixes is {prefixes!r}, allowed: a PrefixStore")
        self._sizes = self.loaded.chosen(sizes)
        self._prefixes = prefixes
        self.sequence = TokenSequence(self.loaded, slack, addresses == "fixed")
        self.lock = threading.RLock()

    @property
    def bundle(self) -> Bundle:
        """The bundle."""
        return self.loaded.bundle

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.loaded.manifest

    @property
    def backend(self) -> Backend:
        """What runs the graphs."""
        return self.loaded.backend

    @property
    def tokens(self) -> list[int]:
        """Ids that went through since the last reset, in order; -1 for one that came as an embedding alone."""
        with self.lock:
            return self.sequence.tokens[: self.position]

    @property
    def position(self) -> int:
        """P, the number of those tokens: the position of the next one, which masks go by."""
        with self.lock:
            return self.sequence.position

    def reset(self) -> None:
        """Forget every token; every slot of the cache is zero."""
        with self.lock:
            self.sequence.reset()

    def rewind(self, position: int) -> None:
        """Go back to the first `position` tokens, 0 .. P. What was forgotten does not come back.

        Raises LimitError where the cache has dropped a token that those after `position` would see: a layer without a
        window any token, one with a window W any of the W - 1 before `position`. PromptError: no such position.
        """
        with self.lock:
            past = self.position
            if not 0 <= whole_number("position", position) <= past:
                raise PromptError(f"position is {position}, allowed: 0 .. {past}, the tokens that went through")
            if 0 < position < past and not self.sequence.cache.can_rewind(position):
                raise LimitError(
                    f"tokens before {position} were forgotten, so the session cannot go back from {past} to "
                    f"{position}; reset it and run them again"
                )
            self.sequence.settle()
            self.sequence.rewind(position)

    def lookup(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """The embeddings (n, H) of ids, for a caller who puts others among them. They belong to the caller.

        Raises PromptError: an id outside of the vocabulary, or graphs that take ids.
        """
        if "embeds" not in self.loaded.tables:
            raise PromptError("the graphs of this bundle take ids and hold the embeddings; export with --input embeds")
        return self.loaded.tables["embeds"].rows(read_prompt(self.manifest, ids).ids)

    def prefill(
        self,
        ids: Sequence[int] | None = None,
        *,
        embeds: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        reuse: bool = False,
        truncate: str = "none",
        keep_head: int | None = None,
        protect: tuple[int, int] | None = None,
        on_limit: str = "stop",
        sinks: int = DEFAULT_SINKS,
    ) -> NDArray[np.floating]:
        """Take new tokens after those that went through; the logits (V,) of the last one.

        embeds: (n, H) floats instead of ids, for a bundle whose graphs take embeddings: what the decoder's first layer
        sees, so with the model's scale of embeddings. With both, ids are for what needs ids: `tokens`, and per-layer
        inputs, which a bundle that has them must be given.
        positions: (3, n), the rotary positions of the new tokens in a bundle of three-part positions, see
        `align.three_part_positions`; later tokens go on after the largest. None: the next ones, the same on all three.
        reuse: the tokens are the whole sequence. Those that it has in common with the session from the start on, or
        with a stored prefix, are kept, and only the rest runs; where the cache cannot go back there, all of them run.
        Tokens that came as embeddings are in common with none.
        truncate, keep_head, protect: what to do with more than L tokens, see `align.kept_ranges`; a warning says what
        was cut. on_limit: "stop" refuses to forget a token, "roll" forgets the oldest, protected or not; so without a
        truncation it does not go with protect. "sinks" keeps the first `sinks` tokens and forgets the oldest others.
        After an error `tokens` says what went through.
        Raises PromptError: no token, an id outside of the vocabulary, more than L tokens without a truncation, and as
        `align.kept_ranges` and `prompt.read_prompt`. Raises LimitError: the tokens do not fit and on_limit is "stop",
        the model has no such position, or tokens were forgotten by another policy. Raises NonFiniteLogits when a
        graph gives a number that is not finite; that run leaves no trace.
        """
        with self.lock:
            prompt = read_prompt(self.manifest, ids, embeds, positions)
            admitted = self._admit(prompt, truncate, keep_head, protect, self._read_policy(on_limit, sinks), reuse)
            if admitted.cut:
                kept = len(prompt) - admitted.cut
                warnings.warn(f"the prompt was cut from {len(prompt)} to {kept} tokens", stacklevel=2)
            return self.take(admitted).copy()

    def decode(self, token: int, *, on_limit: str = "stop", sinks: int = DEFAULT_SINKS) -> NDArray[np.floating]:
        """Take one token; the logits (V,) that follow it. Raises as `prefill`."""
        with self.lock:
            prompt = read_prompt(self.manifest, [token])
            admitted = self._admit(prompt, "none", None, None, self._read_policy(on_limit, sinks), False)
            sequence = self.sequence
            sequence.settle()
            arrays = sequence.arrays(self.loaded.decode)
            return sequence.step(arrays, Run(1, 0), admitted.prompt, admitted.policy).logits.copy()

    def generate(
        self,
        ids: Sequence[int] | None = None,
        *,
        embeds: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        reuse: bool = False,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        sampling: SamplingOptions | None = None,
        logprobs: int | None = None,
        speculate: Drafter | None = None,
        on_token: Callable[[int], None] | None = None,
        truncate: str = "none",
        keep_head: int | None = None,
        protect: tuple[int, int] | None = None,
        on_limit: str = "stop",
        sinks: int = DEFAULT_SINKS,
        ignore_eos: bool = False,
    ) -> Generation:
        """Take new tokens, given as to `prefill`, and generate more: an iterator over token ids, see `Generation`.

        max_new_tokens: at most 256 by default. min_new_tokens: no EOS before so many. logprobs: so many best tokens of
        every step in `Generation.logprobs`, 0 for that of the token alone. speculate: what drafts tokens ahead, for a
        bundle with a graph of the logits of every row. on_token: is called with each id.
        The prompt is checked now (raises as `prefill`), and runs when the first token is asked for.
        """
        options = GenerationOptions(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            sampling=sampling or SamplingOptions(),
            logprobs=logprobs,
            speculate=speculate,
            on_token=on_token,
            ignore_eos=ignore_eos,
        )
        if speculate is not None:
            verifier = self.loaded.verifier
            check_drafter(speculate, self, self.manifest, verifier is not None)
            assert verifier is not None
            self.loaded.prepare(verifier)
        options.sampling.check_ids(self.manifest.vocab_size)
        with self.lock:
            prompt = read_prompt(self.manifest, ids, embeds, positions)
            admitted = self._admit(prompt, truncate, keep_head, protect, self._read_policy(on_limit, sinks), reuse)
            return Generation(self, admitted, options)

    def room(self, on_limit: str = "stop") -> int:
        """How many more tokens can be taken: until C for "stop", until the model's last position for the others too."""
        with self.lock:
            check_word("on_limit", on_limit, ON_LIMIT)
            return self.sequence.room(on_limit)

    # Saved states

    def snapshot(self) -> Snapshot:
        """A copy of the tokens and the cache. Raises LimitError when no token is there, or some were forgotten."""
        with self.lock:
            self.sequence.settle()
            return self.sequence.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Go to the state of a snapshot. Raises LimitError when it is of another bundle or cache."""
        if not isinstance(snapshot, Snapshot):
            raise PromptError(f"snapshot is {snapshot!r}, allowed: what Session.snapshot gave")
        with self.lock:
            self.sequence.restore(snapshot)

    def save(self, path: str | Path) -> None:
        """Write tokens and cache to a file, see `prefix.save_prefix`. Raises as `snapshot`, and OSError."""
        save_prefix(path, self.snapshot())

    def load_prefix(self, path: str | Path) -> None:
        """Go to the state that `save` wrote. Raises PrefixError for a damaged file or one of another bundle.

        Raises LimitError when its sizes are not those of this bundle's cache.
        """
        self.restore(load_prefix(path, self.loaded.sha256))

    # How a prompt is admitted

    def _read_policy(self, on_limit: str, sinks: int) -> Policy:
        check_word("on_limit", on_limit, ON_LIMIT)
        slots = self.manifest.max_kvcache_len
        if on_limit == "sinks" and not 1 <= whole_number("sinks", sinks) < slots:
            raise PromptError(f"sinks is {sinks}, allowed: 1 .. {slots - 1}, less than C")
        return Policy(on_limit, sinks if on_limit == "sinks" else 0)

    def _admit(
        self,
        prompt: Prompt,
        how: str,
        keep_head: int | None,
        protect: tuple[int, int] | None,
        policy: Policy,
        reuse: bool,
    ) -> Admitted:
        """What of the prompt will run and from where; nothing has run or changed when this raises."""
        m, n, on_limit = self.manifest, len(prompt), policy.on_limit
        if protect is not None:
            check_protect(protect, how, on_limit, n)
        if how == "none" and n > m.max_lm_input_len and on_limit == "stop":
            raise PromptError(
                f"the prompt has {n} tokens, more than L = {m.max_lm_input_len} (C = {m.max_kvcache_len}); "
                "choose a truncation (left, middle), on-limit roll or sinks, or export with a larger -L"
            )
        limit = n if how == "none" else m.max_lm_input_len
        if keep_head is not None:
            whole_number("keep_head", keep_head)
        ranges = kept_ranges(n, limit, how, keep_head if how != "none" else None, protect)
        kept = prompt if ranges == [(0, n)] else prompt.keep(ranges)
        cut, start, snapshot = n - len(kept), self.position, None
        rotary = self.sequence.rotary_at(start)
        if reuse:
            start, snapshot = self._common(kept, policy)
            kept = kept.part(start, len(kept))
            rotary = self.sequence.rotary_at(start) if snapshot is None else start
        new = len(kept)
        if on_limit == "stop" and start + new > m.max_kvcache_len:
            raise LimitError(
                f"{new} tokens after {start} others pass C = {m.max_kvcache_len}; reset the session, or choose "
                "on-limit roll or sinks to forget the oldest"
            )
        if kept.positions is None and rotary + new > m.max_position:
            turned = "" if rotary == start else f" (rotary position {rotary})"
            raise LimitError(
                f"{new} tokens after {start} others{turned} pass the model's positions = {m.max_position}; reset the "
                "session"
            )
        if self.sequence.policy not in (None, policy) and start == self.position and snapshot is None:
            raise LimitError(
                f"the session has forgotten tokens by {self.sequence.policy} and cannot go on by {policy}; reset it"
            )
        return Admitted(kept, cut, policy, start, reuse, snapshot)

    def _common(self, prompt: Prompt, policy: Policy) -> tuple[int, Snapshot | None]:
        """How many tokens of a whole sequence need not run again, and the stored prefix that has them."""
        if prompt.embeds is not None or prompt.positions is not None:
            return 0, None
        ids, most = prompt.ids, len(prompt) - 1  # the last one runs in any case: its logits are wanted
        there = self.sequence.tokens
        end = min(self.sequence.known, self.position, most)
        same = common_length(there[:end], ids[:end])
        if same < self.position and not self.sequence.cache.can_rewind(same):
            same = 0
        if self.sequence.policy not in (None, policy):  # what another policy forgot is not what this one would have
            same = 0
        if self._prefixes is not None:
            found = self._prefixes.find(ids[:most], self.loaded.sha256)
            if found is not None and found[1] > same:
                return found[1], found[0]
        return same, None

    def take(self, admitted: Admitted) -> Array:
        """Run every token; the last logits, in the session's memory until the next run. The caller has the lock."""
        sequence, prompt, policy = self.sequence, admitted.prompt, admitted.policy
        sequence.settle()
        if admitted.snapshot is not None:
            sequence.restore(admitted.snapshot)
        if admitted.start < self.position:
            sequence.rewind(admitted.start)
        ends = None if prompt.positions is None else np.maximum.accumulate(prompt.positions.max(axis=0)) + 1  # (n,)
        sizes, slots = self._sizes, self.manifest.max_kvcache_len
        if policy.sinks and self.position + len(prompt) > slots:
            sizes = [size for size in sizes if size <= slots - policy.sinks] or [1]  # a run must see the pinned tokens
        at, logits = 0, None
        for run in plan_runs(len(prompt), self.position, sizes, slots, self.loaded.costs):
            stop = at + run.rows - run.pads
            graph = self.loaded.prefill.get(run.rows) if run.rows in self._sizes else None
            arrays = sequence.arrays(self.loaded.decode if graph is None else graph)
            part, after, last = prompt.part(at, stop), None if ends is None else ends[at:stop], stop == len(prompt)
            sequence.step(arrays, run, part, policy, after, wanted=last)
            at, logits = stop, arrays.logits if last else None
        assert logits is not None
        return logits

    def feeds(self, graph: GraphInfo, run: Run, ids: Sequence[int]) -> dict[str, Array]:
        """Every input of `graph` for a run of `ids` after the tokens so far: the session's own arrays.

        Raises LimitError when the graph sees too few slots for them.
        """
        with self.lock:
            needed = max(self.position + graph.rows, self.sequence.cache.kv_len)
            if graph.kv_len < min(needed, self.manifest.max_kvcache_len):
                raise LimitError(
                    f"graph {graph.file} sees {graph.kv_len} slots, too few for {graph.rows} rows after "
                    f"{self.position} tokens; give one that sees C"
                )
            sequence = self.sequence
            sequence.settle()
            arrays = sequence.exactly(graph)
            arrays.fill(run, self.position, self.sequence.rotary_at(self.position), Prompt(list(ids)))
            return arrays.feeds()
