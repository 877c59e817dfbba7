"""The last layer's second half, for the rows whose logits are needed and no others.

Keys and values of every token must be stored in every layer. Beyond that, only the head reads the
last layer's output, and of a prompt it reads one row: the query, output projection and MLP are left
out for the others. With n layers that saves about three quarters of one nth of a prompt's GEMMs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from modelmill.nn.step import Step

MIN_ROW_RATIO = 2  # rows of the step per row with logits, from which leaving out pays


def select_logit_rows(step: Step) -> Step | None:
    """The step of the rows ``step.logit_rows``, each the only query of a sequence of its own.

    A row's context ends with itself. None: all rows are computed.
    """
    rows = step.logit_rows
    if rows is None or len(step.ids) < MIN_ROW_RATIO * len(rows):
        return None
    ends = step.query_start[1:]
    # the sequence of a row; a step that is all padding has none
    seq = torch.searchsorted(ends, rows.to(ends.dtype), right=True).clamp_(max=len(ends) - 1)
    behind = ends[seq] - 1 - rows
    return replace(
        step,
        ids=step.ids[rows],
        positions=step.positions[rows],
        slots=step.slots[rows],
        rope_keys=step.rope_keys[rows],
        block_tables=step.block_tables[seq],
        query_start=torch.arange(len(rows) + 1, dtype=ends.dtype, device=ends.device),
        context_lens=(step.context_lens[seq] - behind).to(ends.dtype),
        logit_rows=None,
        max_query=1,
    )
