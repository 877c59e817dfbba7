"""What all layers of latent attention need of a step beside its fields; made once for all of them.

It is made on the step's device, with shapes that the host knows: a CUDA graph can contain it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from modelmill.nn.step import Step


@dataclass(frozen=True)
class LatentExpansionPlan:
    """How a step that expands prompts is divided: their keys, and the sequences beside them.

    Attributes:
        page, offset: [K] int64, where the latent vectors are of which keys and values are made:
            those of the step's tokens, or of all keys of prompts with a history.
        block_tables: [B, max_keys] int32, the pages of the prompts' keys, which hold one token
            each: their places in ``page``.
        context_lens: [B] int32, keys of each prompt; 0 of sequences of one token.
        max_keys: bound of the keys of a prompt.
        decode_rows: [D] int64, the rows of sequences of one token; None: there are none.
        decode_step: the step of these alone; None: there are none.
    """

    page: torch.Tensor
    offset: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    max_keys: int
    decode_rows: torch.Tensor | None = None
    decode_step: Step | None = None


def plan_prompt_expansion(step: Step) -> LatentExpansionPlan | None:
    """The prompts that a step expands, and what is beside them; None: it expands none."""
    decodes, lengths = step.num_decodes, step.context_lens
    if decodes is None or decodes == len(lengths):
        return None
    rows = decode_step = None
    if decodes:
        is_prompt = step.query_start.diff() > 1
        rows, decode_step = select_single_token_sequences(step, is_prompt, decodes)
        lengths = lengths * is_prompt
    if step.num_prompt_keys:
        page, offset, first_keys = _locate_cached_keys(step, lengths, step.num_prompt_keys)
        max_keys = min(step.max_context, step.num_prompt_keys)
    else:  # the keys are the rows of the step
        page, offset = step.slot_page_indices[:2]
        first_keys, max_keys = step.query_start[:-1], step.max_query
    keys = torch.arange(max_keys, dtype=torch.int32, device=lengths.device)
    tables = first_keys[:, None] + keys
    return LatentExpansionPlan(page, offset, tables, lengths, max_keys, rows, decode_step)


def _locate_cached_keys(
    step: Step, lengths: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages and offsets of all keys, sequence after sequence, and the first key of each.

    Args:
        step: Of the sequences.
        lengths: [B] int32, keys of each sequence.
        count: The sum of ``lengths``, which the host knows.
    """
    ends = lengths.cumsum(0)
    key = torch.arange(count, device=lengths.device)
    sequence = torch.searchsorted(ends, key, right=True)
    firsts = ends - lengths
    position, size = key - firsts[sequence], step.kv.page_size
    column = position.div(size, rounding_mode="floor")
    return step.block_tables[sequence, column].long(), position % size, firsts.int()


def select_single_token_sequences(
    step: Step, is_prompt: torch.Tensor, decodes: int
) -> tuple[torch.Tensor, Step]:
    """The rows of a step's sequences of one token, and the step of these alone.

    Args:
        step: A step with such sequences and others.
        is_prompt: [B] bool: which sequences have more tokens.
        decodes: How many have one; the host knows it, so that a GPU need not be waited for.
    """
    sequences = torch.argsort(is_prompt.int(), stable=True)[:decodes]
    rows = step.query_start[sequences].long()
    starts = torch.arange(decodes + 1, dtype=torch.int32, device=rows.device)
    return rows, replace(
        step,
        block_tables=step.block_tables[sequences],
        query_start=starts,
        context_lens=step.context_lens[sequences],
        max_query=1,
        num_decodes=None,
    )
