"""From logits to token ids, for a whole batch on its device; nothing waits for the host.

Order: logit bias, repetition, presence and frequency penalties, min_tokens; then the argmax, or
``ops.sample``. What a checkpoint's generation_config asks for besides (``logits_processors``)
stands where transformers has it. What has to be known about the sequences of a batch is gathered
once in a ``SamplingBatch`` and reused as long as the batch stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import SamplingParams
from modelmill.ops.registry import Ops
from modelmill.runtime import counter_rng, logit_penalties, logits_processors, logprobs
from modelmill.runtime.sequence import Sequence


@dataclass
class SamplingBatch:
    """How the rows of one batch are sampled. Tensors are on the device; ``None`` where no row needs
    them.

    greedy: all rows take the argmax. unprocessed: nothing changes the logits before that.
    sampling_arrays:
    what ``ops.sample`` takes for each row, but for the noise.
    """

    seqs: list[Sequence]
    below_min_tokens: tuple[bool, ...]
    greedy: bool = True
    unprocessed: bool = True
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    banned: tuple[torch.Tensor, torch.Tensor] | None = None
    counted_rows: torch.Tensor | None = None
    count_slots: torch.Tensor | None = None
    repetition_penalty: torch.Tensor | None = None
    presence_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None
    sampling_arrays: dict[str, np.ndarray] = field(default_factory=dict)
    guided_indices: list[int] = field(default_factory=list)
    guided_rows: torch.Tensor | None = None
    processors: list[tuple[int, LogitsProcessors]] = field(default_factory=list)
    logprob_indices: list[int] = field(default_factory=list)
    logprob_rows: torch.Tensor | None = None
    top_logprobs: int = 0
    seeds: np.ndarray | None = None

    def sampling_inputs(self) -> dict[str, np.ndarray] | None:
        """How each row's next token is drawn; None where no row draws."""
        if self.seeds is None:
            return None
        noise = counter_rng.uniform(self.seeds, np.array([s.length for s in self.seqs]))
        return {**self.sampling_arrays, "noise": noise}


class TokenCounts:
    """Which tokens a sequence has seen and how often it wrote them, kept on the device, one slot a
    sequence.

    counts: [slots, V] int32, of the answer. token_mask: [slots, V] bool, of the answer and what
    counts of the prompt."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self.token_mask = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self._slot: dict[Sequence, int] = {}
        self._free: list[int] = []

    def slot_for(self, seq: Sequence) -> int:
        """The sequence's slot, filled from its tokens when it is new."""
        slot = self._slot.get(seq)
        if slot is not None:
            return slot
        if not self._free:
            self._grow()
        slot = self._slot[seq] = self._free.pop()
        self.counts[slot] = 0
        self.token_mask[slot] = False
        history = torch.tensor(
            logits_processors.history_ids(seq), dtype=torch.int64, device=self.counts.device
        )
        self.token_mask[slot, history] = True
        written = torch.tensor(
            seq.tokens[seq.prompt_len :], dtype=torch.int64, device=self.counts.device
        )
        if len(written):
            self.counts[slot] += torch.bincount(written, minlength=self.counts.shape[1]).to(
                torch.int32
            )
        return slot

    def free(self, seq: Sequence) -> None:
        """The sequence has ended."""
        slot = self._slot.pop(seq, None)
        if slot is not None:
            self._free.append(slot)

    def add(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """One more token of each sequence."""
        self.token_mask[slots, ids] = True
        self.counts[slots, ids] += 1

    def _grow(self) -> None:
        have = self.counts.shape[0]
        more = max(have, 4)
        self.counts = torch.cat((self.counts, self.counts.new_zeros(more, self.counts.shape[1])))
        self.token_mask = torch.cat(
            (self.token_mask, self.token_mask.new_zeros(more, self.token_mask.shape[1]))
        )
        self._free = list(range(have + more - 1, have - 1, -1))


class Sampler:
    """Holds the last batch and the token counts."""

    def __init__(self, vocab: int, device: str, ops: Ops) -> None:
        self.ops = ops
        self.vocab = vocab
        self.device = torch.device(device)
        self.token_counts = TokenCounts(vocab, self.device)
        self._batch: SamplingBatch | None = None

    def prepare(self, seqs: list[Sequence]) -> SamplingBatch:
        """How these sequences, one a row, are sampled now."""
        short = tuple(s.num_outputs < (s.request.params.min_tokens or 0) for s in seqs)
        last = self._batch
        if last is not None and last.seqs == seqs and last.below_min_tokens == short:
            return last
        self._batch = self._make_batch(seqs, short)
        return self._batch

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self.token_counts.free(seq)
        if self._batch is not None and seq in self._batch.seqs:
            self._batch = None

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """logits: [B, V] float32, not changed. inputs: ``batch.sampling_inputs()`` there, read
        where a row draws. Returns ids [B]."""
        ids = self.select_ids(self._process_logits(logits, batch), None if batch.greedy else inputs)
        if batch.count_slots is not None and batch.counted_rows is not None:
            self.token_counts.add(batch.count_slots, ids[batch.counted_rows])
        return ids

    def select_ids(
        self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor] | None
    ) -> torch.Tensor:
        """Ids [B] int64 of [B, V]: drawn as ``inputs`` says, None: the argmax."""
        return self.ops.argmax(logits) if inputs is None else self.ops.sample(logits, **inputs)

    def logprob_table(
        self, logits: torch.Tensor, batch: SamplingBatch, ids: torch.Tensor
    ) -> torch.Tensor | None:
        """The table of log-probabilities for the rows that asked; None where none did."""
        if batch.logprob_rows is None:
            return None
        return logprobs.logprob_table(
            logits[batch.logprob_rows], ids[batch.logprob_rows], batch.top_logprobs
        )

    def _process_logits(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if batch.unprocessed:
            return logits
        logits = logits.clone()
        if batch.bias is not None:
            rows, ids, values = batch.bias
            logits.index_put_((rows, ids), values, accumulate=True)
        for row, asked in batch.processors:
            logits_processors.apply_before_penalties(logits[row], batch.seqs[row], asked)
        if batch.counted_rows is not None and batch.count_slots is not None:
            part = logits[batch.counted_rows]
            if batch.repetition_penalty is not None:
                part = logit_penalties.apply_repetition_penalty(
                    part, self.token_counts.token_mask[batch.count_slots], batch.repetition_penalty
                )
            if batch.presence_penalty is not None and batch.frequency_penalty is not None:
                part = logit_penalties.apply_presence_penalties(
                    part,
                    self.token_counts.counts[batch.count_slots],
                    batch.presence_penalty,
                    batch.frequency_penalty,
                )
            logits[batch.counted_rows] = part
        for row, asked in batch.processors:
            logits_processors.apply_after_penalties(logits[row], batch.seqs[row], asked)
        if batch.banned is not None:
            logits[batch.banned] = float("-inf")
        for row, asked in batch.processors:
            logits_processors.apply_after_min_tokens(logits[row], batch.seqs[row], asked)
        if batch.guided_rows is not None:
            masks = self._grammar_masks(batch)
            logits[batch.guided_rows] = logit_penalties.apply_token_mask(
                logits[batch.guided_rows], masks
            )
        return logits

    def _grammar_masks(self, batch: SamplingBatch) -> torch.Tensor:
        """What each guided row may say now: [G, ceil(V / 8)] uint8 on the device."""
        guides = (batch.seqs[i].guide for i in batch.guided_indices)
        masks = np.stack([guide.mask() for guide in guides if guide is not None])
        return torch.from_numpy(masks).to(self.device, non_blocking=True)

    def _make_batch(
        self, seqs: list[Sequence], below_min_tokens: tuple[bool, ...]
    ) -> SamplingBatch:
        batch = SamplingBatch(list(seqs), below_min_tokens)
        params = [s.request.params for s in seqs]
        batch.greedy = all(p.greedy for p in params)
        self._prepare_processing(batch, params)
        if not batch.greedy:
            self._prepare_sampling(batch, params)
        batch.logprob_indices = [i for i, p in enumerate(params) if p.logprobs is not None]
        if batch.logprob_indices:
            batch.logprob_rows = self._int_tensor(batch.logprob_indices)
            batch.top_logprobs = min(max(p.logprobs or 0 for p in params), self.vocab)
        return batch

    def _prepare_processing(self, batch: SamplingBatch, params: list[SamplingParams]) -> None:
        """Bias, penalties, min_tokens and grammars."""
        biased = [(i, t, v) for i, p in enumerate(params) for t, v in p.logit_bias.items()]
        if biased:
            rows, ids, values = zip(*biased)
            batch.bias = self._int_tensor(rows), self._int_tensor(ids), self._float_tensor(values)
        counted = [i for i, p in enumerate(params) if _needs_counts(p)]
        if counted:
            batch.counted_rows = self._int_tensor(counted)
            batch.count_slots = self._int_tensor(
                [self.token_counts.slot_for(batch.seqs[i]) for i in counted]
            )
            if any(_repetition_penalty(params[i]) != 1.0 for i in counted):
                batch.repetition_penalty = self._float_tensor(
                    [_repetition_penalty(params[i]) for i in counted]
                )[:, None]
            if any(params[i].presence_penalty or params[i].frequency_penalty for i in counted):
                batch.presence_penalty = self._float_tensor(
                    [params[i].presence_penalty or 0.0 for i in counted]
                )[:, None]
                batch.frequency_penalty = self._float_tensor(
                    [params[i].frequency_penalty or 0.0 for i in counted]
                )[:, None]
        batch.guided_indices = [i for i, s in enumerate(batch.seqs) if s.guide is not None]
        if batch.guided_indices:
            batch.guided_rows = self._int_tensor(batch.guided_indices)
        # a grammar says itself where an answer may end
        short = [
            (i, s)
            for i, s in enumerate(batch.seqs)
            if batch.below_min_tokens[i] and s.guide is None
        ]
        never = [(i, t) for i, s in short for t in sorted(s.stop_ids) if t < self.vocab]
        if never:
            rows, ids = zip(*never)
            batch.banned = self._int_tensor(rows), self._int_tensor(ids)
        found = ((i, logits_processors.active_processors(seq)) for i, seq in enumerate(batch.seqs))
        batch.processors = [(i, asked) for i, asked in found if asked is not None]
        batch.unprocessed = not (
            biased or counted or never or batch.guided_indices or batch.processors
        )

    def _prepare_sampling(self, batch: SamplingBatch, params: list[SamplingParams]) -> None:
        """Temperature, filters and seeds."""
        # a temperature near zero would overflow; the argmax is its limit
        warm = [
            0.0 if p.greedy else max(1.0 if p.temperature is None else p.temperature, 1e-5)
            for p in params
        ]
        batch.sampling_arrays = {
            "temperature": np.array(warm, dtype=np.float32),
            "top_k": np.array([max(p.top_k or 0, 0) for p in params], dtype=np.int32),
            "top_p": np.array(
                [1.0 if p.top_p is None else p.top_p for p in params], dtype=np.float32
            ),
            "min_p": np.array([p.min_p or 0.0 for p in params], dtype=np.float32),
        }
        batch.seeds = np.array([s.seed for s in batch.seqs], dtype=np.uint64)

    def _int_tensor(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64).to(self.device, non_blocking=True)

    def _float_tensor(self, values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32).to(self.device, non_blocking=True)


def _repetition_penalty(params: SamplingParams) -> float:
    return 1.0 if params.repetition_penalty is None else params.repetition_penalty


def _needs_counts(params: SamplingParams) -> bool:
    return bool(
        _repetition_penalty(params) != 1.0 or params.presence_penalty or params.frequency_penalty
    )
