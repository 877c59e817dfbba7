"""What changes logits before ``ops.sample`` sees them: pure functions over [B, V] float32, one parameter per row."""

from __future__ import annotations

import torch


def allowed(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Only tokens whose bit is set. masks: [B, ceil(V / 8)] uint8, bit t % 8 of byte t // 8 for token t."""
    bits = (masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


def repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Tokens seen in prompt or answer: positive logits divided, negative ones multiplied (Keskar et al. 2019).

    seen: [B, V] bool. penalty: [B, 1].
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence(logits: torch.Tensor, counts: torch.Tensor, once: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
    """Tokens of the answer: ``once`` off where they occur at all, ``each`` off per occurrence.

    counts: [B, V] whole numbers. once, each: [B, 1].
    """
    return logits - each * counts - once * (counts > 0)
