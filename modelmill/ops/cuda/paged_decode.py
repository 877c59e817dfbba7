"""What the kernels that decode over pages share (paged_decode8, paged_decode16): what they take, and their launches."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import launch

LOG2E = 1.4426950408889634
TYPES = {torch.bfloat16: (), torch.float16: ("HALF",)}
MOST_SPLITS = 8  # blocks of a cluster


def readable(caches: tuple[torch.Tensor, ...], indices: tuple[torch.Tensor, ...]) -> bool:
    """Packed caches (keys first) with pages of 8 to 128 tokens; page tables, starts and lengths in int32."""
    page = caches[0].shape[2]
    packed = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in caches)
    known = all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in indices)
    return packed and known and 8 <= page <= 128 and page & (page - 1) == 0 and indices[0].shape[1] > 0


def splits_of(pairs: int, keys: int, room: int, least: int) -> int:
    """Blocks that share one context: as many as there is ``room`` for, each with ``least`` keys; a power of two."""
    wanted = min(room // pairs, -(-keys // least), MOST_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def forms(heads: int, room: int, least: int, most: int, longest: int) -> list[tuple[int, int]]:
    """(sequences, bound on their context) for each number of splits that decode steps may meet.

    heads: blocks of a sequence that is not split. most, longest: sequences of a step, keys of one.
    """
    found: dict[int, tuple[int, int]] = {}
    for batch in range(1, most + 1):
        for splits in (1, 2, 4, 8):
            keys = min(splits * least, longest)
            found.setdefault(splits_of(batch * heads, keys, room, least), (batch, keys))
    return list(found.values())


def start(q: torch.Tensor, name: str, macros: tuple[str, ...], warps: int, blocks: int, work: bytes) -> None:
    """Launch the kernel ``name`` of the source of that name, in ``blocks`` blocks, where q is."""
    device = q.get_device()
    with torch.cuda.device(q.device):
        launch.kernel(name, name, macros, 32 * warps, 0, device).launch(blocks, work, early=True)
