"""Beam search, scored and stopped as transformers does it.

Each step the best ``num_candidates`` continuations of all beams are taken; those that end may
become results if they are among the best ``width``, the best others live on. A result's score is
its summed log-probability over its length to the power of ``length_penalty``. The search ends when
no living beam could beat the worst result any more, with ``early_stopping`` as soon as there are
``width`` results, or when nothing can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import FinishReason
from modelmill.runtime import logit_penalties, logits_processors
from modelmill.runtime.sequence import Sequence

_RowProcessor = Callable[[torch.Tensor, Sequence, LogitsProcessors], None]


@dataclass(frozen=True)
class BeamResult:
    """A finished beam: the answer's ids without the one that ended it, its score, and how it
    ended.
    """

    score: float
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_id: int | None


@dataclass(frozen=True)
class BeamExtension:
    """A beam of the next step: which beam it continues, with which token."""

    parent: int
    token: int


class BeamSearch:
    """The state of one search.

    ``seqs`` are its living beams, best first, their scores in ``scores``.
    """

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
        """One step: logits [beams, V] float32, in the order of ``seqs``.

        Empty where the search has ended.
        """
        scores = torch.tensor(self.scores, dtype=torch.float32, device=logits.device)
        total = self._process_logprobs(logits.log_softmax(-1)) + scores[:, None]
        vocab = total.shape[1]
        values, places = total.view(-1).topk(min(self.num_candidates, total.numel()))
        flat = list(zip(values.tolist(), places.tolist()))
        candidates = [(score, place // vocab, place % vocab) for score, place in flat]
        first = self.seqs[0]
        length = len(first.tokens) + 1 - first.prompt_len
        at_end = len(first.tokens) + 1 >= first.max_length
        ends = [at_end or token in first.stop_ids for _, _, token in candidates]
        alive = [c for c, end in zip(candidates, ends) if not end][: self.width]
        for (score, parent, token), end in list(zip(candidates, ends))[: self.width]:
            if end:
                self._finish(score, length, parent, token)
        self.results = sorted(self.results, key=lambda r: -r.score)[: self.width]
        if not alive or self._is_done(alive[0][0], length):
            return []
        self.scores = [score for score, _, _ in alive]
        return [BeamExtension(parent, token) for _, parent, token in alive]

    def finish_early(self) -> None:
        """End now: living beams count as results cut short."""
        for seq, score in zip(self.seqs, self.scores):
            answer = tuple(seq.tokens[seq.prompt_len :])
            self.results.append(
                BeamResult(
                    self._normalized_score(score, max(len(answer), 1)),
                    answer,
                    FinishReason.LENGTH,
                    None,
                )
            )
        self.results = sorted(self.results, key=lambda r: -r.score)[: self.width]

    def _finish(self, score: float, length: int, parent: int, token: int) -> None:
        seq = self.seqs[parent]
        answer = tuple(seq.tokens[seq.prompt_len :])
        if token in seq.stop_ids:
            self.results.append(
                BeamResult(self._normalized_score(score, length), answer, FinishReason.STOP, token)
            )
        else:
            self.results.append(
                BeamResult(
                    self._normalized_score(score, length),
                    (*answer, token),
                    FinishReason.LENGTH,
                    None,
                )
            )

    def _normalized_score(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(float(length) ** self.length_penalty))

    def _is_done(self, best: float, length: int) -> bool:
        """Whether a living beam with sum ``best`` at ``length`` cannot improve the results."""
        if len(self.results) < self.width:
            return False
        return (
            self.early_stopping is True
            or self._normalized_score(best, length) <= self.results[-1].score
        )

    def _apply_by_row(
        self, processor: _RowProcessor, logs: torch.Tensor, processors: LogitsProcessors
    ) -> None:
        for row, seq in zip(logs, self.seqs, strict=True):
            processor(row, seq, processors)

    def _process_logprobs(self, logs: torch.Tensor) -> torch.Tensor:
        """Bias, penalties and min_tokens on the log-probabilities, from the beams' own tokens."""
        params, first = self.seqs[0].request.params, self.seqs[0]
        for token, bias in params.logit_bias.items():
            logs[:, token] += bias
        asked = params.logits_processors
        if asked:
            self._apply_by_row(logits_processors.apply_before_penalties, logs, asked)
        repeated = params.repetition_penalty not in (None, 1.0)
        if repeated or params.presence_penalty or params.frequency_penalty:
            counts = torch.zeros_like(logs)
            token_mask = torch.zeros_like(logs, dtype=torch.bool)
            for i, seq in enumerate(self.seqs):
                token_mask[
                    i,
                    torch.tensor(
                        logits_processors.history_ids(seq), dtype=torch.int64, device=logs.device
                    ),
                ] = True
                answer = torch.tensor(
                    seq.tokens[seq.prompt_len :], dtype=torch.int64, device=logs.device
                )
                counts[i] = torch.bincount(answer, minlength=logs.shape[1])
            logs = logit_penalties.apply_repetition_penalty(
                logs, token_mask, logs.new_tensor(params.repetition_penalty or 1.0)
            )
            once, each = (
                logs.new_tensor(params.presence_penalty or 0.0),
                logs.new_tensor(params.frequency_penalty or 0.0),
            )
            logs = logit_penalties.apply_presence_penalties(logs, counts, once, each)
        if asked:
            self._apply_by_row(logits_processors.apply_after_penalties, logs, asked)
        if first.num_outputs < (params.min_tokens or 0) and first.stop_ids:
            logs[:, sorted(t for t in first.stop_ids if t < logs.shape[1])] = float("-inf")
        if asked:
            self._apply_by_row(logits_processors.apply_after_min_tokens, logs, asked)
        return logs.log_softmax(-1) if asked and asked.renormalize_logits else logs
