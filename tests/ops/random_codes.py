"""Random weights of 4 and 8 bits on a GPU."""

from __future__ import annotations

import torch

from modelmill.ops.int4_linear import pack_codes


def random_codes(
    bits: int, rows: int, columns: int, group: int, *, offset: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """Codes [rows, columns], scales and offsets in float16, and the group size."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows, -(-columns // group))
    low, most = (0, 15) if bits == 4 else (-128, 127)
    codes = torch.randint(low, most + 1, (rows, columns), generator=generator, dtype=torch.int16)
    weight = pack_codes(codes.to(torch.uint8)) if bits == 4 else codes.to(torch.int8)
    scale = (torch.rand(size, generator=generator) * 0.45 / most + 0.03 / most).half().cuda()
    shift = (-scale.float() * (torch.rand(size, generator=generator) * most).cuda()).half()
    return weight.cuda(), scale, shift if offset else None, group
