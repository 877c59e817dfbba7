"""The last layer's second half, for the rows whose logits are wanted and no others.

Keys and values of every token must be stored in every layer. What the last layer makes of a token
beyond that is read by the head alone, and of a prompt the head wants one row: its query, output
projection and MLP are left out for the others. With n layers that is about three quarters of one
nth of a prompt's products.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from modelmill.nn.step import Step

MIN_ROW_RATIO = 2  # times as many rows as are wanted, from which leaving out pays


def select_logit_rows(step: Step) -> Step | None:
    """The step of the wanted rows, each the single query of a sequence of its own; None where all
    rows go on.

    A row's context ends with itself. Somebody who watches modules sees all rows.
    """
    rows = step.logit_rows
    if rows is None or not step.fuse or len(step.ids) < MIN_ROW_RATIO * len(rows):
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
