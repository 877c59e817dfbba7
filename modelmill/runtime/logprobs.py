"""Log-probabilities of the model's own distribution, before any penalty or filter."""

from __future__ import annotations

import torch

from modelmill.core.types import Logprob


def logprob_table(logits: torch.Tensor, chosen: torch.Tensor, top: int) -> torch.Tensor:
    """Log-probabilities of the chosen and the most likely tokens, as one table for one copy.

    Args:
        logits: [R, V] float32.
        chosen: Ids [R] int64.
        top: Number of most likely tokens.

    Returns:
        [R, 3 + 2·top] float64 (exact for ids): the chosen token's id, log-probability and rank,
        then the ``top`` most likely ids, then their log-probabilities.
    """
    logs = logits.log_softmax(-1)
    chosen_logs = logs.gather(1, chosen[:, None])
    rank = (logs > chosen_logs).sum(-1, keepdim=True) + 1
    columns = [chosen[:, None].double(), chosen_logs.double(), rank.double()]
    if top:
        values, ids = logs.topk(top, dim=-1)
        columns += [ids.double(), values.double()]
    return torch.cat(columns, 1)


def read_logprobs(row: list[float], top: int) -> dict[int, Logprob]:
    """Read one row of a ``logprob_table``, whose own ``top`` may be larger.

    Returns:
        By id, the ``top`` most likely tokens, most likely first, and the chosen one.
    """
    width = (len(row) - 3) // 2
    by_id = {int(row[3 + i]): Logprob(row[3 + width + i], i + 1) for i in range(min(top, width))}
    by_id.setdefault(int(row[0]), Logprob(row[1], int(row[2])))
    return by_id
