"""One sequence of a request: its tokens, its pages, how far it is computed, and which rope keys its
tokens have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelmill.core.types import FinishReason, Guide, Request
from modelmill.runtime.kv_pages import page_key, root_key


@dataclass(frozen=True)
class RopeRule:
    """How a token gets its rope key.

    rule: "fixed", "prompt" or "running"; key: the model's ``rope_key``.
    """

    rule: str
    key: Callable[[int], int]

    @staticmethod
    def from_model(model: object) -> RopeRule:
        """The rule of a model (its ``rope_rule`` and ``rope_key``)."""
        return RopeRule(model.rope_rule, model.rope_key)  # type: ignore[attr-defined]


class Sequence:
    """State of one sequence; ``tokens`` is prompt and answer, ``prompt_ids`` the prompt as an
    array.

    computed: tokens whose keys and values stand in pages (or will, when the launched steps are
    done). pending: tokens that are sampled on the device but not read yet; length counts them too.
    max_length: the length at which the sequence ends. stop_ids: token ids that end it. table_row:
    its row in the page tables while it runs, else −1. seed: of its random numbers. priority: the
    order of service, arrival and then index. started_at: when it left the queue for its first step,
    by time.perf_counter.
    """

    __slots__ = (
        "arrival",
        "beam_search",
        "computed",
        "finish_reason",
        "guide",
        "index",
        "max_chunk",
        "max_length",
        "num_cached",
        "num_cached_pages",
        "page_keys",
        "pages",
        "pending",
        "pooled_sum",
        "prompt_ids",
        "prompt_key",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "root_key",
        "rope_rule",
        "seed",
        "siblings",
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
        rope_rule: RopeRule,
        ids: np.ndarray | None = None,
        *,
        max_length: int,
        seed: int = 0,
        model_digest: str = "",
    ) -> None:
        """ids: the prompt's, [T] int64, where they are known so."""
        self.request, self.index, self.arrival = request, index, arrival
        self.tokens: list[int] = list(request.prompt)
        self.prompt_len = len(self.tokens)
        self.prompt_ids = (
            np.fromiter(request.prompt, np.int64, self.prompt_len) if ids is None else ids
        )
        self.rope_rule = rope_rule
        self.prompt_key = 0 if rope_rule.rule == "fixed" else rope_rule.key(self.prompt_len)
        self.max_length = max_length
        self.seed = seed
        self.computed = 0
        self.pending = 0
        self.pages: list[int] = []
        self.table_row = -1
        self.finish_reason: FinishReason | None = None
        self.started_at: float | None = None
        self.num_cached = 0
        self.num_cached_pages = 0
        self.root_key = root_key(model_digest, request.cache_salt)
        self.page_keys: list[bytes] = []
        self.siblings: list[Sequence] = []
        eos = () if request.params.ignore_eos else request.eos_ids
        self.stop_ids = frozenset((*eos, *request.params.stop_token_ids))
        self.beam_search: object | None = None
        self.guide: Guide | None = None
        # what the rows of the prompt that are computed add up to, [H] float64
        self.pooled_sum: Any = None  # a tensor; this module knows no torch
        wants_prompt = request.params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[object] | None = [None] if wants_prompt else None
        # logits of every prompt row are large: such prompts go in small chunks
        self.max_chunk = 512 if wants_prompt else 1 << 62

    @property
    def priority(self) -> tuple[int, int]:
        """Order of service, earliest first."""
        return self.arrival, self.index

    @property
    def length(self) -> int:
        """Tokens including those that are sampled but not read."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens still to be computed."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def num_outputs(self) -> int:
        """Length of the answer, pending tokens included."""
        return len(self.tokens) + self.pending - self.prompt_len

    def write_ids(self, start: int, out: np.ndarray) -> None:
        """Known ids from ``start`` on into ``out`` [T] int64: the prompt's need not become numbers
        once more.
        """
        there = max(min(self.prompt_len - start, len(out)), 0)
        out[:there] = self.prompt_ids[start : start + there]
        if there < len(out):
            out[there:] = self.tokens[start + there : start + len(out)]

    def rope_keys(self, start: int, stop: int) -> list[int] | int:
        """Keys of positions start … stop − 1; one number where all share it."""
        rule = self.rope_rule.rule
        if rule != "running":
            return self.prompt_key
        if stop <= self.prompt_len:
            return self.prompt_key
        key, prompt = self.rope_rule.key, self.prompt_len
        return [self.prompt_key if p < prompt else key(p + 1) for p in range(start, stop)]

    def page_key(self, page: int, page_size: int) -> bytes:
        """The prefix key of a full page of known tokens: of all tokens, keys and inserts up to its
        end.
        """
        while len(self.page_keys) <= page:
            index = len(self.page_keys)
            start, stop = index * page_size, (index + 1) * page_size
            keys = self.rope_keys(start, stop)
            parent = self.page_keys[-1] if self.page_keys else self.root_key
            extra = self._embedding_key(start, stop)
            spread: Iterable[int] = [keys] if isinstance(keys, int) else keys
            self.page_keys.append(page_key(parent, self.tokens[start:stop], spread, extra))
        return self.page_keys[page]

    def _embedding_key(self, start: int, stop: int) -> str:
        """What stretches of foreign embeddings contribute to a page's key."""
        inserts = self.request.embedding_spans
        if not inserts:
            return ""
        touched = [i for i in inserts if i.position < stop and i.position + i.length > start]
        # each digest with its length, so that no digest can look like two inserts
        return "|".join(
            f"{start - i.position}:{i.length}:{len(i.digest)}:{i.digest}" for i in touched
        )

    def fork(self, index: int, seed: int) -> Sequence:
        """A copy that continues on its own; pages are not shared yet (see
        ``Scheduler.share_pages``).
        """
        other = Sequence(
            self.request,
            index,
            self.arrival,
            self.rope_rule,
            self.prompt_ids,
            max_length=self.max_length,
            seed=seed,
        )
        other.tokens = list(self.tokens)
        other.root_key, other.page_keys = self.root_key, list(self.page_keys)
        other.beam_search = self.beam_search
        return other
