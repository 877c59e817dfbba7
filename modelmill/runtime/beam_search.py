"""Beam search with the scores and stop conditions of transformers.

Each step takes the best ``num_candidates`` continuations of all beams. Those that end become
results if they are among the best ``width``; the best others are the next beams. A result's score
is its summed log-probability divided by its length to the power of ``length_penalty``. The search
ends when no beam can beat the worst result any more, with ``early_stopping`` as soon as there are
``width`` results, or when no beam is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import FinishReason
from modelmill.runtime import logits_processors
from modelmill.runtime.sequence import Sequence

_RowProcessor = Callable[[torch.Tensor, Sequence, LogitsProcessors], None]


@dataclass(frozen=True)
class BeamResult:
    """A finished beam; ``tokens``: the output ids without the stop id."""

    score: float
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_id: int | None


@dataclass(frozen=True)
class BeamExtension:
    """A beam of the next step: the index of the beam it extends, and the token."""

    parent: int
    token: int


class BeamSearch:
    """State of one search: ``seqs`` are its beams, best first, ``scores`` their sums."""

    def __init__(self, leader: Sequence) -> None:
        params = leader.request.params
        self.width = params.num_beams
        self.num_candidates = max(2, 1 + len(leader.stop_ids)) * self.width
        self.length_penalty = params.length_penalty
        self.early_stopping = params.early_stopping
        self.seqs = [leader]
        self.scores = [0.0]
        self.results: list[BeamResult] = []
        self.num_forks = 0

    def advance(self, logits: torch.Tensor) -> list[BeamExtension]:
        """Advance by one token.

        Args:
            logits: [beams, V] float32, in the order of ``seqs``.

        Returns:
            The next beams, best first; empty if the search has ended.
        """
        scores = torch.tensor(self.scores, dtype=torch.float32, device=logits.device)
        total = self._process_logprobs(logits.log_softmax(-1)) + scores[:, None]
        vocab = total.shape[1]
        values, indices = total.view(-1).topk(min(self.num_candidates, total.numel()))
        flat = list(zip(values.tolist(), indices.tolist()))
        candidates = [(score, index // vocab, index % vocab) for score, index in flat]
        first = self.seqs[0]
        length = len(first.tokens) + 1 - first.prompt_len
        at_end = len(first.tokens) + 1 >= first.max_length
        ends = [at_end or token in first.stop_ids for _, _, token in candidates]
        alive = [c for c, end in zip(candidates, ends) if not end][: self.width]
        for (score, parent, token), end in list(zip(candidates, ends))[: self.width]:
            if end:
                self._add_finished_beam(score, length, parent, token)
        self.results = sorted(self.results, key=lambda r: -r.score)[: self.width]
        if not alive or self._is_done(alive[0][0], length):
            return []
        self.scores = [score for score, _, _ in alive]
        return [BeamExtension(parent, token) for _, parent, token in alive]

    def new_fork_index(self) -> int:
        """The index of one more sequence that forks from a beam."""
        self.num_forks += 1
        return self.num_forks

    def replace_beams(self, seqs: list[Sequence]) -> None:
        """Store the beams of the next step, in the order of ``scores``."""
        self.seqs = seqs

    def finish_early(self) -> None:
        """End now: the current beams become results with finish reason LENGTH."""
        for seq, score in zip(self.seqs, self.scores):
            output = tuple(seq.tokens[seq.prompt_len :])
            self.results.append(
                BeamResult(
                    self._normalized_score(score, max(len(output), 1)),
                    output,
                    FinishReason.LENGTH,
                    None,
                )
            )
        self.results = sorted(self.results, key=lambda r: -r.score)[: self.width]

    def _add_finished_beam(self, score: float, length: int, parent: int, token: int) -> None:
        seq = self.seqs[parent]
        output = tuple(seq.tokens[seq.prompt_len :])
        if token in seq.stop_ids:
            self.results.append(
                BeamResult(self._normalized_score(score, length), output, FinishReason.STOP, token)
            )
        else:
            self.results.append(
                BeamResult(
                    self._normalized_score(score, length),
                    (*output, token),
                    FinishReason.LENGTH,
                    None,
                )
            )

    def _normalized_score(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(float(length) ** self.length_penalty))

    def _is_done(self, best: float, length: int) -> bool:
        """Whether a beam with sum ``best`` at ``length`` cannot improve the results."""
        if len(self.results) < self.width:
            return False
        return (
            self.early_stopping is True
            or self._normalized_score(best, length) <= self.results[-1].score
        )

    def _apply_processor_per_beam(
        self, processor: _RowProcessor, logs: torch.Tensor, processors: LogitsProcessors
    ) -> None:
        for row, seq in zip(logs, self.seqs, strict=True):
            processor(row, seq, processors)

    def _process_logprobs(self, logs: torch.Tensor) -> torch.Tensor:
        """Apply bias, penalties, min_tokens and processors to the beams' log-probabilities."""
        params, first = self.seqs[0].request.params, self.seqs[0]
        for token, bias in params.logit_bias.items():
            logs[:, token] += bias
        settings = params.logits_processors
        if settings:
            self._apply_processor_per_beam(logits_processors.apply_before_penalties, logs, settings)
        repeated = params.repetition_penalty not in (None, 1.0)
        if repeated or params.presence_penalty or params.frequency_penalty:
            counts = torch.zeros_like(logs)
            token_mask = torch.zeros_like(logs, dtype=torch.bool)
            for i, seq in enumerate(self.seqs):
                token_mask[
                    i,
                    torch.tensor(
                        logits_processors.processor_visible_token_ids(seq),
                        dtype=torch.int64,
                        device=logs.device,
                    ),
                ] = True
                output = torch.tensor(
                    seq.tokens[seq.prompt_len :], dtype=torch.int64, device=logs.device
                )
                counts[i] = torch.bincount(output, minlength=logs.shape[1])
            logs = logits_processors.apply_repetition_penalty(
                logs, token_mask, logs.new_tensor(params.repetition_penalty or 1.0)
            )
            presence, frequency = (
                logs.new_tensor(params.presence_penalty or 0.0),
                logs.new_tensor(params.frequency_penalty or 0.0),
            )
            logs = logits_processors.apply_additive_penalties(logs, counts, presence, frequency)
        if settings:
            self._apply_processor_per_beam(logits_processors.apply_after_penalties, logs, settings)
        if first.num_outputs < (params.min_tokens or 0) and first.stop_ids:
            logs[:, sorted(t for t in first.stop_ids if t < logs.shape[1])] = float("-inf")
        if settings:
            self._apply_processor_per_beam(
                logits_processors.apply_post_min_length_processors, logs, settings
            )
        return logs.log_softmax(-1) if settings and settings.renormalize_logits else logs
