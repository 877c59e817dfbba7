"""Samples token ids from logits, for a whole batch on its device, without waiting for the host.

Order: logit bias, repetition, presence and frequency penalties, min_tokens; then the argmax, or
``ops.sample``. Logits processors of the checkpoint's generation_config (``logits_processors``) run
between these in the order of transformers. A ``SamplingBatch`` holds the parameters of all rows; it
is reused as long as the batch stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import Logprob, SamplingParams
from modelmill.ops.bound_op import CachedOpBinding
from modelmill.ops.registry import Ops
from modelmill.ops.sample import SampleInputs
from modelmill.runtime import logits_processors
from modelmill.runtime.sequence import Sequence

SMALLEST_TOP_P = np.finfo(np.float32).tiny
"""What the kernels get for a smaller share, which float32 rounds to 0: it keeps one token."""


@dataclass(frozen=True)
class PenaltyRows:
    """The rows with penalties.

    Attributes:
        rows: [P] int64.
        slots: Their slots in TokenCounts, [P] int64.
        repetition: [P, 1]; None if no row has one.
        presence: [P, 1]; None if no row has one and none has ``frequency``.
        frequency: [P, 1]; None together with ``presence``.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    repetition: torch.Tensor | None
    presence: torch.Tensor | None
    frequency: torch.Tensor | None


@dataclass(frozen=True)
class LogitChanges:
    """What changes the logits of a batch before sampling; None or empty if no row needs it.

    Attributes:
        bias: (rows, ids, values).
        penalties: Repetition, presence and frequency penalties.
        banned: (rows, ids) set to −inf (stop ids before min_tokens).
        guided_indices: Rows with a grammar.
        guided_rows: The same on the device.
        processors: (row, logits processors of its checkpoint).
    """

    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    penalties: PenaltyRows | None
    banned: tuple[torch.Tensor, torch.Tensor] | None
    guided_indices: list[int]
    guided_rows: torch.Tensor | None
    processors: list[tuple[int, LogitsProcessors]]

    def __bool__(self) -> bool:
        return bool(
            self.bias is not None
            or self.penalties is not None
            or self.banned is not None
            or self.guided_indices
            or self.processors
        )


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of the rows of one batch.

    Tensors are on the device; they are None if no row needs them. The ``*_rows`` and ``*_indices``
    list the rows that a feature applies to.

    Attributes:
        seqs: The sequence of each row.
        below_min_tokens: Per row: whether stop ids are still banned.
        greedy: All rows take the argmax.
        changes: What changes the logits before sampling.
        sampling_arrays: Inputs of ``ops.sample`` for each row, except the noise.
        seeds: [B] uint64; None if all rows are greedy.
        logprob_indices: Rows that request log-probabilities.
        logprob_rows: The same on the device.
        top_logprobs: Most log-probabilities that a row requests.
    """

    seqs: list[Sequence]
    below_min_tokens: tuple[bool, ...]
    greedy: bool
    changes: LogitChanges
    sampling_arrays: dict[str, np.ndarray]
    seeds: np.ndarray | None
    logprob_indices: list[int]
    logprob_rows: torch.Tensor | None
    top_logprobs: int

    def sampling_inputs(self) -> dict[str, np.ndarray] | None:
        """Inputs of ``ops.sample`` for each row; None if all rows are greedy."""
        if self.seeds is None:
            return None
        # noise depends on (seed, length) only: the same in any batch and after a preemption
        noise = uniform_random_numbers(self.seeds, np.array([s.length for s in self.seqs]))
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

    def get_or_fill_slot(self, seq: Sequence) -> int:
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
            logits_processors.processor_visible_token_ids(seq),
            dtype=torch.int64,
            device=self.counts.device,
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

    def free_slot(self, seq: Sequence) -> None:
        """Free the slot of an ended sequence."""
        slot = self._slot.pop(seq, None)
        if slot is not None:
            self._free.append(slot)

    def count_tokens(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
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
        self._argmax = CachedOpBinding()
        self.vocab = vocab
        self.device = torch.device(device)
        self.token_counts = TokenCounts(vocab, self.device)
        self._batch: SamplingBatch | None = None

    def prepare_batch(self, seqs: list[Sequence]) -> SamplingBatch:
        """The SamplingBatch of these sequences, one per row; the last one if nothing changed."""
        below_min_tokens = tuple(s.num_outputs < (s.request.params.min_tokens or 0) for s in seqs)
        last = self._batch
        if last is not None and last.seqs == seqs and last.below_min_tokens == below_min_tokens:
            return last
        self._batch = self._make_batch(seqs, below_min_tokens)
        return self._batch

    def set_ops(self, ops: Ops) -> None:
        """Use other ops from now on."""
        self.ops = ops

    def drop_sequence_state(self, seq: Sequence) -> None:
        """Drop the state of an ended sequence."""
        self.token_counts.free_slot(seq)
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
        penalties = batch.changes.penalties
        if penalties is not None:
            self.token_counts.count_tokens(penalties.slots, ids[penalties.rows])
        return ids

    def select_ids(
        self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor] | None
    ) -> torch.Tensor:
        """Ids [B] int64 from logits [B, V]: sampled with ``inputs``, or the argmax if None."""
        if inputs is None:
            return self._argmax(self.ops.argmax, logits)
        return self.ops.sample(SampleInputs(logits, **inputs))

    def logprob_table(
        self, logits: torch.Tensor, batch: SamplingBatch, ids: torch.Tensor
    ) -> torch.Tensor | None:
        """The log-probability table of the rows that request it; None if none does."""
        if batch.logprob_rows is None:
            return None
        return logprob_table(
            logits[batch.logprob_rows], ids[batch.logprob_rows], batch.top_logprobs
        )

    def _process_logits(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        changes = batch.changes
        if not changes:
            return logits
        logits = logits.clone()
        if changes.bias is not None:
            rows, ids, values = changes.bias
            logits.index_put_((rows, ids), values, accumulate=True)
        for row, settings in changes.processors:
            logits_processors.apply_before_penalties(logits[row], batch.seqs[row], settings)
        if changes.penalties is not None:
            rows = changes.penalties.rows
            logits[rows] = self._apply_penalties(logits[rows], changes.penalties)
        for row, settings in changes.processors:
            logits_processors.apply_after_penalties(logits[row], batch.seqs[row], settings)
        if changes.banned is not None:
            logits[changes.banned] = float("-inf")
        for row, settings in changes.processors:
            logits_processors.apply_post_min_length_processors(
                logits[row], batch.seqs[row], settings
            )
        if changes.guided_rows is not None:
            masks = self._grammar_masks(batch)
            logits[changes.guided_rows] = logits_processors.apply_token_mask(
                logits[changes.guided_rows], masks
            )
        return logits

    def _apply_penalties(self, logits: torch.Tensor, penalties: PenaltyRows) -> torch.Tensor:
        counts = self.token_counts
        if penalties.repetition is not None:
            logits = logits_processors.apply_repetition_penalty(
                logits, counts.token_mask[penalties.slots], penalties.repetition
            )
        if penalties.presence is not None and penalties.frequency is not None:
            logits = logits_processors.apply_additive_penalties(
                logits, counts.counts[penalties.slots], penalties.presence, penalties.frequency
            )
        return logits

    def _grammar_masks(self, batch: SamplingBatch) -> torch.Tensor:
        """Allowed tokens of each guided row: bit mask [G, ceil(V / 8)] uint8 on the device."""
        guides = (batch.seqs[i].guide for i in batch.changes.guided_indices)
        masks = np.stack([guide.mask() for guide in guides if guide is not None])
        return torch.from_numpy(masks).to(self.device, non_blocking=True)

    def _make_batch(
        self, seqs: list[Sequence], below_min_tokens: tuple[bool, ...]
    ) -> SamplingBatch:
        params = [s.request.params for s in seqs]
        greedy = all(p.greedy for p in params)
        indices = [i for i, p in enumerate(params) if p.logprobs is not None]
        top = min(max(p.logprobs or 0 for p in params), self.vocab) if indices else 0
        return SamplingBatch(
            list(seqs),
            below_min_tokens,
            greedy,
            self._logit_changes(seqs, below_min_tokens),
            {} if greedy else _sampling_arrays(params),
            None if greedy else np.array([s.seed for s in seqs], dtype=np.uint64),
            indices,
            self._int_tensor(indices) if indices else None,
            top,
        )

    def _logit_changes(
        self, seqs: list[Sequence], below_min_tokens: tuple[bool, ...]
    ) -> LogitChanges:
        params = [s.request.params for s in seqs]
        biased = [(i, t, v) for i, p in enumerate(params) for t, v in p.logit_bias.items()]
        bias = None
        if biased:
            rows, ids, values = zip(*biased)
            bias = self._int_tensor(rows), self._int_tensor(ids), self._float_tensor(values)
        penalties = self._penalty_rows(seqs)
        guided = [i for i, s in enumerate(seqs) if s.guide is not None]
        guided_rows = self._int_tensor(guided) if guided else None
        active = ((i, seq.logits_processors) for i, seq in enumerate(seqs))
        processors = [(i, settings) for i, settings in active if settings is not None]
        banned = self._suppressed_stop_ids(seqs, below_min_tokens)
        return LogitChanges(bias, penalties, banned, guided, guided_rows, processors)

    def _penalty_rows(self, seqs: list[Sequence]) -> PenaltyRows | None:
        counted = [i for i, s in enumerate(seqs) if _needs_token_counts(s.request.params)]
        if not counted:
            return None
        params = [seqs[i].request.params for i in counted]
        repetition = presence = frequency = None
        rows = self._int_tensor(counted)
        slots = self._int_tensor([self.token_counts.get_or_fill_slot(seqs[i]) for i in counted])
        if any(_effective_repetition_penalty(p) != 1.0 for p in params):
            repetition = self._float_tensor([_effective_repetition_penalty(p) for p in params])[
                :, None
            ]
        if any(p.presence_penalty or p.frequency_penalty for p in params):
            presence = self._float_tensor([p.presence_penalty or 0.0 for p in params])[:, None]
            frequency = self._float_tensor([p.frequency_penalty or 0.0 for p in params])[:, None]
        return PenaltyRows(rows, slots, repetition, presence, frequency)

    def _suppressed_stop_ids(
        self, seqs: list[Sequence], below_min_tokens: tuple[bool, ...]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(rows, ids) of the stop ids that must not be sampled yet; None if there are none."""
        too_short = [
            (i, s) for i, s in enumerate(seqs) if below_min_tokens[i] and _may_suppress_stops(s)
        ]
        banned = [(i, t) for i, s in too_short for t in sorted(s.stop_ids) if t < self.vocab]
        if not banned:
            return None
        rows, ids = zip(*banned)
        return self._int_tensor(rows), self._int_tensor(ids)

    def _int_tensor(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64).to(self.device, non_blocking=True)

    def _float_tensor(self, values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32).to(self.device, non_blocking=True)


def _may_suppress_stops(seq: Sequence) -> bool:
    """Whether min_tokens applies: a grammar itself decides where the output may end."""
    if seq.request.grammar is None:
        return True
    allowed = seq.request.grammar.allowed_token_ids()
    return allowed is not None and not seq.stop_ids.issuperset(allowed)


def _sampling_arrays(params: list[SamplingParams]) -> dict[str, np.ndarray]:
    """Temperature, top-k, top-p and min-p of each row."""
    # 0 means argmax to ops.sample; a temperature near zero would overflow
    temperatures = [
        0.0 if p.greedy else max(1.0 if p.temperature is None else p.temperature, 1e-5)
        for p in params
    ]
    top_p = [1.0 if p.top_p is None else p.top_p for p in params]
    return {
        "temperature": np.array(temperatures, dtype=np.float32),
        "top_k": np.array([max(p.top_k or 0, 0) for p in params], dtype=np.int32),
        "top_p": np.maximum(np.array(top_p, dtype=np.float32), SMALLEST_TOP_P),
        "min_p": np.array([p.min_p or 0.0 for p in params], dtype=np.float32),
    }


def _effective_repetition_penalty(params: SamplingParams) -> float:
    return 1.0 if params.repetition_penalty is None else params.repetition_penalty


def _needs_token_counts(params: SamplingParams) -> bool:
    return bool(
        _effective_repetition_penalty(params) != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def logprob_table(logits: torch.Tensor, chosen: torch.Tensor, top: int) -> torch.Tensor:
    """Log-probabilities of the chosen and the most likely tokens, as one table for one copy.

    Args:
        logits: [R, V] float32.
        chosen: Ids [R] int64.
        top: Number of most likely tokens.

    Returns:
        [R, 3 + 2·top] float64 (exact for ids): the chosen token's id, log-probability and rank,
        then the ``top`` most likely ids, then their log-probabilities.
    """
    logs = logits.log_softmax(-1)
    chosen_logs = logs.gather(1, chosen[:, None])
    rank = (logs > chosen_logs).sum(-1, keepdim=True) + 1
    columns = [chosen[:, None].double(), chosen_logs.double(), rank.double()]
    if top:
        values, ids = logs.topk(top, dim=-1)
        columns += [ids.double(), values.double()]
    return torch.cat(columns, 1)


def parse_logprob_row(row: list[float], top: int) -> dict[int, Logprob]:
    """Read one row of a ``logprob_table``, whose own ``top`` may be larger.

    Returns:
        By id, the ``top`` most likely tokens, most likely first, and the chosen one.
    """
    width = (len(row) - 3) // 2
    by_id = {int(row[3 + i]): Logprob(row[3 + width + i], i + 1) for i in range(min(top, width))}
    by_id.setdefault(int(row[0]), Logprob(row[1], int(row[2])))
    return by_id


_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_UINT64_MASK = (1 << 64) - 1


def splitmix64(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which every input bit flips about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


def uniform_random_numbers(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1): [B] float64 with 53 random bits.

    Args:
        seeds: [B] uint64.
        positions: [B] integers.
    """
    counter = positions.astype(np.uint64) * _GOLDEN_GAMMA
    return (splitmix64(splitmix64(seeds + _GOLDEN_GAMMA) ^ counter) >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of stream ``index`` of ``seed``; that of stream 0 differs from ``seed``."""
    state = np.array([seed & _UINT64_MASK], dtype=np.uint64)
    step = np.array([(index + 1) & _UINT64_MASK], dtype=np.uint64)
    return int(splitmix64(splitmix64(state + _GOLDEN_GAMMA) + step * _GOLDEN_GAMMA)[0])
