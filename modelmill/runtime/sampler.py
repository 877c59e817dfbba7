"""Samples token ids from logits, for a whole batch on its device, without waiting for the host.

Order: logit bias, repetition, presence and frequency penalties, min_tokens; then the argmax, or
``ops.sample``. Logits processors of the checkpoint's generation_config (``logits_processors``) run
between these in the order of transformers. A ``SamplingBatch`` holds the parameters of all rows; it
is reused as long as the batch stays the same.
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
    """Sampling parameters of the rows of one batch.

    Tensors are on the device; they are None if no row needs them. The ``*_rows`` and ``*_indices``
    list the rows that a feature applies to.

    Attributes:
        seqs: The sequence of each row.
        below_min_tokens: Per row: whether stop ids are still banned.
        greedy: All rows take the argmax.
        unprocessed: Nothing changes the logits before sampling.
        bias: (rows, ids, values).
        banned: (rows, ids) set to −inf (stop ids before min_tokens).
        counted_rows: Rows with penalties.
        count_slots: Their slots in TokenCounts.
        sampling_arrays: Inputs of ``ops.sample`` for each row, except the noise.
        seeds: [B] uint64.
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
        """Inputs of ``ops.sample`` for each row; None if all rows are greedy."""
        if self.seeds is None:
            return None
        # noise depends on (seed, length) only: the same in any batch and after a preemption
        noise = counter_rng.uniform(self.seeds, np.array([s.length for s in self.seqs]))
        return {**self.sampling_arrays, "noise": noise}


class TokenCounts:
    """Token counts for penalties, on the device, one slot per sequence.

    Attributes:
        counts: [slots, V] int32: occurrences in the output.
        token_mask: [slots, V] bool: whether a token occurs in the output, or in the prompt if its
            tokens are penalized.
    """

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
        outputs = torch.tensor(
            seq.tokens[seq.prompt_len :], dtype=torch.int64, device=self.counts.device
        )
        if len(outputs):
            self.counts[slot] += torch.bincount(outputs, minlength=self.counts.shape[1]).to(
                torch.int32
            )
        return slot

    def free(self, seq: Sequence) -> None:
        """Free the slot of an ended sequence."""
        slot = self._slot.pop(seq, None)
        if slot is not None:
            self._free.append(slot)

    def add(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """Count one more token in each slot."""
        self.token_mask[slots, ids] = True
        self.counts[slots, ids] += 1

    def _grow(self) -> None:
        size = self.counts.shape[0]
        added = max(size, 4)
        self.counts = torch.cat((self.counts, self.counts.new_zeros(added, self.counts.shape[1])))
        self.token_mask = torch.cat(
            (self.token_mask, self.token_mask.new_zeros(added, self.token_mask.shape[1]))
        )
        self._free = list(range(size + added - 1, size - 1, -1))


class Sampler:
    """Samples batches; caches the last SamplingBatch and owns the token counts."""

    def __init__(self, vocab: int, device: str, ops: Ops) -> None:
        self.ops = ops
        self.vocab = vocab
        self.device = torch.device(device)
        self.token_counts = TokenCounts(vocab, self.device)
        self._batch: SamplingBatch | None = None

    def prepare(self, seqs: list[Sequence]) -> SamplingBatch:
        """The SamplingBatch of these sequences, one per row; the last one if nothing changed."""
        below_min_tokens = tuple(s.num_outputs < (s.request.params.min_tokens or 0) for s in seqs)
        last = self._batch
        if last is not None and last.seqs == seqs and last.below_min_tokens == below_min_tokens:
            return last
        self._batch = self._make_batch(seqs, below_min_tokens)
        return self._batch

    def forget(self, seq: Sequence) -> None:
        """Drop the state of an ended sequence."""
        self.token_counts.free(seq)
        if self._batch is not None and seq in self._batch.seqs:
            self._batch = None

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Process the logits and sample.

        Args:
            logits: [B, V] float32, not modified.
            batch: From ``prepare``.
            inputs: ``batch.sampling_inputs()`` on the device; not read if all rows are greedy.

        Returns:
            Ids [B] int64.
        """
        ids = self.select_ids(self._process_logits(logits, batch), None if batch.greedy else inputs)
        if batch.count_slots is not None and batch.counted_rows is not None:
            self.token_counts.add(batch.count_slots, ids[batch.counted_rows])
        return ids

    def select_ids(
        self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor] | None
    ) -> torch.Tensor:
        """Ids [B] int64 from logits [B, V]: sampled with ``inputs``, or the argmax if None."""
        return self.ops.argmax(logits) if inputs is None else self.ops.sample(logits, **inputs)

    def logprob_table(
        self, logits: torch.Tensor, batch: SamplingBatch, ids: torch.Tensor
    ) -> torch.Tensor | None:
        """The log-probability table of the rows that request it; None if none does."""
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
        for row, settings in batch.processors:
            logits_processors.apply_before_penalties(logits[row], batch.seqs[row], settings)
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
        for row, settings in batch.processors:
            logits_processors.apply_after_penalties(logits[row], batch.seqs[row], settings)
        if batch.banned is not None:
            logits[batch.banned] = float("-inf")
        for row, settings in batch.processors:
            logits_processors.apply_after_min_tokens(logits[row], batch.seqs[row], settings)
        if batch.guided_rows is not None:
            masks = self._grammar_masks(batch)
            logits[batch.guided_rows] = logit_penalties.apply_token_mask(
                logits[batch.guided_rows], masks
            )
        return logits

    def _grammar_masks(self, batch: SamplingBatch) -> torch.Tensor:
        """Allowed tokens of each guided row: bit mask [G, ceil(V / 8)] uint8 on the device."""
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
        """Fill in what changes logits: bias, penalties, min_tokens, grammars and processors."""
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
        # min_tokens does not apply to guided rows: the grammar decides where the output may end
        too_short = [
            (i, s)
            for i, s in enumerate(batch.seqs)
            if batch.below_min_tokens[i] and s.guide is None
        ]
        banned = [(i, t) for i, s in too_short for t in sorted(s.stop_ids) if t < self.vocab]
        if banned:
            rows, ids = zip(*banned)
            batch.banned = self._int_tensor(rows), self._int_tensor(ids)
        active = ((i, logits_processors.active_processors(seq)) for i, seq in enumerate(batch.seqs))
        batch.processors = [(i, settings) for i, settings in active if settings is not None]
        batch.unprocessed = not (
            biased or counted or banned or batch.guided_indices or batch.processors
        )

    def _prepare_sampling(self, batch: SamplingBatch, params: list[SamplingParams]) -> None:
        """Fill in temperature, top-k, top-p, min-p and seeds."""
        # 0 means argmax to ops.sample; a temperature near zero would overflow
        temperatures = [
            0.0 if p.greedy else max(1.0 if p.temperature is None else p.temperature, 1e-5)
            for p in params
        ]
        batch.sampling_arrays = {
            "temperature": np.array(temperatures, dtype=np.float32),
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
