"""A loop without a model: the next token is the last one plus one; scores come from a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

from modelmill.core.config import RunConfig
from modelmill.core.types import FinishReason, Logprob, Request, TokenOutput
from modelmill.runtime.scheduler import SchedulerLimits
from modelmill.runtime.sequence import RequestLimits


@dataclass
class FakeEngineCore:
    """Serves every request a token a step.

    ``fail_at``: with so many requests at once memory ends.
    """

    vocab: int = 50
    max_model_len: int = 64
    page_size: int = 16
    num_pages: int = 16
    fail_at: int = 10**9
    device: str = "cpu"
    dtype: str = "torch.float32"
    config: RunConfig = field(default_factory=RunConfig)
    live: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)

    @property
    def scheduler(self) -> SimpleNamespace:
        tokens, seqs = self.config.max_num_batched_tokens, self.config.max_num_seqs
        return SimpleNamespace(limits=SchedulerLimits(tokens, seqs, self.page_size))

    @property
    def request_limits(self) -> RequestLimits:
        kv_tokens, seqs = self.num_pages * self.page_size, self.config.max_num_seqs
        return RequestLimits(self.vocab, self.max_model_len, kv_tokens, seqs)

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        self.live[request.id] = list(request.prompt)

    def add_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add(request)

    def abort(self, id: str) -> None:
        self.aborted.append(id)
        self.live.pop(id, None)

    def finish_on_stop_string(self, id: str, index: int) -> None:
        self.live.pop(id, None)

    def step(self) -> list[TokenOutput]:
        if len(self.live) >= self.fail_at:
            ids, self.live = list(self.live), {}
            return [TokenOutput(id, 0, None, finish_reason=FinishReason.ABORT) for id in ids]
        events = []
        for id in list(self.live):
            events.append(self._advance(id))
        return events

    def _advance(self, id: str) -> TokenOutput:
        request, ids = self.requests[id], self.live[id]
        prompt = None
        if request.params.prompt_logprobs is not None:
            pairs = zip(request.prompt, request.prompt[1:])
            prompt = [None, *({b: Logprob(self.logprob(a, b), 1)} for a, b in pairs)]
        allowed = request.params.max_tokens
        assert allowed is not None
        if allowed == 0:
            del self.live[id]
            return TokenOutput(
                id, 0, None, finish_reason=FinishReason.LENGTH, prompt_logprobs=prompt
            )
        ids.append((ids[-1] + 1) % self.vocab)
        stops = (
            {*request.eos_ids, *request.params.stop_token_ids}
            if not request.params.ignore_eos
            else set()
        )
        if ids[-1] in stops:
            del self.live[id]
            return TokenOutput(id, 0, None, finish_reason=FinishReason.STOP, stop_token_id=ids[-1])
        ended = len(ids) - len(request.prompt) >= allowed
        if ended:
            del self.live[id]
        return TokenOutput(
            id,
            0,
            ids[-1],
            finish_reason=FinishReason.LENGTH if ended else None,
            prompt_logprobs=prompt,
        )

    def logprob(self, a: int, b: int) -> float:
        return -math.log(2 + (a + b) % 5)

    @property
    def ops(self) -> SimpleNamespace:
        return SimpleNamespace(backends={"linear": "torch"})
