"""How much memory a build takes: told by ``--dry-run``, and compared with what is free before anything is written.

A build maps the checkpoint and the engine, and allocates beside them. Mapped pages count in what the system shows for
the process ("resident"), but the system takes them back where memory is short. What is allocated it cannot take back:
where that does not fit, the process is killed.

The bytes per weight follow from what the code makes of a weight; the constants are what was left of the peaks that
``tools/build_memory.py`` measures on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from modelmill.build.pieces import Piece
from modelmill.checkpoint.open import Checkpoint
from modelmill.core import ram
from modelmill.core.errors import UsageError
from modelmill.core.size import byte_text

MIB = 1 << 20
LATER = 20 * MIB
"""What the process still loads after the plan: the runtime's modules and the kernels."""
WRITING, CALIBRATING, JUDGING, ENCODING = 40 * MIB, 130 * MIB, 60 * MIB, 110 * MIB
"""What a stage allocates for a model of no size: buffers of threads, KV pages of the judged text."""
EXPANDED = 9
"""Bytes a weight while a packed tensor of a checkpoint is expanded to float32: the result and what it is made of."""
ROUNDED = 12
"""Bytes a weight while a matrix is rounded: in float32, divided by its scales, and rounded."""
JUDGED_ROWS = 128
"""Rows of the judged text whose logits are compared (``accept.sequences``)."""
LOGITS = 3.8
"""Tensors of these rows' logits in float32: the engine's, the reference's, and their difference."""
BLOCK_LOGITS, BLOCK_COPIES = 1 << 21, 6
"""Logits that are in float64 at once (``accept.metrics``), and the tensors that are made of them."""
ENCODING_SHARE = 4.5
"""Widest layers of one picture in float32 that judging an image engine holds at once."""
HEAD_ROWS = 4096
"""Rows of the vocabulary that the reference widens at once."""


@dataclass(frozen=True)
class BuildMemory:
    """Bytes at the peak of a build.

    process: resident before it begins, with what it still loads. mapped: pages of the checkpoint and of the engine.
    writing, calibrating, judging: what each stage allocates; a stage that is left out has 0.
    """

    process: int
    mapped: int
    writing: int
    calibrating: int
    judging: int

    @property
    def allocated(self) -> int:
        """What has to be free when the build starts."""
        return max(self.writing, self.calibrating, self.judging)

    @property
    def peak(self) -> int:
        """Resident at most, as the system shows it."""
        return self.process + self.mapped + self.allocated

    def without_judging(self) -> BuildMemory:
        """The same build with --no-check."""
        return BuildMemory(self.process, self.mapped, self.writing, self.calibrating, 0)

    def check(self, what: str, *, judged: bool) -> None:
        """Raises UsageError where so much is not free; what: the checkpoint. judged: without --no-check."""
        needed = self if judged else self.without_judging()
        free = ram.memory().free
        if needed.allocated <= free:
            return
        less = self.without_judging().allocated
        way = f"; --no-check needs {byte_text(less)}" if judged and less <= free else ""
        raise UsageError(
            f"the build of {what} needs {byte_text(needed.allocated)} of memory and {byte_text(free)} are free: "
            f"give it more memory, or build on a larger machine{way}"
        )


def process_bytes() -> int:
    """Resident memory of this process now, with what a build still loads."""
    return int(psutil.Process().memory_info().rss) + LATER


def mapped_bytes(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> int:
    """Bytes of the checkpoint's tensors that are read, and of the engine."""
    sources = {name for piece in pieces for name in piece.resolved.sources}
    return sum(checkpoint.info(name).nbytes for name in sources) + sum(piece.nbytes for piece in pieces)


def writing_bytes(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> int:
    """While tensors stream through: the costliest one, and the next one as it is read meanwhile."""
    reads = [read_bytes(checkpoint, piece) for piece in pieces]
    packs = [pack_bytes(piece, torch.Size(piece.shape).numel()) for piece in pieces]
    follows = [*(4 * torch.Size(p.shape).numel() if read else 0 for p, read in zip(pieces[1:], reads[1:])), 0]
    kept = [min(read, 4 * torch.Size(piece.shape).numel()) for piece, read in zip(pieces, reads)]
    peaks = (max(read, mine + pack) + after for read, mine, pack, after in zip(reads, kept, packs, follows))
    return WRITING + max(peaks, default=0)


def read_bytes(checkpoint: Checkpoint, piece: Piece) -> int:
    """Bytes allocated while a tensor is read: none for one that is mapped as it is."""
    count = torch.Size(piece.shape).numel()
    infos = [checkpoint.info(name) for name in piece.resolved.sources]
    if piece.kept is not None:
        return piece.nbytes
    if any(is_expanded(checkpoint, info.name) for info in infos):
        return EXPANDED * count
    return count * infos[0].torch_dtype.itemsize if len(infos) > 1 else 0


def pack_bytes(piece: Piece, count: int) -> int:
    """Bytes allocated while a tensor is packed: a cast, or what rounding makes."""
    return piece.nbytes if piece.held in (None, "dense") else ROUNDED * count


def is_expanded(checkpoint: Checkpoint, name: str) -> bool:
    """Whether reading a tensor makes float32 of fewer bits, or computes it: nothing of it is mapped."""
    info = checkpoint.info(name)
    return info.nbytes < info.numel * info.torch_dtype.itemsize


def judging_bytes(checkpoint: Checkpoint, pieces: Sequence[Piece], vocab: int, hidden: int) -> int:
    """While a language engine is judged: a layer in float32, or the rows of logits that are compared."""
    head = next((p for p in pieces if p.module == "head"), None) or next(p for p in pieces if p.module == "embed")
    expanded = any(is_expanded(checkpoint, name) for name in head.resolved.sources)
    table = 4 * vocab * hidden if expanded else 0
    logits = int(LOGITS * 4 * JUDGED_ROWS * vocab) + 8 * BLOCK_COPIES * min(BLOCK_LOGITS, JUDGED_ROWS * vocab)
    logits += 4 * min(HEAD_ROWS, vocab) * hidden
    weights = float32_bytes(pieces, "layers.0.") // 4
    # the checkpoint's in float32, beside them what a rounded engine holds, and blocks of both that are compared
    rounded = any(p.held not in (None, "dense") for p in pieces if p.module.startswith("layers.0."))
    return JUDGING + max(logits + table, weights * (9 if rounded else 5))


def calibrating_bytes(pieces: Sequence[Piece], tokens: int, hidden: int, inner: int) -> int:
    """While a recipe reads calibration tokens.

    That is the embedding, a layer (three times at its widest matrix), the statistics of one site, and the tokens
    between two layers.
    """
    embed, layer = float32_bytes(pieces, "embed"), float32_bytes(pieces, "layers.0.")
    widest = max(inner, hidden)
    return CALIBRATING + embed + 3 * layer + 4 * 4 * widest**2 + 4 * tokens * (2 * hidden + 3 * widest)


def reading_bytes(pieces: Sequence[Piece]) -> int:
    """While layers are read for a GPU that calibrates: the embedding, or a layer and the next one, in float32."""
    return CALIBRATING + max(float32_bytes(pieces, "embed"), 2 * float32_bytes(pieces, "layers.0."))


def float32_bytes(pieces: Sequence[Piece], prefix: str) -> int:
    """Bytes in float32 of the tensors of modules whose names begin with ``prefix``."""
    return sum(4 * torch.Size(p.shape).numel() for p in pieces if p.module.startswith(prefix))
