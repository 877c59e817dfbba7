"""Penalties and masks on logits before sampling.

Pure functions of logits [B, V] float32, with one parameter per row.
"""

from __future__ import annotations

import torch


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


def apply_presence_penalties(
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
