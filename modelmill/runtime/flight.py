"""A step on its way: what each of its rows serves, and what will be read of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from modelmill.core.types import MEAN
from modelmill.runtime.sampler import Plan
from modelmill.runtime.scheduler import Schedule, Scheduler
from modelmill.runtime.sequence import Sequence


@dataclass
class Prompted:
    """Log-probabilities of a stretch of a prompt: one table row per token that follows position ``first``."""

    seq: Sequence
    table: torch.Tensor


@dataclass
class Pooled:
    """Hidden states of a stretch of a prompt, as their sum [H] in float64. first: nothing of it came before."""

    seq: Sequence
    total: torch.Tensor
    first: bool


@dataclass
class Flight:
    """A launched step. seqs: one per sampled id. told: their log-probabilities. beams: logits by search.

    reached: how far each sequence of the schedule's work is computed after it.
    """

    schedule: Schedule
    seqs: list[Sequence] = field(default_factory=list)
    ids: torch.Tensor | None = None
    plan: Plan | None = None
    told: torch.Tensor | None = None
    prompted: list[Prompted] = field(default_factory=list)
    beams: list[tuple[object, torch.Tensor]] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    event: torch.cuda.Event | None = None

    def read(self) -> list[int]:
        """Wait for the sampled ids."""
        if self.event is not None:
            self.event.synchronize()
        return [] if self.ids is None else self.ids.tolist()


@dataclass
class Rows:
    """Which rows of a step serve what, in the order of ``Wanted.rows``: samples, beams, prompts; then hidden states."""

    seqs: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    beams: dict[int, list[tuple[Sequence, int]]] = field(default_factory=dict)
    prompts: list[tuple[Sequence, int, int, int]] = field(default_factory=list)
    pooled: list[tuple[Sequence, int, int]] = field(default_factory=list)

    @property
    def states(self) -> int:
        """Rows whose hidden state is wanted."""
        return sum(count for _, _, count in self.pooled)


def rows_of(schedule: Schedule) -> Rows:
    """What the rows of a scheduled step serve."""
    found = Rows()
    start = 0
    for seq, count in schedule.work:
        done = seq.computed + count
        if done == seq.length:
            if seq.beam is not None:
                found.beams.setdefault(id(seq.beam), []).append((seq, start + count - 1))
            elif Scheduler.samples(seq):
                for sampled in (seq, *schedule.forks.get(seq, ())):
                    found.seqs.append(sampled)
                    found.rows.append(start + count - 1)
        if seq.prompt_logprobs is not None and seq.computed < seq.prompt_len - 1:
            # the row of a token tells about the token after it
            known = max(len(seq.prompt_logprobs) - 1, seq.computed)
            upto = min(done, seq.prompt_len - 1)
            if known < upto:
                found.prompts.append((seq, start + known - seq.computed, upto - known, known))
        if seq.request.pooling == MEAN:
            found.pooled.append((seq, start, count))
        elif seq.request.pooling is not None and done == seq.length:
            found.pooled.append((seq, start + count - 1, 1))
        start += count
    return found


def pooled_of(found: Rows, states: torch.Tensor) -> list[Pooled]:
    """The sums of each prompt's rows; states: [n, H], theirs one after another."""
    out, start = [], 0
    for seq, _, count in found.pooled:
        total = torch.sum(states[start : start + count], 0, dtype=torch.float64)
        out.append(Pooled(seq, total, first=seq.computed == 0 or seq.request.pooling != MEAN))
        start += count
    return out
