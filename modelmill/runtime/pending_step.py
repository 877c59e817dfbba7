"""A step on its way: what each of its rows serves, and what will be read of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from modelmill.core.types import POOL_MEAN
from modelmill.runtime.sampler import SamplingBatch
from modelmill.runtime.scheduler import Schedule, Scheduler
from modelmill.runtime.sequence import Sequence


@dataclass
class PromptLogprobs:
    """Log-probabilities of a stretch of a prompt: one table row per token that follows position
    ``first``.
    """

    seq: Sequence
    logprob_table: torch.Tensor


@dataclass
class PooledStates:
    """Hidden states of a stretch of a prompt, as their sum [H] in float64.

    is_first: nothing of it came before.
    """

    seq: Sequence
    state_sum: torch.Tensor
    is_first: bool


@dataclass
class PendingStep:
    """A launched step. seqs: one per sampled id. logprob_table: their log-probabilities.
    beam_logits: by search.

    computed_after: how far each sequence of the schedule's work is computed after it.
    """

    schedule: Schedule
    seqs: list[Sequence] = field(default_factory=list)
    ids: torch.Tensor | None = None
    sampling: SamplingBatch | None = None
    logprob_table: torch.Tensor | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    beam_logits: list[tuple[object, torch.Tensor]] = field(default_factory=list)
    pooled_states: list[PooledStates] = field(default_factory=list)
    computed_after: list[int] = field(default_factory=list)
    ready_event: torch.cuda.Event | None = None

    def wait_for_ids(self) -> list[int]:
        """Wait for the sampled ids."""
        if self.ready_event is not None:
            self.ready_event.synchronize()
        return [] if self.ids is None else self.ids.tolist()


@dataclass
class StepRows:
    """Which rows of a step serve what, in the order of ``Wanted.rows``: samples, beams, prompts;
    then hidden states.
    """

    seqs: list[Sequence] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    beam_rows: dict[int, list[tuple[Sequence, int]]] = field(default_factory=dict)
    prompt_rows: list[tuple[Sequence, int, int, int]] = field(default_factory=list)
    pooled_rows: list[tuple[Sequence, int, int]] = field(default_factory=list)

    @property
    def num_state_rows(self) -> int:
        """Rows whose hidden state is wanted."""
        return sum(count for _, _, count in self.pooled_rows)


def assign_rows(schedule: Schedule) -> StepRows:
    """What the rows of a scheduled step serve."""
    found = StepRows()
    start = 0
    for seq, count in schedule.work:
        done = seq.computed + count
        if done == seq.length:
            if seq.beam_search is not None:
                found.beam_rows.setdefault(id(seq.beam_search), []).append((seq, start + count - 1))
            elif Scheduler.needs_sampling(seq):
                for sampled in (seq, *schedule.forks.get(seq, ())):
                    found.seqs.append(sampled)
                    found.sample_rows.append(start + count - 1)
        if seq.prompt_logprobs is not None and seq.computed < seq.prompt_len - 1:
            # the row of a token tells about the token after it
            known = max(len(seq.prompt_logprobs) - 1, seq.computed)
            upto = min(done, seq.prompt_len - 1)
            if known < upto:
                found.prompt_rows.append((seq, start + known - seq.computed, upto - known, known))
        if seq.request.pooling == POOL_MEAN:
            found.pooled_rows.append((seq, start, count))
        elif seq.request.pooling is not None and done == seq.length:
            found.pooled_rows.append((seq, start + count - 1, 1))
        start += count
    return found


def pool_states(rows: StepRows, states: torch.Tensor) -> list[PooledStates]:
    """The sums of each prompt's rows; states: [n, H], theirs one after another."""
    out, start = [], 0
    for seq, _, count in rows.pooled_rows:
        total = torch.sum(states[start : start + count], 0, dtype=torch.float64)
        out.append(
            PooledStates(seq, total, is_first=seq.computed == 0 or seq.request.pooling != POOL_MEAN)
        )
        start += count
    return out
