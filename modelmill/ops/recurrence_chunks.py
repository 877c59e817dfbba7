"""Chunks of a sequence's tokens, and how a state and its tokens decay within each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from modelmill.ops.recurrence import Tokens


def split_into_chunks(tokens: Tokens, chunk: int) -> list[torch.Tensor]:
    """The tensors of whole chunks, [n, H, …] → [N, H, C, …]."""
    return [each.unflatten(0, (-1, chunk)).transpose(1, 2).contiguous() for each in tokens]


class ChunkDecays(NamedTuple):
    """Decays within N chunks of C tokens, of H heads.

    Attributes:
        between: [N, H, C, C], from token j to token i ≥ j; 0 for i < j.
        since_start: [N, H, C, 1], from the start of the chunk to each token.
        to_end: [N, H, C, 1], from each token to the end.
        whole: [N, H, 1, 1], from start to end.
    """

    between: torch.Tensor
    since_start: torch.Tensor
    to_end: torch.Tensor
    whole: torch.Tensor


def chunk_decays(log_decay: torch.Tensor, dtype: torch.dtype) -> ChunkDecays:
    """Decays from the log decay of each token [N, H, C], by its running sums G."""
    chunk, total = log_decay.shape[-1], log_decay.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf"))
    ends = total[..., -1:]
    exponents = between, total[..., None], (ends - total)[..., None], ends[..., None]
    return ChunkDecays(*(each.exp().to(dtype) for each in exponents))
