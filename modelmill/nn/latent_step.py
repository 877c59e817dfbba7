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
class LatentPrompts:
    """How a step is divided in which prompts begin: their keys, and the sequences beside them.

    Attributes:
        block_tables: [B, max_query] int32, the pages of the prompts' keys, which hold one token
            each: the rows of the step themselves.
        context_lens: [B] int32, keys of each prompt; 0 of sequences of one token.
        decode_rows: [D] int64, the rows of sequences of one token; None: there are none.
        decode_step: the step of these alone; None: there are none.
    """

    block_tables: torch.Tensor
    context_lens: torch.Tensor
    decode_rows: torch.Tensor | None = None
    decode_step: Step | None = None


def divide_prompts(step: Step) -> LatentPrompts | None:
    """The prompts that begin in a step, and what is beside them; None: no prompt is known to."""
    decodes = step.num_decodes
    if decodes is None or decodes == len(step.context_lens):
        return None
    tokens = torch.arange(step.max_query, dtype=torch.int32, device=step.query_start.device)
    tables = step.query_start[:-1, None] + tokens
    if not decodes:
        return LatentPrompts(tables, step.context_lens)
    is_prompt = step.query_start.diff() > 1
    rows, decode_step = single_queries(step, is_prompt, decodes)
    return LatentPrompts(tables, step.context_lens * is_prompt, rows, decode_step)


def single_queries(step: Step, is_prompt: torch.Tensor, decodes: int) -> tuple[torch.Tensor, Step]:
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
