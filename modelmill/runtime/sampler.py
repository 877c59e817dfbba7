"""From logits to token ids, for a whole batch on its device; nothing waits for the host.

Order: logit bias, repetition, presence and frequency penalties, min_tokens; then the argmax, or ``ops.sample``. What a
checkpoint's generation_config asks for besides (``logits_processors``) stands where transformers has it.
What has to be known about the sequences of a batch is gathered once in a ``Plan`` and reused as long as the batch stays
the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import SamplingParams
from modelmill.ops.shelf import Ops
from modelmill.runtime import chance, filters, logits_processors, logprobs
from modelmill.runtime.sequence import Sequence


@dataclass
class Plan:
    """How the rows of one batch are sampled. Tensors are on the device; ``None`` where no row needs them.

    greedy: all rows take the argmax. plain: nothing changes the logits before that. knobs: what
    ``ops.sample`` takes for each row, but for the noise.
    """

    seqs: list[Sequence]
    short: tuple[bool, ...]
    greedy: bool = True
    plain: bool = True
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    never: tuple[torch.Tensor, torch.Tensor] | None = None
    tallied: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    once: torch.Tensor | None = None
    each: torch.Tensor | None = None
    knobs: dict[str, np.ndarray] = field(default_factory=dict)
    guided: list[int] = field(default_factory=list)
    guided_rows: torch.Tensor | None = None
    processed: list[tuple[int, LogitsProcessors]] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    told_rows: torch.Tensor | None = None
    top: int = 0
    seeds: np.ndarray | None = None

    def draws(self) -> dict[str, np.ndarray] | None:
        """How each row's next token is drawn; None where no row draws."""
        if self.seeds is None:
            return None
        noise = chance.uniform(self.seeds, np.array([s.length for s in self.seqs]))
        return {**self.knobs, "noise": noise}


class Tally:
    """Which tokens a sequence has seen and how often it wrote them, kept on the device, one slot a sequence.

    counts: [slots, V] int32, of the answer. seen: [slots, V] bool, of the answer and what counts of the prompt.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self._slot: dict[Sequence, int] = {}
        self._free: list[int] = []

    def slot(self, seq: Sequence) -> int:
        """The sequence's slot, filled from its tokens when it is new."""
        slot = self._slot.get(seq)
        if slot is not None:
            return slot
        if not self._free:
            self._grow()
        slot = self._slot[seq] = self._free.pop()
        self.counts[slot] = 0
        self.seen[slot] = False
        seen = torch.tensor(logits_processors.counted(seq), dtype=torch.int64, device=self.counts.device)
        self.seen[slot, seen] = True
        written = torch.tensor(seq.tokens[seq.prompt_len :], dtype=torch.int64, device=self.counts.device)
        if len(written):
            self.counts[slot] += torch.bincount(written, minlength=self.counts.shape[1]).to(torch.int32)
        return slot

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        slot = self._slot.pop(seq, None)
        if slot is not None:
            self._free.append(slot)

    def count(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """One more token of each sequence."""
        self.seen[slots, ids] = True
        self.counts[slots, ids] += 1

    def _grow(self) -> None:
        have = self.counts.shape[0]
        more = max(have, 4)
        self.counts = torch.cat((self.counts, self.counts.new_zeros(more, self.counts.shape[1])))
        self.seen = torch.cat((self.seen, self.seen.new_zeros(more, self.seen.shape[1])))
        self._free = list(range(have + more - 1, have - 1, -1))


class Sampler:
    """Holds the last plan and the tallies."""

    def __init__(self, vocab: int, device: str, ops: Ops) -> None:
        self.ops = ops
        self.vocab = vocab
        self.device = torch.device(device)
        self.tally = Tally(vocab, self.device)
        self._plan: Plan | None = None

    def plan(self, seqs: list[Sequence]) -> Plan:
        """How these sequences, one a row, are sampled now."""
        short = tuple(s.outputs < (s.request.params.min_tokens or 0) for s in seqs)
        last = self._plan
        if last is not None and last.seqs == seqs and last.short == short:
            return last
        self._plan = self._make(seqs, short)
        return self._plan

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self.tally.forget(seq)
        if self._plan is not None and seq in self._plan.seqs:
            self._plan = None

    def sample(self, logits: torch.Tensor, plan: Plan, how: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """logits: [B, V] float32, not changed. how: ``plan.draws()`` there, read where a row draws. Returns ids [B]."""
        ids = self.pick(self._penalised(logits, plan), None if plan.greedy else how)
        if plan.slots is not None and plan.tallied is not None:
            self.tally.count(plan.slots, ids[plan.tallied])
        return ids

    def pick(self, logits: torch.Tensor, how: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
        """Ids [B] int64 of [B, V]: drawn as ``how`` says, None: the argmax."""
        return self.ops.argmax(logits) if how is None else self.ops.sample(logits, **how)

    def told(self, logits: torch.Tensor, plan: Plan, ids: torch.Tensor) -> torch.Tensor | None:
        """The table of log-probabilities for the rows that asked; None where none did."""
        if plan.told_rows is None:
            return None
        return logprobs.table(logits[plan.told_rows], ids[plan.told_rows], plan.top)

    def _penalised(self, logits: torch.Tensor, plan: Plan) -> torch.Tensor:
        if plan.plain:
            return logits
        logits = logits.clone()
        if plan.bias is not None:
            rows, ids, values = plan.bias
            logits.index_put_((rows, ids), values, accumulate=True)
        for row, asked in plan.processed:
            logits_processors.before_penalties(logits[row], plan.seqs[row], asked)
        if plan.tallied is not None and plan.slots is not None:
            part = logits[plan.tallied]
            if plan.repetition is not None:
                part = filters.repetition(part, self.tally.seen[plan.slots], plan.repetition)
            if plan.once is not None and plan.each is not None:
                part = filters.presence(part, self.tally.counts[plan.slots], plan.once, plan.each)
            logits[plan.tallied] = part
        for row, asked in plan.processed:
            logits_processors.after_penalties(logits[row], plan.seqs[row], asked)
        if plan.never is not None:
            logits[plan.never] = float("-inf")
        for row, asked in plan.processed:
            logits_processors.after_lengths(logits[row], plan.seqs[row], asked)
        if plan.guided_rows is not None:
            masks = self._masks(plan)
            logits[plan.guided_rows] = filters.allowed(logits[plan.guided_rows], masks)
        return logits

    def _masks(self, plan: Plan) -> torch.Tensor:
        """What each guided row may say now: [G, ceil(V / 8)] uint8 on the device."""
        guides = (plan.seqs[i].guide for i in plan.guided)
        masks = np.stack([guide.mask() for guide in guides if guide is not None])
        return torch.from_numpy(masks).to(self.device, non_blocking=True)

    def _make(self, seqs: list[Sequence], short: tuple[bool, ...]) -> Plan:
        plan = Plan(list(seqs), short)
        params = [s.request.params for s in seqs]
        plan.greedy = all(p.greedy for p in params)
        self._plan_changes(plan, params)
        if not plan.greedy:
            self._plan_draws(plan, params)
        plan.told = [i for i, p in enumerate(params) if p.logprobs is not None]
        if plan.told:
            plan.told_rows = self._whole(plan.told)
            plan.top = min(max(p.logprobs or 0 for p in params), self.vocab)
        return plan

    def _plan_changes(self, plan: Plan, params: list[SamplingParams]) -> None:
        """Bias, penalties, min_tokens and grammars."""
        biased = [(i, t, v) for i, p in enumerate(params) for t, v in p.logit_bias.items()]
        if biased:
            rows, ids, values = zip(*biased)
            plan.bias = self._whole(rows), self._whole(ids), self._real(values)
        tallied = [i for i, p in enumerate(params) if _tallied(p)]
        if tallied:
            plan.tallied = self._whole(tallied)
            plan.slots = self._whole([self.tally.slot(plan.seqs[i]) for i in tallied])
            if any(_repetition(params[i]) != 1.0 for i in tallied):
                plan.repetition = self._real([_repetition(params[i]) for i in tallied])[:, None]
            if any(params[i].presence_penalty or params[i].frequency_penalty for i in tallied):
                plan.once = self._real([params[i].presence_penalty or 0.0 for i in tallied])[:, None]
                plan.each = self._real([params[i].frequency_penalty or 0.0 for i in tallied])[:, None]
        plan.guided = [i for i, s in enumerate(plan.seqs) if s.guide is not None]
        if plan.guided:
            plan.guided_rows = self._whole(plan.guided)
        # a grammar says itself where an answer may end
        short = [(i, s) for i, s in enumerate(plan.seqs) if plan.short[i] and s.guide is None]
        never = [(i, t) for i, s in short for t in sorted(s.stops) if t < self.vocab]
        if never:
            rows, ids = zip(*never)
            plan.never = self._whole(rows), self._whole(ids)
        found = ((i, logits_processors.processors_of(seq)) for i, seq in enumerate(plan.seqs))
        plan.processed = [(i, asked) for i, asked in found if asked is not None]
        plan.plain = not (biased or tallied or never or plan.guided or plan.processed)

    def _plan_draws(self, plan: Plan, params: list[SamplingParams]) -> None:
        """Temperature, filters and seeds."""
        # a temperature near zero would overflow; the argmax is its limit
        warm = [0.0 if p.greedy else max(1.0 if p.temperature is None else p.temperature, 1e-5) for p in params]
        plan.knobs = {
            "temperature": np.array(warm, dtype=np.float32),
            "top_k": np.array([max(p.top_k or 0, 0) for p in params], dtype=np.int32),
            "top_p": np.array([1.0 if p.top_p is None else p.top_p for p in params], dtype=np.float32),
            "min_p": np.array([p.min_p or 0.0 for p in params], dtype=np.float32),
        }
        plan.seeds = np.array([s.seed for s in plan.seqs], dtype=np.uint64)

    def _whole(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64).to(self.device, non_blocking=True)

    def _real(self, values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32).to(self.device, non_blocking=True)


def _repetition(params: SamplingParams) -> float:
    return 1.0 if params.repetition_penalty is None else params.repetition_penalty


def _tallied(params: SamplingParams) -> bool:
    return bool(_repetition(params) != 1.0 or params.presence_penalty or params.frequency_penalty)
