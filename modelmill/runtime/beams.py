"""Beam search, scored and stopped as transformers does it.

Each step the best ``keep`` continuations of all beams are taken; those that end may become results if they are among
the best ``width``, the best others live on. A result's score is its summed log-probability over its length to the power
of ``length_penalty``. The search ends when no living beam could beat the worst result any more, with ``early_stopping``
as soon as there are ``width`` results, or when nothing can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import Finish
from modelmill.runtime import filters, logits_processors
from modelmill.runtime.sequence import Sequence

_Change = Callable[[torch.Tensor, Sequence, LogitsProcessors], None]


@dataclass(frozen=True)
class Result:
    """A finished beam: the answer's ids without the one that ended it, its score, and how it ended."""

    score: float
    tokens: tuple[int, ...]
    finish: Finish
    stop: int | None


@dataclass(frozen=True)
class Child:
    """A beam of the next step: which beam it continues, with which token."""

    parent: int
    token: int


class BeamSearch:
    """The state of one search. ``seqs`` are its living beams, best first, their scores in ``scores``."""

    def __init__(self, leader: Sequence) -> None:
        params = leader.request.params
        self.width = params.num_beams
        self.keep = max(2, 1 + len(leader.stops)) * self.width
        self.penalty = params.length_penalty
        self.early = params.early_stopping
        self.seqs = [leader]
        self.scores = [0.0]
        self.results: list[Result] = []
        self.forked = 0

    def advance(self, logits: torch.Tensor) -> list[Child]:
        """One step: logits [beams, V] float32, in the order of ``seqs``. Empty where the search has ended."""
        scores = torch.tensor(self.scores, dtype=torch.float32, device=logits.device)
        total = self._processed(logits.log_softmax(-1)) + scores[:, None]
        vocab = total.shape[1]
        values, places = total.view(-1).topk(min(self.keep, total.numel()))
        flat = list(zip(values.tolist(), places.tolist()))
        candidates = [(score, place // vocab, place % vocab) for score, place in flat]
        first = self.seqs[0]
        length = len(first.tokens) + 1 - first.prompt_len
        at_end = len(first.tokens) + 1 >= first.limit
        ends = [at_end or token in first.stops for _, _, token in candidates]
        alive = [c for c, end in zip(candidates, ends) if not end][: self.width]
        for (score, parent, token), end in list(zip(candidates, ends))[: self.width]:
            if end:
                self._finish(score, length, parent, token)
        self.results = sorted(self.results, key=lambda r: -r.score)[: self.width]
        if not alive or self._settled(alive[0][0], length):
            return []
        self.scores = [score for score, _, _ in alive]
        return [Child(parent, token) for _, parent, token in alive]

    def give_up(self) -> None:
        """End now: living beams count as results cut short."""
        for seq, score in zip(self.seqs, self.scores):
            answer = tuple(seq.tokens[seq.prompt_len :])
            self.results.append(Result(self._normal(score, max(len(answer), 1)), answer, Finish.LENGTH, None))
        self.results = sorted(self.results, key=lambda r: -r.score)[: self.width]

    def _finish(self, score: float, length: int, parent: int, token: int) -> None:
        seq = self.seqs[parent]
        answer = tuple(seq.tokens[seq.prompt_len :])
        if token in seq.stops:
            self.results.append(Result(self._normal(score, length), answer, Finish.STOP, token))
        else:
            self.results.append(Result(self._normal(score, length), (*answer, token), Finish.LENGTH, None))

    def _normal(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(float(length) ** self.penalty))

    def _settled(self, best: float, length: int) -> bool:
        """Whether a living beam with sum ``best`` at ``length`` cannot improve the results."""
        if len(self.results) < self.width:
            return False
        return self.early is True or self._normal(best, length) <= self.results[-1].score

    def _each_row(self, change: _Change, logs: torch.Tensor, asked: LogitsProcessors) -> None:
        for row, seq in zip(logs, self.seqs, strict=True):
            change(row, seq, asked)

    def _processed(self, logs: torch.Tensor) -> torch.Tensor:
        """Bias, penalties and min_tokens on the log-probabilities, from the beams' own tokens."""
        params, first = self.seqs[0].request.params, self.seqs[0]
        for token, bias in params.logit_bias.items():
            logs[:, token] += bias
        asked = params.logits_processors
        if asked:
            self._each_row(logits_processors.before_penalties, logs, asked)
        repeated = params.repetition_penalty not in (None, 1.0)
        if repeated or params.presence_penalty or params.frequency_penalty:
            counts = torch.zeros_like(logs)
            seen = torch.zeros_like(logs, dtype=torch.bool)
            for i, seq in enumerate(self.seqs):
                seen[i, torch.tensor(logits_processors.counted(seq), dtype=torch.int64, device=logs.device)] = True
                answer = torch.tensor(seq.tokens[seq.prompt_len :], dtype=torch.int64, device=logs.device)
                counts[i] = torch.bincount(answer, minlength=logs.shape[1])
            logs = filters.repetition(logs, seen, logs.new_tensor(params.repetition_penalty or 1.0))
            once, each = (
                logs.new_tensor(params.presence_penalty or 0.0),
                logs.new_tensor(params.frequency_penalty or 0.0),
            )
            logs = filters.presence(logs, counts, once, each)
        if asked:
            self._each_row(logits_processors.after_penalties, logs, asked)
        if first.outputs < (params.min_tokens or 0) and first.stops:
            logs[:, sorted(t for t in first.stops if t < logs.shape[1])] = float("-inf")
        if asked:
            self._each_row(logits_processors.after_lengths, logs, asked)
        return logs.log_softmax(-1) if asked and asked.renormalize_logits else logs
