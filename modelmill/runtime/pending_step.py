"""A launched step: which rows belong to which sequence, and the results still to be read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from modelmill.core.types import POOL_MEAN
from modelmill.runtime.sampler import SamplingBatch
from modelmill.runtime.scheduler import Schedule, Scheduler
from modelmill.runtime.sequence import Sequence


@dataclass
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens, one table row each."""

    seq: Sequence
    logprob_table: torch.Tensor


@dataclass
class PooledStates:
    """Sum of the hidden states of consecutive prompt tokens, [H] float64.

    ``is_first``: the prompt had no earlier ones.
    """

    seq: Sequence
    state_sum: torch.Tensor
    is_first: bool


@dataclass
class PendingStep:
    """A launched step.

    Attributes:
        seqs: One per sampled id.
        ids: [len(seqs)] int64.
        logprob_table: Log-probabilities of the rows that request them.
        beam_logits: (beam search, logits of its beams).
        computed_after: ``computed`` of each sequence of the schedule's work after this step.
        ready_event: Recorded behind the copies to the host.
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
        """Wait for the step and return the sampled ids."""
        if self.ready_event is not None:
            self.ready_event.synchronize()
        return [] if self.ids is None else self.ids.tolist()


@dataclass
class StepRows:
    """The use of each logit row of a step, in order: samples, beams, prompts, hidden states.

    Attributes:
        seqs: The sequence of each sampled row.
        sample_rows: Index of the token in the step.
        beam_rows: By id of the search: (sequence, row).
        prompt_rows: For prompt log-probabilities: (sequence, first row, rows, position).
        pooled_rows: For embeddings: (sequence, first row, rows).
    """

    seqs: list[Sequence] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    beam_rows: dict[int, list[tuple[Sequence, int]]] = field(default_factory=dict)
    prompt_rows: list[tuple[Sequence, int, int, int]] = field(default_factory=list)
    pooled_rows: list[tuple[Sequence, int, int]] = field(default_factory=list)

    @property
    def num_state_rows(self) -> int:
        """Rows whose hidden state is returned."""
        return sum(count for _, _, count in self.pooled_rows)


def assign_rows(schedule: Schedule) -> StepRows:
    """Assign the logit rows of a scheduled step."""
    rows = StepRows()
    start = 0
    for seq, count in schedule.work:
        computed = seq.computed + count
        if computed == seq.length:
            if seq.beam_search is not None:
                rows.beam_rows.setdefault(id(seq.beam_search), []).append((seq, start + count - 1))
            elif Scheduler.needs_sampling(seq):
                for sampled in (seq, *schedule.forks.get(seq, ())):
                    rows.seqs.append(sampled)
                    rows.sample_rows.append(start + count - 1)
        if seq.prompt_logprobs is not None and seq.computed < seq.prompt_len - 1:
            # the row of a token holds the log-probabilities of the next one
            known = max(len(seq.prompt_logprobs) - 1, seq.computed)
            end = min(computed, seq.prompt_len - 1)
            if known < end:
                rows.prompt_rows.append((seq, start + known - seq.computed, end - known, known))
        if seq.request.pooling == POOL_MEAN:
            rows.pooled_rows.append((seq, start, count))
        elif seq.request.pooling is not None and computed == seq.length:
            rows.pooled_rows.append((seq, start + count - 1, 1))
        start += count
    return rows


def pool_states(rows: StepRows, states: torch.Tensor) -> list[PooledStates]:
    """Sum the hidden states of each prompt; ``states``: [n, H], those of all prompts in order."""
    out, start = [], 0
    for seq, _, count in rows.pooled_rows:
        total = torch.sum(states[start : start + count], 0, dtype=torch.float64)
        out.append(
            PooledStates(seq, total, is_first=seq.computed == 0 or seq.request.pooling != POOL_MEAN)
        )
        start += count
    return out
