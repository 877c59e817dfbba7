"""What a step's results mean: tokens are appended, sequences end, beams are replaced by their
children.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelmill.core.types import POOL_MEAN, FinishReason, Logprob, TokenOutput
from modelmill.runtime import logprobs
from modelmill.runtime.beam_search import BeamSearch
from modelmill.runtime.logits_processors import active_processors
from modelmill.runtime.pending_step import PendingStep
from modelmill.runtime.sampler import Sampler
from modelmill.runtime.scheduler import Scheduler
from modelmill.runtime.sequence import Sequence


class OutputProcessor:
    """The sequences of every request that is not over, and the counts of tokens.

    live_sequences: by request id. num_beam_searches: among them. num_guided: sequences whose next
    token depends on which the last one was, beyond what the model sees.
    """

    def __init__(self, scheduler: Scheduler, sampler: Sampler) -> None:
        self.scheduler, self.sampler = scheduler, sampler
        self.live_sequences: dict[str, list[Sequence]] = {}
        self.num_beam_searches = self.num_guided = 0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self._cached_tokens: dict[str, int] = {}  # of each live request whose prompt is computed

    def add(self, seqs: list[Sequence]) -> None:
        """A request's sequences; the first is queued and leads the others."""
        leader = seqs[0]
        if leader.beam_search is not None:
            self.num_beam_searches += 1
        self.num_guided += sum(map(_needs_sampled_token, seqs))
        self.live_sequences[leader.request.id] = seqs
        self.scheduler.add(leader)

    def process(self, pending: PendingStep) -> list[TokenOutput]:
        """Read a step's results and move its sequences on."""
        events: list[TokenOutput] = []
        ids = pending.wait_for_ids()
        top_logprobs = self._read_logprobs(pending)
        for prompt in pending.prompt_logprobs:
            assert prompt.seq.prompt_logprobs is not None
            top = prompt.seq.request.params.prompt_logprobs or 0
            prompt.seq.prompt_logprobs.extend(
                logprobs.read_logprobs(row, top) for row in prompt.logprob_table.tolist()
            )
        for i, seq in enumerate(pending.seqs):
            if seq.finish_reason is None:
                events.append(self._append_token(seq, ids[i], top_logprobs.get(i)))
        for search, logits in pending.beam_logits:
            events += self._advance_beams(search, logits)  # type: ignore[arg-type]
        for pooled in pending.pooled_states:
            before = 0 if pooled.is_first else pooled.seq.pooled_sum
            pooled.seq.pooled_sum = before + pooled.state_sum
        for (seq, _), reached in zip(pending.schedule.work, pending.computed_after):
            if seq.finish_reason is None:
                self.scheduler.cache_full_pages(seq)
                # the next step may be under way: what it computes has not been read yet
                if seq.max_length <= seq.prompt_len <= reached:
                    events += self._finish_prompt_only(seq)
        for seq in pending.schedule.out_of_pages:
            if seq.finish_reason is None:
                events += self._finish_out_of_pages(seq)
        return events

    def _append_token(
        self, seq: Sequence, token: int, top_logprobs: Mapping[int, Logprob] | None
    ) -> TokenOutput:
        """One sampled token of one sequence."""
        cached = self._count_prompt(seq)
        seq.pending -= 1
        self.output_tokens += 1
        prompt = None
        if seq.prompt_logprobs is not None and len(seq.tokens) == seq.prompt_len:
            prompt = seq.prompt_logprobs
        seq.tokens.append(token)
        if seq.guide is not None:
            seq.guide.accept(token)
        finish: FinishReason | None = None
        stop: int | None = None
        shown: int | None = token
        if token in seq.stop_ids:
            lost = seq.guide is not None and seq.guide.failed
            finish, stop, shown = FinishReason.ERROR if lost else FinishReason.STOP, token, None
        elif len(seq.tokens) >= seq.max_length:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.scheduler.cache_full_pages(seq)
            self.finish_sequence(seq, finish)
        request = seq.request.id
        if top_logprobs is None and prompt is None:
            return TokenOutput(request, seq.index, shown, None, finish, stop, None, cached)
        return TokenOutput(request, seq.index, shown, top_logprobs, finish, stop, prompt, cached)  # type: ignore[arg-type]

    def _count_prompt(self, seq: Sequence) -> int:
        """Count a request's prompt, once however many answers it gets; its tokens that came from
        the prefix cache.

        Answers that have to compute it again find their own pages there: that saves nothing of what
        was asked for.
        """
        cached = self._cached_tokens.get(seq.request.id)
        if cached is None:
            cached = self._cached_tokens[seq.request.id] = seq.num_cached
            self.prompt_tokens += seq.prompt_len
            self.cached_tokens += cached
        return cached

    def _read_logprobs(self, pending: PendingStep) -> dict[int, dict[int, Logprob]]:
        if pending.logprob_table is None or pending.sampling is None:
            return {}
        params = [s.request.params for s in pending.seqs]
        rows = pending.logprob_table.tolist()
        return {
            i: logprobs.read_logprobs(row, params[i].logprobs or 0)
            for i, row in zip(pending.sampling.logprob_indices, rows)
        }

    def _finish_prompt_only(self, seq: Sequence) -> list[TokenOutput]:
        """A request for zero tokens: its prompt is computed, that was all."""
        cached = self._count_prompt(seq)
        events = []
        embedding = _embedding(seq)
        for member in [*self.live_sequences.get(seq.request.id, ())]:
            prompt: Any = member.prompt_logprobs
            self.finish_sequence(member, FinishReason.LENGTH)
            events.append(
                TokenOutput(
                    seq.request.id,
                    member.index,
                    None,
                    None,
                    FinishReason.LENGTH,
                    prompt_logprobs=prompt,
                    cached_tokens=cached,
                    embedding=embedding,
                )
            )
        return events

    def _finish_out_of_pages(self, seq: Sequence) -> list[TokenOutput]:
        """No page can be found for the only sequence left: it ends here."""
        if isinstance(seq.beam_search, BeamSearch):
            seq.beam_search.finish_early()
            return self._finish_beam_search(seq.beam_search)
        cached = self._count_prompt(seq)
        self.finish_sequence(seq, FinishReason.LENGTH)
        return [
            TokenOutput(
                seq.request.id,
                seq.index,
                None,
                finish_reason=FinishReason.LENGTH,
                cached_tokens=cached,
            )
        ]

    def _advance_beams(self, search: BeamSearch, logits: torch.Tensor) -> list[TokenOutput]:
        """One step of a beam search: its beams are replaced by their children."""
        if search.seqs[0].finish_reason is not None:
            return []
        parents = search.seqs
        self._count_prompt(parents[0])
        children = search.advance(logits)
        if not children:
            return self._finish_beam_search(search)
        used = {child.parent for child in children}
        for i, seq in enumerate(parents):
            self.scheduler.cache_full_pages(seq)
            if i not in used:
                self.scheduler.remove(seq)
        continued: set[int] = set()
        beams: list[Sequence] = []
        for child in children:
            seq = parents[child.parent]
            if child.parent in continued:
                search.num_forks += 1
                seq = seq.fork(search.num_forks, seq.seed)
                self.scheduler.share_pages(parents[child.parent], seq)
                self.scheduler.add_running(seq)
            continued.add(child.parent)
            beams.append(seq)
        for seq, child in zip(beams, children):
            seq.tokens.append(child.token)
            seq.siblings = beams
        search.seqs = beams
        self.live_sequences[parents[0].request.id] = list(beams)
        return []

    def _finish_beam_search(self, search: BeamSearch) -> list[TokenOutput]:
        """The search has ended: the n best results, best first."""
        request = search.seqs[0].request
        cached = self._count_prompt(search.seqs[0])
        for seq in list(search.seqs):
            self.finish_sequence(seq, FinishReason.STOP)
        events = []
        for i, found in enumerate(search.results[: request.params.n]):
            self.output_tokens += len(found.tokens) + (found.stop_id is not None)
            events.append(
                TokenOutput(
                    request.id,
                    i,
                    None,
                    None,
                    found.finish_reason,
                    found.stop_id,
                    None,
                    cached,
                    found.tokens,
                    found.score,
                )
            )
        return events

    def finish_sequence(self, seq: Sequence, finish_reason: FinishReason) -> None:
        """The sequence has ended: everything it held is given back."""
        if seq.finish_reason is not None:
            return
        seq.finish_reason = finish_reason
        if _needs_sampled_token(seq):
            self.num_guided -= 1
        self.scheduler.remove(seq)
        if seq.beam_search is None and seq.siblings:
            # they waited for its prompt; now they compute their own
            for other in seq.siblings:
                if other.finish_reason is None:
                    self.scheduler.add(other)
            seq.siblings = []
        self.sampler.forget(seq)
        live = self.live_sequences.get(seq.request.id)
        if live is not None and all(s.finish_reason is not None for s in live):
            del self.live_sequences[seq.request.id]
            self._cached_tokens.pop(seq.request.id, None)
            if seq.beam_search is not None:
                self.num_beam_searches -= 1


def _needs_sampled_token(seq: Sequence) -> bool:
    """Whether the host must know a token before the next one can be picked."""
    asked = active_processors(seq)
    return seq.guide is not None or (asked is not None and asked.depends_on_tokens)


def _embedding(seq: Sequence) -> bytes | None:
    """The pooled state of a prompt, where it was asked for: [H] float32, little endian."""
    if not isinstance(seq.pooled_sum, torch.Tensor):
        return None
    count = seq.prompt_len if seq.request.pooling == POOL_MEAN else 1
    return (seq.pooled_sum / count).to(torch.float32).numpy().astype("<f4").tobytes()
