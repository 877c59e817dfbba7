"""Log-probabilities of the model's own distribution, before any penalty or filter."""

from __future__ import annotations

import torch

from modelmill.core.types import Logprob


def logprob_table(logits: torch.Tensor, chosen: torch.Tensor, top: int) -> torch.Tensor:
    """Per row: the chosen token's id, log-probability and rank, then the ``top`` most likely ids
    and their values.

    logits: [R, V] float32. chosen: [R] int64. Returns [R, 3 + 2·top] float64 (ids are exact there),
    ready for one copy."""
    logs = logits.log_softmax(-1)
    mine = logs.gather(1, chosen[:, None])
    rank = (logs > mine).sum(-1, keepdim=True) + 1
    columns = [chosen[:, None].double(), mine.double(), rank.double()]
    if top:
        values, ids = logs.topk(top, dim=-1)
        columns += [ids.double(), values.double()]
    return torch.cat(columns, 1)


def read_logprobs(row: list[float], top: int) -> dict[int, Logprob]:
    """One row of a ``logprob_table``: the ``top`` most likely tokens and the chosen one, by id,
    most likely first.

    ``top`` may be lower than the table's.
    """
    width = (len(row) - 3) // 2
    found = {int(row[3 + i]): Logprob(row[3 + width + i], i + 1) for i in range(min(top, width))}
    found.setdefault(int(row[0]), Logprob(row[1], int(row[2])))
    return found
