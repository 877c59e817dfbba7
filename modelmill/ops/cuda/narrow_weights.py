"""What products of a few rows with 4- and 8-bit weights share on the host: how they are compiled and launched."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch

THREADS, PIECE, RUN = 256, 128, 32
WARPS = THREADS // 32
TYPES: dict[torch.dtype, tuple[str, ...]] = {torch.bfloat16: (), torch.float16: ("HALF",), torch.float32: ("FLOAT",)}
_MOST_SHARED = 200 << 10  # bytes of a block, beside what the kernels take anyway


class Form(NamedTuple):
    """How a product is compiled: tiles of 8 rows of x, warps along N (the others split K), pieces that a warp has on
    their way, blocks that registers are saved for on a multiprocessor."""

    tiles: int
    wide: int
    depth: int
    blocks: int

    @property
    def macros(self) -> tuple[str, ...]:
        """For the compiler."""
        return f"NT={self.tiles}", f"RW={self.wide}", f"DEPTH={self.depth}", f"BLOCKS={self.blocks}"

    def grid(self, rows: int, *, gated: bool = False) -> int:
        """Blocks of a launch over a weight of so many rows."""
        return -(-rows // (2 if gated else 1) // ((8 if gated else 16) * self.wide))

    def shared(self, groups: int) -> int:
        """Bytes of a block's scales and offsets."""
        return 16 * self.wide * (groups + 1) * 8


def fits(form: Form, groups: int) -> bool:
    """Whether a block's scales find room."""
    return form.shared(groups) <= _MOST_SHARED - form.tiles * 4096


def piece_of(group: int, columns: int) -> int:
    """Columns that a warp takes at a time, all of one group: 128, 64 or 32."""
    return PIECE if group >= columns else gcd(group, PIECE)


def shift(group: int, columns: int, piece: int = PIECE) -> int | None:
    """How many pieces share a scale, as a power of two; None where it is none."""
    if group >= columns:
        return 30
    pieces = group // piece
    return pieces.bit_length() - 1 if group % piece == 0 and pieces & (pieces - 1) == 0 else None
