"""Logits processors of a checkpoint's generation_config, with the results of transformers.

Functions on one row, [V] float32 (for beams: log-probabilities), modified in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.runtime.sequence import Sequence


def apply_token_mask(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Set the logits of tokens whose bit is not set to −inf.

    ``masks``: [B, ceil(V / 8)] uint8, bit t % 8 of byte t // 8 for token t.
    """
    bits = (masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


def apply_repetition_penalty(
    logits: torch.Tensor, token_mask: torch.Tensor, penalty: torch.Tensor
) -> torch.Tensor:
    """Divide positive logits and multiply negative ones by the penalty (Keskar et al. 2019).

    Args:
        logits: [B, V].
        token_mask: [B, V] bool: tokens to penalize (those in prompt or output).
        penalty: [B, 1].
    """
    return torch.where(
        token_mask, torch.where(logits > 0, logits / penalty, logits * penalty), logits
    )


def apply_additive_penalties(
    logits: torch.Tensor,
    counts: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
) -> torch.Tensor:
    """Subtract ``presence_penalty`` once and ``frequency_penalty`` per occurrence.

    Args:
        logits: [B, V].
        counts: [B, V] integers: occurrences in the output.
        presence_penalty: [B, 1].
        frequency_penalty: [B, 1].
    """
    return logits - frequency_penalty * counts - presence_penalty * (counts > 0)


_NEG_INF = float("-inf")


def processor_visible_token_ids(seq: Sequence) -> list[int]:
    """The tokens that the original model sees as ids: no image tokens, of some prompts none."""
    if not seq.request.penalize_prompt:
        return seq.tokens[seq.prompt_len :]
    if not seq.request.embedding_spans:
        return seq.tokens
    in_span = np.zeros(len(seq.tokens), dtype=bool)
    for span in seq.request.embedding_spans:
        in_span[span.position : span.position + span.length] = True
    return [token for token, skip in zip(seq.tokens, in_span.tolist()) if not skip]


def apply_before_penalties(row: torch.Tensor, seq: Sequence, processors: LogitsProcessors) -> None:
    """Processors that transformers runs before the repetition penalty."""
    _add_sequence_bias(
        row,
        processor_visible_token_ids(seq) if processors.depends_on_past_tokens else [],
        processors.sequence_bias,
    )
    if processors.encoder_repetition_penalty != 1.0:
        ids = _unique_prompt_ids(seq, row)
        # the inverse of a repetition penalty: tokens of the prompt become more likely
        factor = 1.0 / processors.encoder_repetition_penalty
        values = row[ids]
        row[ids] = torch.where(values < 0, values * factor, values / factor)


def apply_after_penalties(row: torch.Tensor, seq: Sequence, processors: LogitsProcessors) -> None:
    """Processors that transformers runs after the repetition penalty."""
    ends = seq.request.eos_ids
    if processors.depends_on_past_tokens:
        tokens = np.array(processor_visible_token_ids(seq), dtype=np.int64)
        _ban_ids(row, banned_ngram_ids(tokens, tokens, processors.no_repeat_ngram_size))
        prompt = tokens[: len(tokens) - (len(seq.tokens) - seq.prompt_len)]
        _ban_ids(row, banned_ngram_ids(prompt, tokens, processors.encoder_no_repeat_ngram_size))
        words = (
            (word, _NEG_INF)
            for word in processors.bad_words_ids
            if not (len(word) == 1 and word[0] in ends)
        )
        _add_sequence_bias(row, tokens.tolist(), words)
    else:
        _ban_ids(row, (word[0] for word in processors.bad_words_ids if word[0] not in ends))


def apply_post_min_length_processors(
    row: torch.Tensor, seq: Sequence, processors: LogitsProcessors
) -> None:
    """Processors that transformers runs after the minimum lengths."""
    if (
        processors.forced_bos_token_id is not None
        and seq.length - _num_processor_hidden_prompt_tokens(seq) == 1
    ):
        _force_ids(row, (processors.forced_bos_token_id,))
    if processors.forced_eos_token_id and seq.length == seq.max_length - 1:
        _force_ids(row, processors.forced_eos_token_id)
    if processors.exponential_decay_length_penalty is not None:
        start, factor = processors.exponential_decay_length_penalty
        ends = [id for id in seq.request.eos_ids if id < len(row)]
        if seq.num_outputs > start and ends:
            values = row[ends]
            bonus = values.abs() * (factor ** (seq.num_outputs - start) - 1)
            row[ends] = values + bonus.masked_fill(~values.isfinite(), 0.0)
    _ban_ids(row, processors.suppress_tokens)
    # after a prompt of one token with a forced BOS, the output begins after that BOS
    forced_bos = processors.forced_bos_token_id is not None
    after_bos = forced_bos and seq.prompt_len - _num_processor_hidden_prompt_tokens(seq) <= 1
    if seq.num_outputs == int(after_bos):
        _ban_ids(row, processors.begin_suppress_tokens)


def banned_ngram_ids(source: np.ndarray, tokens: np.ndarray, ngram_size: int) -> np.ndarray:
    """Ids [n] int64 that would complete an n-gram of ``source`` [S] after ``tokens`` [T]."""
    if not 0 < ngram_size <= len(source) or len(tokens) + 1 < ngram_size:
        return np.zeros(0, dtype=np.int64)
    ends = source[ngram_size - 1 :]
    same = np.ones(len(ends), dtype=bool)
    for i in range(ngram_size - 1):
        same &= source[i : i + len(ends)] == tokens[len(tokens) - ngram_size + 1 + i]
    return np.unique(ends[same])


def _num_processor_hidden_prompt_tokens(seq: Sequence) -> int:
    """Tokens of the prompt that the original model does not see as ids."""
    return (
        seq.prompt_len
        if not seq.request.penalize_prompt
        else sum(i.length for i in seq.request.embedding_spans)
    )


def _unique_prompt_ids(seq: Sequence, row: torch.Tensor) -> torch.Tensor:
    """The distinct ids of the prompt."""
    num_outputs = len(seq.tokens) - seq.prompt_len
    tokens = processor_visible_token_ids(seq)
    return torch.tensor(
        sorted(set(tokens[: len(tokens) - num_outputs])), dtype=torch.int64, device=row.device
    )


def _add_sequence_bias(
    row: torch.Tensor, tokens: list[int], words: Iterable[tuple[tuple[int, ...], float]]
) -> None:
    """Add the bias to a word's last token if ``tokens`` end with the word's other tokens."""
    bias: dict[int, float] = {}
    for word, value in words:
        before = word[:-1]
        if not before or tuple(tokens[-len(before) :]) == before:
            bias[word[-1]] = bias.get(word[-1], 0.0) + value
    if bias:
        row[list(bias)] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)


def _ban_ids(row: torch.Tensor, ids: Iterable[int]) -> None:
    valid = [int(id) for id in ids if id < len(row)]
    if valid:
        row[valid] = _NEG_INF


def _force_ids(row: torch.Tensor, ids: tuple[int, ...]) -> None:
    row[:] = _NEG_INF
    row[list(ids)] = 0.0
