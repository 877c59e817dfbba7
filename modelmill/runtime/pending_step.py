"""What the rows of a step's logits are for, and the results of a step that is launched.

The model runner launches a step without waiting; its ``PendingStep`` is read later.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from modelmill.core.types import MEAN_POOLING
from modelmill.runtime.batch import LogitRowSpec, PackedBatch
from modelmill.runtime.sampler import SamplingBatch, logprob_table
from modelmill.runtime.scheduler import Schedule, Scheduler
from modelmill.runtime.sequence import Sequence


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens, one table row each."""

    seq: Sequence
    logprob_table: torch.Tensor


@dataclass(frozen=True)
class PromptHiddenStateSum:
    """Sum of the hidden states of consecutive prompt tokens, [H] float64.

    ``is_first``: the prompt had no earlier ones.
    """

    seq: Sequence
    state_sum: torch.Tensor
    is_first: bool


@dataclass
class StepLogitRowMap:
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
    def num_pooled_rows(self) -> int:
        """Rows whose hidden state is returned."""
        return sum(count for _, _, count in self.pooled_rows)

    def logit_rows(self, schedule: Schedule, sampling: SamplingBatch) -> LogitRowSpec:
        """The rows to compute logits of, in the order in which the results are read."""
        rows = [*self.sample_rows]
        rows += [row for members in self.beam_rows.values() for _, row in members]
        rows += [r for _, start, n, _ in self.prompt_rows for r in range(start, start + n)]
        rows += [r for _, start, n in self.pooled_rows for r in range(start, start + n)]
        keep_slots = [s.table_row for s in self.seqs]
        for leader, siblings in schedule.forks.items():
            at = self.seqs.index(leader)
            # siblings get a table row only after this launch: the host reads their first id
            keep_slots[at + 1 : at + 1 + len(siblings)] = [-1] * len(siblings)
        keep_slots += [-1] * (len(rows) - len(keep_slots))
        return LogitRowSpec(rows or [0], keep_slots or [-1], sampling.sampling_inputs())

    def beam_logits(self, logits: torch.Tensor) -> list[tuple[object, torch.Tensor]]:
        """(beam search, logits of its beams), from the logits of ``logit_rows``."""
        out: list[tuple[object, torch.Tensor]] = []
        start = len(self.seqs)
        for members in self.beam_rows.values():
            seqs = [seq for seq, _ in members]
            order = [seqs.index(s) for s in seqs[0].siblings]
            out.append((seqs[0].beam_search, logits[start : start + len(seqs)][order]))
            start += len(seqs)
        return out

    def prompt_logprobs(self, logits: torch.Tensor) -> list[PromptLogprobs]:
        """Log-probabilities of prompt tokens, from the logits of ``logit_rows``."""
        out: list[PromptLogprobs] = []
        start = len(self.seqs) + sum(map(len, self.beam_rows.values()))
        for seq, _, count, known in self.prompt_rows:
            chosen = torch.tensor(seq.tokens[known + 1 : known + 1 + count], device=logits.device)
            top = min(seq.request.params.prompt_logprobs or 0, logits.shape[1])
            table = logprob_table(logits[start : start + count], chosen, top)
            out.append(PromptLogprobs(seq, table))
            start += count
        return out


@dataclass(frozen=True)
class StepForwardResult:
    """The forward pass of a launched step, before its tokens are sampled.

    Attributes:
        schedule: What was scheduled.
        rows: The use of each logit row.
        sampling: Sampling parameters of the sampled rows; None: the step has no work.
        batch: The packed batch; None: the step has no work.
        logits: [R, V] in the order of ``rows``; None if a graph has sampled already.
        ids: The ids that a graph has sampled.
        states: Hidden states of ``rows.pooled_rows``.
    """

    schedule: Schedule
    rows: StepLogitRowMap
    sampling: SamplingBatch | None = None
    batch: PackedBatch | None = None
    logits: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    states: torch.Tensor | None = None


@dataclass(frozen=True)
class PendingStep:
    """A launched step, whose results are still to be read.

    Attributes:
        schedule: What was scheduled.
        seqs: One per sampled id.
        ids: [len(seqs)] int64.
        sampling: Sampling parameters of ``seqs``.
        logprob_table: Log-probabilities of the rows that request them.
        prompt_logprobs: Log-probabilities of prompt tokens.
        beam_logits: (beam search, logits of its beams).
        pooled_states: Hidden states of prompts that are embedded.
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
    pooled_states: list[PromptHiddenStateSum] = field(default_factory=list)
    computed_after: list[int] = field(default_factory=list)
    ready_event: torch.cuda.Event | None = None

    def with_host_copies(self) -> PendingStep:
        """The step with asynchronous copies of its results, and an event behind them."""
        copied = replace(
            self,
            ids=_copy_to_host(self.ids),
            logprob_table=_copy_to_host(self.logprob_table),
            pooled_states=[
                replace(pooled, state_sum=pooled.state_sum.to("cpu", non_blocking=True))
                for pooled in self.pooled_states
            ],
            ready_event=torch.cuda.Event(),
        )
        assert copied.ready_event is not None
        copied.ready_event.record()
        return copied

    def wait_for_ids(self) -> list[int]:
        """Wait for the step and return the sampled ids."""
        if self.ready_event is not None:
            self.ready_event.synchronize()
        return [] if self.ids is None else self.ids.tolist()


def _copy_to_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to("cpu", non_blocking=True)


def assign_logit_rows(schedule: Schedule) -> StepLogitRowMap:
    """Assign the logit rows of a scheduled step."""
    rows = StepLogitRowMap()
    start = 0
    for seq, count in schedule.work:
        computed = seq.computed + count
        if computed == seq.length:
            if seq.beam_search is not None:
                rows.beam_rows.setdefault(id(seq.beam_search), []).append((seq, start + count - 1))
            elif Scheduler.samples_next_token(seq):
                for sampled in (seq, *schedule.forks.get(seq, ())):
                    rows.seqs.append(sampled)
                    rows.sample_rows.append(start + count - 1)
        if seq.prompt_logprobs is not None and seq.computed < seq.prompt_len - 1:
            # the row of a token holds the log-probabilities of the next one
            known = max(len(seq.prompt_logprobs) - 1, seq.computed)
            end = min(computed, seq.prompt_len - 1)
            if known < end:
                rows.prompt_rows.append((seq, start + known - seq.computed, end - known, known))
        if seq.request.pooling == MEAN_POOLING:
            rows.pooled_rows.append((seq, start, count))
        elif seq.request.pooling is not None and computed == seq.length:
            rows.pooled_rows.append((seq, start + count - 1, 1))
        start += count
    return rows


def sum_pooled_hidden_states(
    rows: StepLogitRowMap, states: torch.Tensor
) -> list[PromptHiddenStateSum]:
    """Sum the hidden states of each prompt; ``states``: [n, H], those of all prompts in order."""
    out, start = [], 0
    for seq, _, count in rows.pooled_rows:
        total = torch.sum(states[start : start + count], 0, dtype=torch.float64)
        out.append(
            PromptHiddenStateSum(
                seq, total, is_first=seq.computed == 0 or seq.request.pooling != MEAN_POOLING
            )
        )
        start += count
    return out
