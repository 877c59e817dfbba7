"""Weight-only 8 bits in groups of columns, as GGUF's Q8_0, GPTQ and compressed-tensors store them.

Nothing is rounded into this kind: it holds integers that a checkpoint brings. Stored are the codes, a scale and (unless
symmetric) an offset for every row and group, K and the group, and where columns were reordered their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from modelmill.ops.groups import RUN
from modelmill.ops.int8_group_linear import filled, unpacked
from modelmill.ops.shelf import Ops
from modelmill.weights._grouped import Grouped, in_order
from modelmill.weights.held import Expansion


@dataclass(frozen=True)
class Held(Grouped):
    """weight: [N, ⌈K/32⌉·32] int8; offset None: zero."""

    kind: str = "int8_group"

    STORED: ClassVar[torch.dtype] = torch.int8
    EXPANDS: ClassVar[Expansion] = Expansion("int8_group_linear", torch.float32)

    @staticmethod
    def from_codes(
        codes: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor | None,
        group: int,
        order: torch.Tensor | None = None,
    ) -> Held:
        """codes: [N, K] int8."""
        return Held(filled(codes), scale, offset, codes.shape[1], group, order)

    @staticmethod
    def row_width(columns: int) -> int:
        return -(-columns // RUN) * RUN

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return ops.int8_group_linear(in_order(x, self.order), self.weight, self.scale, self.offset, self.group, bias)

    def codes(self) -> torch.Tensor:
        """[N, K] int8, columns as held."""
        return self.weight[:, : self.columns]

    def _wide(self) -> torch.Tensor:
        return unpacked(self.weight, self.scale, self.offset, self.group, self.columns)
