"""One sequence of a request: its tokens, its pages, how far it is computed, and which rope keys its tokens have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from modelmill.core.types import Finish, Guide, Request
from modelmill.runtime.pages import chain, root


@dataclass(frozen=True)
class RopeRule:
    """How a token gets its rope key. rule: "fixed", "prompt" or "running"; key: the model's ``rope_key``."""

    rule: str
    key: Callable[[int], int]

    @staticmethod
    def of(model: object) -> RopeRule:
        """The rule of a model (its ``rope_rule`` and ``rope_key``)."""
        return RopeRule(model.rope_rule, model.rope_key)  # type: ignore[attr-defined]


class Sequence:
    """State of one sequence; ``tokens`` is prompt and answer, ``prompt_ids`` the prompt as an array.

    computed: tokens whose keys and values stand in pages (or will, when the launched steps are done). pending: tokens
    that are sampled on the device but not read yet; length counts them too. limit: the length at which the sequence
    ends. stops: token ids that end it. row: its row in the page tables while it runs, else −1. seed: of its random
    numbers. key: the order of service, arrival and then index. began: when it left the queue for its first step, by
    time.perf_counter.
    """

    __slots__ = (
        "arrival",
        "beam",
        "began",
        "cached",
        "chunk",
        "computed",
        "digests",
        "finish",
        "guide",
        "index",
        "limit",
        "pages",
        "pending",
        "pooled",
        "prompt_ids",
        "prompt_key",
        "prompt_len",
        "prompt_logprobs",
        "published",
        "request",
        "rope",
        "row",
        "salt",
        "seed",
        "siblings",
        "stops",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        arrival: int,
        rope: RopeRule,
        ids: np.ndarray | None = None,
        *,
        limit: int,
        seed: int = 0,
        digest: str = "",
    ) -> None:
        """ids: the prompt's, [T] int64, where they are known so."""
        self.request, self.index, self.arrival = request, index, arrival
        self.tokens: list[int] = list(request.prompt)
        self.prompt_len = len(self.tokens)
        self.prompt_ids = np.fromiter(request.prompt, np.int64, self.prompt_len) if ids is None else ids
        self.rope = rope
        self.prompt_key = 0 if rope.rule == "fixed" else rope.key(self.prompt_len)
        self.limit = limit
        self.seed = seed
        self.computed = 0
        self.pending = 0
        self.pages: list[int] = []
        self.row = -1
        self.finish: Finish | None = None
        self.began: float | None = None
        self.cached = 0
        self.published = 0
        self.salt = root(digest, request.cache_salt)
        self.digests: list[bytes] = []
        self.siblings: list[Sequence] = []
        eos = () if request.params.ignore_eos else request.eos_ids
        self.stops = frozenset((*eos, *request.params.stop_token_ids))
        self.beam: object | None = None
        self.guide: Guide | None = None
        # what the rows of the prompt that are computed add up to, [H] float64
        self.pooled: object | None = None
        wants_prompt = request.params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[object] | None = [None] if wants_prompt else None
        # logits of every prompt row are large: such prompts go in small chunks
        self.chunk = 512 if wants_prompt else 1 << 62

    @property
    def key(self) -> tuple[int, int]:
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
    def outputs(self) -> int:
        """Length of the answer, pending tokens included."""
        return len(self.tokens) + self.pending - self.prompt_len

    def write(self, start: int, out: np.ndarray) -> None:
        """Known ids from ``start`` on into ``out`` [T] int64: the prompt's need not become numbers once more."""
        there = max(min(self.prompt_len - start, len(out)), 0)
        out[:there] = self.prompt_ids[start : start + there]
        if there < len(out):
            out[there:] = self.tokens[start + there : start + len(out)]

    def rope_keys(self, start: int, stop: int) -> list[int] | int:
        """Keys of positions start … stop − 1; one number where all share it."""
        rule = self.rope.rule
        if rule != "running":
            return self.prompt_key
        if stop <= self.prompt_len:
            return self.prompt_key
        key, prompt = self.rope.key, self.prompt_len
        return [self.prompt_key if p < prompt else key(p + 1) for p in range(start, stop)]

    def digest(self, page: int, page_size: int) -> bytes:
        """The prefix key of a full page of known tokens: of all tokens, keys and inserts up to its end."""
        while len(self.digests) <= page:
            index = len(self.digests)
            start, stop = index * page_size, (index + 1) * page_size
            keys = self.rope_keys(start, stop)
            parent = self.digests[-1] if self.digests else self.salt
            extra = self._inserts(start, stop)
            spread: Iterable[int] = [keys] if isinstance(keys, int) else keys
            self.digests.append(chain(parent, self.tokens[start:stop], spread, extra))
        return self.digests[page]

    def _inserts(self, start: int, stop: int) -> str:
        """What stretches of foreign embeddings contribute to a page's key."""
        inserts = self.request.inserts
        if not inserts:
            return ""
        touched = [i for i in inserts if i.position < stop and i.position + i.length > start]
        # each digest with its length, so that no digest can look like two inserts
        return "|".join(f"{start - i.position}:{i.length}:{len(i.digest)}:{i.digest}" for i in touched)

    def fork(self, index: int, seed: int) -> Sequence:
        """A copy that continues on its own; pages are not shared yet (see ``Scheduler.share``)."""
        other = Sequence(self.request, index, self.arrival, self.rope, self.prompt_ids, limit=self.limit, seed=seed)
        other.tokens = list(self.tokens)
        other.salt, other.digests = self.salt, list(self.digests)
        other.beam = self.beam
        return other
