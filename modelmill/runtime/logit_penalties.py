"""What changes logits before ``ops.sample`` sees them: pure functions over [B, V] float32, one
parameter per row.
"""

from __future__ import annotations

import torch


def apply_token_mask(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Only tokens whose bit is set.

    masks: [B, ceil(V / 8)] uint8, bit t % 8 of byte t // 8 for token t.
    """
    bits = (masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


def apply_repetition_penalty(
    logits: torch.Tensor, token_mask: torch.Tensor, penalty: torch.Tensor
) -> torch.Tensor:
    """Tokens seen in prompt or answer: positive logits divided, negative ones multiplied (Keskar et
    al. 2019).

    token_mask: [B, V] bool. penalty: [B, 1].
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
    """Tokens of the answer: ``presence_penalty`` off where they occur at all, ``frequency_penalty``
    off per occurrence.

    counts: [B, V] whole numbers. Both penalties: [B, 1].
    """
    return logits - frequency_penalty * counts - presence_penalty * (counts > 0)
