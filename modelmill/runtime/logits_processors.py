"""What a checkpoint's generation_config does to logits before a token is picked, as transformers computes it.

Functions over one row, [V] float32 (of beams: their log-probabilities), changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.runtime.sequence import Sequence

_NEVER = float("-inf")


def processors_of(seq: Sequence) -> LogitsProcessors | None:
    """What changes the logits of a sequence; None where nothing does. A grammar alone says what may come."""
    found = seq.request.params.logits_processors
    return found if found and seq.guide is None else None


def counted(seq: Sequence) -> list[int]:
    """The sequence's tokens that count as ids in the original: without pictures, and of some prompts none."""
    if not seq.request.prompt_counts:
        return seq.tokens[seq.prompt_len :]
    if not seq.request.inserts:
        return seq.tokens
    foreign = np.zeros(len(seq.tokens), dtype=bool)
    for insert in seq.request.inserts:
        foreign[insert.position : insert.position + insert.length] = True
    return [token for token, skip in zip(seq.tokens, foreign.tolist()) if not skip]


def before_penalties(row: torch.Tensor, seq: Sequence, asked: LogitsProcessors) -> None:
    """What transformers computes before the repetition penalty."""
    _add(row, counted(seq) if asked.reads_tokens else [], asked.sequence_bias)
    if asked.encoder_repetition_penalty != 1.0:
        ids = _prompt(seq, row)
        # the opposite of a repetition penalty: what the prompt holds becomes likelier
        factor = 1.0 / asked.encoder_repetition_penalty
        values = row[ids]
        row[ids] = torch.where(values < 0, values * factor, values / factor)


def after_penalties(row: torch.Tensor, seq: Sequence, asked: LogitsProcessors) -> None:
    """What transformers computes after the repetition penalty."""
    ends = seq.request.eos_ids
    if asked.reads_tokens:
        tokens = np.array(counted(seq), dtype=np.int64)
        _ban(row, repeated(tokens, tokens, asked.no_repeat_ngram_size))
        prompt = tokens[: len(tokens) - (len(seq.tokens) - seq.prompt_len)]
        _ban(row, repeated(prompt, tokens, asked.encoder_no_repeat_ngram_size))
        words = ((word, _NEVER) for word in asked.bad_words_ids if not (len(word) == 1 and word[0] in ends))
        _add(row, tokens.tolist(), words)
    else:
        _ban(row, (word[0] for word in asked.bad_words_ids if word[0] not in ends))


def after_lengths(row: torch.Tensor, seq: Sequence, asked: LogitsProcessors) -> None:
    """What transformers computes after the minimum lengths."""
    if asked.forced_bos_token_id is not None and seq.length - _uncounted(seq) == 1:
        _force(row, (asked.forced_bos_token_id,))
    if asked.forced_eos_token_id and seq.length == seq.limit - 1:
        _force(row, asked.forced_eos_token_id)
    if asked.exponential_decay_length_penalty is not None:
        start, factor = asked.exponential_decay_length_penalty
        ends = [id for id in seq.request.eos_ids if id < len(row)]
        if seq.outputs > start and ends:
            values = row[ends]
            more = values.abs() * (factor ** (seq.outputs - start) - 1)
            row[ends] = values + more.masked_fill(~values.isfinite(), 0.0)
    _ban(row, asked.suppress_tokens)
    # where one token is the whole prompt and the next one is forced, the answer begins behind that
    late = asked.forced_bos_token_id is not None and seq.prompt_len - _uncounted(seq) <= 1
    if seq.outputs == int(late):
        _ban(row, asked.begin_suppress_tokens)


def repeated(of: np.ndarray, tokens: np.ndarray, size: int) -> np.ndarray:
    """Tokens [n] int64 that would end an n-gram of ``of`` [S], ``tokens`` [T] being what was written so far."""
    if not 0 < size <= len(of) or len(tokens) + 1 < size:
        return np.zeros(0, dtype=np.int64)
    ends = of[size - 1 :]
    same = np.ones(len(ends), dtype=bool)
    for place in range(size - 1):
        same &= of[place : place + len(ends)] == tokens[len(tokens) - size + 1 + place]
    return np.unique(ends[same])


def _uncounted(seq: Sequence) -> int:
    """Tokens of the prompt that are no ids in the original."""
    return seq.prompt_len if not seq.request.prompt_counts else sum(i.length for i in seq.request.inserts)


def _prompt(seq: Sequence, row: torch.Tensor) -> torch.Tensor:
    """The prompt's ids, each once."""
    answer = len(seq.tokens) - seq.prompt_len
    tokens = counted(seq)
    return torch.tensor(sorted(set(tokens[: len(tokens) - answer])), dtype=torch.int64, device=row.device)


def _add(row: torch.Tensor, tokens: list[int], words: Iterable[tuple[tuple[int, ...], float]]) -> None:
    """Add to the logits of words' last tokens where the others stand at the end of ``tokens``."""
    bias: dict[int, float] = {}
    for word, value in words:
        before = word[:-1]
        if not before or tuple(tokens[-len(before) :]) == before:
            bias[word[-1]] = bias.get(word[-1], 0.0) + value
    if bias:
        row[list(bias)] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)


def _ban(row: torch.Tensor, ids: Iterable[int]) -> None:
    known = [int(id) for id in ids if id < len(row)]
    if known:
        row[known] = _NEVER


def _force(row: torch.Tensor, ids: tuple[int, ...]) -> None:
    row[:] = _NEVER
    row[list(ids)] = 0.0
