"""Processes a step's results: appends tokens, ends sequences and advances beam searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelmill.core.types import MEAN_POOLING, FinishReason, Logprob, TokenOutput
from modelmill.runtime.beam_search import BeamSearch
from modelmill.runtime.pending_step import PendingStep
from modelmill.runtime.sampler import Sampler, parse_logprob_row
from modelmill.runtime.scheduler import Scheduler
from modelmill.runtime.sequence import Sequence


class OutputProcessor:
    """The sequences of all unfinished requests, and token counters.

    Attributes:
        live_sequences: Sequences by request id.
        num_beam_searches: Unfinished beam searches.
        num_guided: Sequences whose logits depend on the last token on the host (a grammar, some
            logits processors), so that no step can be launched ahead of it.
    """

    def __init__(self, scheduler: Scheduler, sampler: Sampler) -> None:
        self.scheduler, self.sampler = scheduler, sampler
        self.live_sequences: dict[str, list[Sequence]] = {}
        self.num_beam_searches = self.num_guided = 0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        # by request id, from when its prompt is computed
        self._cached_tokens: dict[str, int] = {}

    def add(self, seqs: list[Sequence]) -> None:
        """Add a request's sequences and queue the first, from which the others fork."""
        leader = seqs[0]
        if leader.beam_search is not None:
            self.num_beam_searches += 1
        self.num_guided += sum(map(_prevents_launch_ahead, seqs))
        self.live_sequences[leader.request.id] = seqs
        self.scheduler.add(leader)

    def process(self, pending: PendingStep) -> list[TokenOutput]:
        """Wait for a step, apply its results to the sequences and return the outputs."""
        events: list[TokenOutput] = []
        ids = pending.wait_for_ids()
        top_logprobs = self._read_logprobs(pending)
        for prompt in pending.prompt_logprobs:
            assert prompt.seq.prompt_logprobs is not None
            top = prompt.seq.request.params.prompt_logprobs or 0
            prompt.seq.prompt_logprobs.extend(
                parse_logprob_row(row, top) for row in prompt.logprob_table.tolist()
            )
        for i, seq in enumerate(pending.seqs):
            if seq.finish_reason is None:  # else it ended after this step was launched ahead
                events.append(self._append_token(seq, ids[i], top_logprobs.get(i)))
        for search, logits in pending.beam_logits:
            events += self._advance_or_finish_beam_search(search, logits)  # type: ignore[arg-type]
        for pooled in pending.pooled_states:
            pooled.seq.accumulate_pooled_sum(pooled.state_sum, is_first=pooled.is_first)
        for (seq, _), computed in zip(pending.schedule.work, pending.computed_after):
            if seq.finish_reason is None:
                self.scheduler.cache_full_pages(seq)
                # not seq.computed, which already includes the step launched ahead
                if seq.max_length <= seq.prompt_len <= computed:
                    events += self._finish_prompt_only(seq)
        for seq in pending.schedule.out_of_pages:
            if seq.finish_reason is None:
                events += self._finish_out_of_pages(seq)
        return events

    def _append_token(
        self, seq: Sequence, token: int, top_logprobs: Mapping[int, Logprob] | None
    ) -> TokenOutput:
        """Append a sampled token and end the sequence if this token ends it."""
        cached = self._count_prompt_and_get_cached(seq)
        self.output_tokens += 1
        prompt_logprobs = None
        if seq.prompt_logprobs is not None and len(seq.tokens) == seq.prompt_len:
            prompt_logprobs = seq.prompt_logprobs
        seq.append_sampled(token)
        if seq.guide is not None:
            seq.guide.accept(token)
        finish: FinishReason | None = None
        stop: int | None = None
        visible: int | None = token  # a stop token is not part of the text
        if token in seq.stop_ids:
            # a failed guide allows only stop ids
            failed = seq.guide is not None and seq.guide.failed
            finish = FinishReason.ERROR if failed else FinishReason.STOP
            stop = token
            visible = None
        elif len(seq.tokens) >= seq.max_length:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.scheduler.cache_full_pages(seq)
            self.finish_sequence(seq, finish)
        return TokenOutput(
            seq.request.id,
            seq.index,
            visible,
            top_logprobs,
            finish,
            stop,
            prompt_logprobs,  # type: ignore[arg-type]
            cached,
        )

    def _count_prompt_and_get_cached(self, seq: Sequence) -> int:
        """Count a request's prompt once and return its tokens from the prefix cache.

        Later sequences of the request, and preempted ones, find the request's own pages in the
        cache: that is not counted as a hit.
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
            i: parse_logprob_row(row, params[i].logprobs or 0)
            for i, row in zip(pending.sampling.logprob_indices, rows)
        }

    def _finish_prompt_only(self, seq: Sequence) -> list[TokenOutput]:
        """Finish a request for zero tokens whose prompt is computed."""
        cached = self._count_prompt_and_get_cached(seq)
        events = []
        embedding = _pooled_hidden_state_bytes(seq)
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
        """End a sequence that has exhausted the page pool alone."""
        if isinstance(seq.beam_search, BeamSearch):
            seq.beam_search.finish_early()
            return self._finish_beam_search(seq.beam_search)
        cached = self._count_prompt_and_get_cached(seq)
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

    def _advance_or_finish_beam_search(
        self, search: BeamSearch, logits: torch.Tensor
    ) -> list[TokenOutput]:
        """Advance a beam search: replace its beams by their extensions.

        The first extension of a beam reuses its sequence, further ones fork it; beams without an
        extension are removed.
        """
        if search.seqs[0].finish_reason is not None:
            return []
        parents = search.seqs
        self._count_prompt_and_get_cached(parents[0])
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
                seq = seq.fork(search.new_fork_index(), seq.seed)
                self.scheduler.share_pages(parents[child.parent], seq)
                self.scheduler.add_running(seq)
            continued.add(child.parent)
            beams.append(seq)
        for seq, child in zip(beams, children):
            seq.append_beam_token(child.token, beams)
        search.replace_beams(beams)
        self.live_sequences[parents[0].request.id] = list(beams)
        return []

    def _finish_beam_search(self, search: BeamSearch) -> list[TokenOutput]:
        """End a beam search; returns the n best results, best first."""
        request = search.seqs[0].request
        cached = self._count_prompt_and_get_cached(search.seqs[0])
        for seq in list(search.seqs):
            self.finish_sequence(seq, FinishReason.STOP)
        events = []
        for i, result in enumerate(search.results[: request.params.n]):
            self.output_tokens += len(result.tokens) + (result.stop_id is not None)
            events.append(
                TokenOutput(
                    request.id,
                    i,
                    None,
                    None,
                    result.finish_reason,
                    result.stop_id,
                    None,
                    cached,
                    result.tokens,
                    result.score,
                )
            )
        return events

    def finish_sequence(self, seq: Sequence, finish_reason: FinishReason) -> None:
        """End a sequence and release its pages, row and sampler state."""
        if seq.finish_reason is not None:
            return
        seq.finish(finish_reason)
        if _prevents_launch_ahead(seq):
            self.num_guided -= 1
        self.scheduler.remove(seq)
        if seq.beam_search is None and seq.siblings:
            # its siblings waited to fork from it; now each computes the prompt itself
            for other in seq.pop_siblings():
                if other.finish_reason is None:
                    self.scheduler.add(other)
        self.sampler.drop_sequence_state(seq)
        live = self.live_sequences.get(seq.request.id)
        if live is not None and all(s.finish_reason is not None for s in live):
            del self.live_sequences[seq.request.id]
            self._cached_tokens.pop(seq.request.id, None)
            if seq.beam_search is not None:
                self.num_beam_searches -= 1


def _prevents_launch_ahead(seq: Sequence) -> bool:
    """Whether the host must read a token before the next one can be sampled."""
    processors = seq.logits_processors
    return seq.guide is not None or (processors is not None and processors.depends_on_past_tokens)


def _pooled_hidden_state_bytes(seq: Sequence) -> bytes | None:
    """The pooled state of a prompt, if requested: [H] float32, little endian."""
    if not isinstance(seq.pooled_sum, torch.Tensor):
        return None
    count = seq.prompt_len if seq.request.pooling == MEAN_POOLING else 1
    return (seq.pooled_sum / count).to(torch.float32).numpy().astype("<f4").tobytes()
