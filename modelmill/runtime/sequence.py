"""What a request becomes: sequences, each with its tokens, pages, progress and rope frequency ids.

``check_request_and_get_ids`` decides first whether a request can be served. Nothing here needs
torch, since the server checks requests in its API process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from modelmill.core.errors import PromptTokenCounts, PromptTooLong, RequestError
from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.quoting import quote
from modelmill.core.types import LAST_TOKEN_POOLING, MEAN_POOLING, FinishReason, Guide, Request
from modelmill.runtime.kv_pages import NO_PAGE, page_key, root_page_key


@dataclass(frozen=True)
class RequestLimits:
    """Limits that a request must fit.

    Attributes:
        vocab_size: Token ids are below it.
        max_len: Most tokens of a sequence.
        kv_tokens: Tokens of a sequence that the KV pages can hold.
        max_seqs: Most sequences of a step.
    """

    vocab_size: int
    max_len: int
    kv_tokens: int
    max_seqs: int


def check_request_and_get_ids(request: Request, limits: RequestLimits) -> np.ndarray:
    """Check a request against the limits.

    Returns:
        The prompt's ids [T] int64.

    Raises:
        RequestError: It can never be served; one line.
    """
    params, prompt = request.params, request.prompt
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    ids = _prompt_ids_as_int64(prompt)
    if ids is None or ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise RequestError(f"the prompt's token ids must be between 0 and {limits.vocab_size - 1}")
    max_prompt = limits.max_len - (params.max_tokens != 0)
    if len(prompt) > max_prompt:
        answer = f" and an answer within {limits.max_len}" if params.max_tokens != 0 else ""
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens, this engine takes {max_prompt}{answer}; "
            "shorten it",
            PromptTokenCounts(len(prompt), max_prompt),
        )
    if len(prompt) > limits.kv_tokens:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens, the KV cache holds {limits.kv_tokens}; "
            "shorten it",
            PromptTokenCounts(len(prompt), limits.kv_tokens),
        )
    if request.pooling is not None:
        if request.pooling not in (MEAN_POOLING, LAST_TOKEN_POOLING):
            raise RequestError(
                f"pooling must be {MEAN_POOLING} or {LAST_TOKEN_POOLING}, "
                f"not {quote(request.pooling, 60)}"
            )
        if params.max_tokens != 0 or params.n != 1 or params.num_beams != 1:
            raise RequestError("an embedding request must have max_tokens=0, n=1 and num_beams=1")
    if params.num_beams > limits.max_seqs:
        raise RequestError(
            f"num_beams={params.num_beams} exceeds the {limits.max_seqs} sequences of a step "
            "(max_num_seqs, "
            "max_num_batched_tokens); lower it"
        )
    allowed_ids = None if request.grammar is None else request.grammar.allowed_token_ids()
    id_options = (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", allowed_ids or ()),
    )
    for name, option_ids in id_options:
        outside = [t for t in option_ids if t >= limits.vocab_size]
        if outside:
            raise RequestError(
                f"{name}: token ids must be between 0 and {limits.vocab_size - 1}, not {outside[0]}"
            )
    for span in request.embedding_spans:
        if span.position < 0 or span.length < 1 or span.position + span.length > len(prompt):
            raise RequestError("an embedding span exceeds the prompt")
    return ids


def _prompt_ids_as_int64(prompt: Collection[int]) -> np.ndarray | None:
    """Ids as [T] int64; None if one does not fit into int64."""
    try:
        return np.fromiter(prompt, np.int64, len(prompt))
    except OverflowError:
        return None


class Snapshot(NamedTuple):
    """A copy of the recurrent state behind the first ``end`` tokens of a sequence."""

    end: int
    slot: int


@dataclass(frozen=True)
class RopeFrequencyRule:
    """How a token gets its rope frequency id (length-dependent RoPE).

    Attributes:
        rule: "fixed": 0 for all; "prompt": by the prompt's length; "running": an output token's by
            the length up to it.
        key: The model's ``rope_frequency_id``: length → key.
    """

    rule: str
    key: Callable[[int], int]

    @staticmethod
    def from_model(model: object) -> RopeFrequencyRule:
        """The rule of a model (its ``rope_length_source`` and ``rope_frequency_id``)."""
        return RopeFrequencyRule(model.rope_length_source, model.rope_frequency_id)  # type: ignore[attr-defined]


class Sequence:
    """State of one sequence.

    Attributes:
        tokens: Prompt and output ids that the host knows.
        prompt_ids: The prompt as an array [T] int64.
        computed: Tokens whose keys and values are in pages, or will be when the launched steps are
            done.
        pending: Tokens sampled on the device but not read yet; ``length`` counts them.
        pages: Its KV pages of the first page group in order; NO_PAGE in the place of those that
            were freed.
        group_pages: The same of each page group; the first is ``pages``.
        num_freed_pages: Of each page group the pages behind its window, which were freed.
        max_length: The length at which the sequence ends.
        stop_ids: Token ids that end it.
        table_row: Its row in the page tables while it runs, else −1.
        seed: Of its random numbers.
        siblings: Of a leader with n > 1: the sequences that fork from it; of a beam: all beams.
        started_at: When it was first admitted, by time.perf_counter.
        snapshots: Copies of its recurrent state that are being written, not in the cache yet.
        snapshot_end: Tokens in front of the last of them; 0: none.
        replaceable_snapshot_key: Page key of the cached one that the next replaces, or None.
        branch_end: Tokens of its prefix whose pages were cached, where that was more than the
            tokens in front of a snapshot; 0: no more.
    """

    __slots__ = (
        "arrival",
        "beam_search",
        "branch_end",
        "computed",
        "finish_reason",
        "group_pages",
        "guide",
        "index",
        "max_chunk",
        "max_length",
        "num_cached",
        "num_cached_pages",
        "num_freed_pages",
        "page_keys",
        "pages",
        "pending",
        "pooled_sum",
        "prompt_ids",
        "prompt_key",
        "prompt_len",
        "prompt_logprobs",
        "replaceable_snapshot_key",
        "request",
        "root_page_key",
        "rope_length_source",
        "seed",
        "siblings",
        "snapshot_end",
        "snapshots",
        "started_at",
        "stop_ids",
        "table_row",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        arrival: int,
        rope_length_source: RopeFrequencyRule,
        ids: np.ndarray | None = None,
        *,
        max_length: int,
        seed: int = 0,
        model_digest: str = "",
        guide: Guide | None = None,
    ) -> None:
        """Start a sequence from its prompt; ``ids``: the prompt as an array, if there is one."""
        self.request = request
        self.index = index
        self.arrival = arrival
        self.tokens: list[int] = list(request.prompt)
        self.prompt_len = len(self.tokens)
        self.prompt_ids = (
            np.fromiter(request.prompt, np.int64, self.prompt_len) if ids is None else ids
        )
        self.rope_length_source = rope_length_source
        self.prompt_key = (
            0 if rope_length_source.rule == "fixed" else rope_length_source.key(self.prompt_len)
        )
        self.max_length = max_length
        self.seed = seed
        self.computed = 0
        self.pending = 0
        self.pages: list[int] = []
        self.group_pages: tuple[list[int], ...] = (self.pages,)
        self.table_row = -1
        self.finish_reason: FinishReason | None = None
        self.started_at: float | None = None
        self.num_cached = 0
        self.num_cached_pages = 0
        self.num_freed_pages = [0]
        self.snapshots: list[Snapshot] = []
        self.snapshot_end = self.branch_end = 0
        self.replaceable_snapshot_key: bytes | None = None
        self.root_page_key = root_page_key(model_digest, request.cache_salt)
        self.page_keys: list[bytes] = []
        self.siblings: list[Sequence] = []
        eos = () if request.params.ignore_eos else request.eos_ids
        self.stop_ids = frozenset((*eos, *request.params.stop_token_ids))
        self.beam_search: object | None = None
        self.guide = guide
        # sum of the hidden states of the computed prompt rows, [H] float64
        self.pooled_sum: Any = None  # a tensor; this module does not import torch
        needs_logprobs = request.params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[object] | None = [None] if needs_logprobs else None
        # the logits of all prompt rows are large, so such prompts run in small chunks
        self.max_chunk = 512 if needs_logprobs else 1 << 62

    def attach_pages(
        self,
        group_pages: Iterable[list[int]],
        table_row: int,
        computed: int = 0,
        num_cached_pages: int = 0,
    ) -> None:
        """Run from now on, with these pages and this row of the page tables.

        Args:
            group_pages: Its pages of each page group, in order.
            table_row: Its row.
            computed: Tokens whose keys and values are in the pages.
            num_cached_pages: Pages that the prefix cache knows already.
        """
        self.group_pages, self.table_row = tuple(group_pages), table_row
        self.pages = self.group_pages[0]
        self.computed, self.num_cached_pages = computed, num_cached_pages
        self.num_freed_pages = [pages.count(NO_PAGE) for pages in self.group_pages]

    def clear_pages_and_row(self) -> None:
        """Stop running: the pages and the row have been released."""
        self.pages, self.table_row, self.num_freed_pages = [], -1, [0]
        self.group_pages = (self.pages,)

    def note_freed_pages(self, group: int, count: int) -> None:
        """Record that the first ``count`` pages of a group were freed and are not read again."""
        freed = self.num_freed_pages[group]
        self.group_pages[group][freed:count] = [NO_PAGE] * (count - freed)
        self.num_freed_pages[group] = count

    @property
    def pages_in_use(self) -> list[int]:
        """Its pages that were not freed, of all page groups, in the order of their tokens."""
        if len(self.group_pages) == 1:
            return self.pages[self.num_freed_pages[0] :]
        by_tokens = zip_longest(*self.group_pages, fillvalue=NO_PAGE)
        return [page for pages in by_tokens for page in pages if page != NO_PAGE]

    @property
    def num_pages_in_use(self) -> int:
        """The number of ``pages_in_use``."""
        return sum(map(len, self.group_pages)) - sum(self.num_freed_pages)

    def note_admission(self, now: float) -> None:
        """Record when it was first admitted and how much of its prompt was cached.

        Not called after a preemption: the sequence finds its own pages, which is no cache hit.
        """
        self.started_at = now
        self.num_cached = min(self.computed, self.prompt_len)

    def advance(self, count: int) -> None:
        """Count ``count`` more tokens as computed, by a step that was launched."""
        self.computed += count

    def add_pending_token(self) -> None:
        """Count one more token as sampled on the device."""
        self.pending += 1

    def append_sampled(self, token: int) -> None:
        """Append a token that was pending until now."""
        self.pending -= 1
        self.tokens.append(token)

    def reset_for_recompute(self) -> None:
        """Compute all tokens again, after a preemption."""
        self.computed = self.num_cached_pages = self.snapshot_end = self.branch_end = 0

    def set_restored_prefix(self, restored: int, branch_end: int) -> None:
        """Record the tokens in front of the snapshot that it starts from, and ``branch_end``."""
        self.snapshot_end, self.branch_end = restored, branch_end

    def add_planned_snapshot(self, snapshot: Snapshot) -> None:
        """Let the next step keep a copy of the recurrent state."""
        self.snapshots.append(snapshot)
        self.snapshot_end = snapshot.end

    def planned_state_snapshot(self, count: int) -> Snapshot | None:
        """The snapshot that the next step, of ``count`` tokens, keeps."""
        last = self.snapshots[-1] if self.snapshots else None
        # one of the step before may end where this one starts
        if last is None or not self.computed <= last.end <= self.computed + count:
            return None
        return last

    def pop_snapshots(self, known: int | None) -> list[Snapshot]:
        """Return the snapshots behind the first ``known`` tokens (None: all), and forget them."""
        behind = [each for each in self.snapshots if known is None or each.end <= known]
        if behind:
            self.snapshots = [each for each in self.snapshots if each not in behind]
        return behind

    def set_replaceable_snapshot_key(self, key: bytes | None) -> None:
        """Store the key of the cached snapshot that the next one replaces."""
        self.replaceable_snapshot_key = key

    def note_cached_pages(self, count: int) -> None:
        """Record that the prefix cache knows the first ``count`` pages."""
        self.num_cached_pages = count

    def set_siblings(self, siblings: list[Sequence]) -> None:
        """Store the sequences that will fork from this one."""
        self.siblings = siblings

    def pop_siblings(self) -> list[Sequence]:
        """Return the sequences that have not forked from this one, which forgets them."""
        siblings, self.siblings = self.siblings, []
        return siblings

    def begin_beam_search(self, search: object, beams: list[Sequence]) -> None:
        """Become the first beam of a search."""
        self.beam_search, self.siblings = search, beams

    def append_beam_token(self, token: int, beams: list[Sequence]) -> None:
        """Append a token; ``beams``: the beams of the search from now on."""
        self.tokens.append(token)
        self.siblings = beams

    def accumulate_pooled_sum(self, state_sum: Any, *, is_first: bool) -> None:
        """Add the sum of the hidden states of further prompt tokens, [H] float64."""
        self.pooled_sum = state_sum if is_first else self.pooled_sum + state_sum

    def finish(self, finish_reason: FinishReason) -> None:
        """End with this reason."""
        self.finish_reason = finish_reason

    @property
    def sort_key(self) -> tuple[int, float, int, int]:
        """Order of scheduling, lowest first: of the request, its share, its arrival, the index."""
        request = self.request
        return request.priority, request.virtual_start, self.arrival, self.index

    @property
    def length(self) -> int:
        """Tokens, including those sampled but not read yet."""
        return len(self.tokens) + self.pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def num_outputs(self) -> int:
        """Output tokens, pending ones included."""
        return len(self.tokens) + self.pending - self.prompt_len

    @property
    def logits_processors(self) -> LogitsProcessors | None:
        """Those that change its logits; None if it has none, or has a grammar instead."""
        processors = self.request.params.logits_processors
        return processors if processors and self.guide is None else None

    def write_ids(self, start: int, out: np.ndarray) -> None:
        """Write the known ids from ``start`` on into ``out`` [T] int64.

        The prompt is copied from its array, which is faster than from the list.
        """
        num_prompt = max(min(self.prompt_len - start, len(out)), 0)
        out[:num_prompt] = self.prompt_ids[start : start + num_prompt]
        if num_prompt < len(out):
            out[num_prompt:] = self.tokens[start + num_prompt : start + len(out)]

    def rope_frequency_ids(self, start: int, stop: int) -> list[int] | int:
        """Rope frequency ids of positions start … stop − 1; one integer if all are equal."""
        rule = self.rope_length_source.rule
        if rule != "running":
            return self.prompt_key
        if stop <= self.prompt_len:
            return self.prompt_key
        key, prompt = self.rope_length_source.key, self.prompt_len
        return [self.prompt_key if p < prompt else key(p + 1) for p in range(start, stop)]

    def page_key(self, page: int, page_size: int) -> bytes:
        """The prefix key of a full page: of all tokens, rope frequency ids, embeddings up to it."""
        while len(self.page_keys) <= page:
            index = len(self.page_keys)
            start, stop = index * page_size, (index + 1) * page_size
            keys = self.rope_frequency_ids(start, stop)
            parent = self.page_keys[-1] if self.page_keys else self.root_page_key
            extra = self._embedding_key(start, stop)
            rope_frequency_ids: Iterable[int] = [keys] if isinstance(keys, int) else keys
            self.page_keys.append(
                page_key(parent, self.tokens[start:stop], rope_frequency_ids, extra)
            )
        return self.page_keys[page]

    def _embedding_key(self, start: int, stop: int) -> str:
        """The part of a page's key for the image embeddings in it."""
        spans = self.request.embedding_spans
        if not spans:
            return ""
        in_page = [s for s in spans if s.position < stop and s.position + s.length > start]
        # each digest with its length, so that no digest can be read as two spans
        return "|".join(
            f"{start - s.position}:{s.length}:{len(s.digest)}:{s.digest}" for s in in_page
        )

    def fork(self, index: int, seed: int) -> Sequence:
        """A copy that continues separately; its pages come from ``Scheduler.share_pages``."""
        other = Sequence(
            self.request,
            index,
            self.arrival,
            self.rope_length_source,
            self.prompt_ids,
            max_length=self.max_length,
            seed=seed,
        )
        other.tokens = list(self.tokens)
        other.root_page_key, other.page_keys = self.root_page_key, list(self.page_keys)
        other.beam_search = self.beam_search
        return other
