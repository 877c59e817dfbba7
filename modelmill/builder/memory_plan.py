"""How much memory a build takes: told by ``--dry-run``, and compared with what is free before
anything is written.

A build maps the checkpoint and the engine, and allocates beside them. Mapped pages count in what
the system shows for the process ("resident"), but the system takes them back where memory is short.
What is allocated it cannot take back: where that does not fit, the process is killed.

The bytes per weight follow from what the code makes of a weight; the constants are what was left of
the peaks that ``tools/build_memory.py`` measures on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from modelmill.builder.tensor_plan import PlannedTensor
from modelmill.checkpoint.open import Checkpoint
from modelmill.core import memory_limits
from modelmill.core.byte_size import format_bytes
from modelmill.core.errors import UsageError
from modelmill.quant.calibration_state import BATCH_TOKENS

MIB = 1 << 20
LATE_IMPORT_BYTES = 20 * MIB
"""What the process still loads after the plan: the runtime's modules and the kernels."""
WRITING_BYTES, CALIBRATION_BYTES, ACCEPTANCE_BYTES, ENCODING_BYTES = (
    40 * MIB,
    60 * MIB,
    60 * MIB,
    110 * MIB,
)
"""What a stage allocates for a model of no size: buffers of threads, KV pages of the judged text.
"""
LAYER_READ_BYTES = 130 * MIB
"""The same for reading layers that a GPU calibrates."""
EXPAND_BYTES_PER_WEIGHT = 9
"""Bytes a weight while a packed tensor of a checkpoint is expanded to float32: the result and what
it is made of.
"""
ROUND_BYTES_PER_WEIGHT = 12
"""Bytes a weight while a matrix is rounded: in float32, divided by its scales, and rounded."""
ACCEPTANCE_ROWS = 128
"""Rows of the judged text whose logits are compared (``accept.sequences``)."""
LOGITS_TENSORS = 3.8
"""Tensors of these rows' logits in float32: the engine's, the reference's, and their difference."""
BLOCK_LOGITS, BLOCK_LOGITS_TENSORS = 1 << 21, 6
"""Logits that are in float64 at once (``accept.metrics``), and the tensors that are made of them.
"""
CALIBRATION_FRAGMENTATION = 1.1
"""Memory of calibration tokens over the size of their tensors: freed blocks that fit nothing else
lie between them.
"""
ENCODING_LAYERS = 4.5
"""Widest layers of one image in float32 that judging an engine with a convolutional encoder holds
at once.
"""
ENCODING_SCORES = 7
"""Scores of one head over a whole image in float32 that the reference of a ViT, which takes head by
head, holds.
"""
HEAD_ROWS = 4096
"""Rows of the vocabulary that the reference widens at once."""


@dataclass(frozen=True)
class BuildMemory:
    """Bytes at the peak of a build.

    process_bytes: resident before it begins, with what it still loads. mapped_bytes: pages of the
    checkpoint and of the engine. writing_bytes, calibration_bytes, acceptance_bytes: what each
    stage allocates; a stage that is left out has 0.
    """

    process_bytes: int
    mapped_bytes: int
    writing_bytes: int
    calibration_bytes: int
    acceptance_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """What has to be free when the build starts."""
        return max(self.writing_bytes, self.calibration_bytes, self.acceptance_bytes)

    @property
    def peak_bytes(self) -> int:
        """Resident at most, as the system shows it."""
        return self.process_bytes + self.mapped_bytes + self.allocated_bytes

    def without_acceptance(self) -> BuildMemory:
        """The same build with --no-check."""
        return BuildMemory(
            self.process_bytes, self.mapped_bytes, self.writing_bytes, self.calibration_bytes, 0
        )

    def check(self, checkpoint_name: str, *, with_acceptance: bool) -> None:
        """Raises UsageError where so much is not free; checkpoint_name: for the message.
        with_acceptance: without --no-check.
        """
        needed = self if with_acceptance else self.without_acceptance()
        free = memory_limits.available_memory().free
        if needed.allocated_bytes <= free:
            return
        less = self.without_acceptance().allocated_bytes
        way = f"; --no-check needs {format_bytes(less)}" if with_acceptance and less <= free else ""
        raise UsageError(
            f"the build of {checkpoint_name} needs {format_bytes(needed.allocated_bytes)} of "
            "memory "
            f"and {format_bytes(free)} are free: "
            f"give it more memory, or build on a larger machine{way}"
        )


def process_bytes() -> int:
    """Resident memory of this process now, with what a build still loads."""
    return int(psutil.Process().memory_info().rss) + LATE_IMPORT_BYTES


def mapped_bytes(checkpoint: Checkpoint, planned_tensors: Sequence[PlannedTensor]) -> int:
    """Bytes of the checkpoint's tensors that are read, and of the engine."""
    sources = {name for planned in planned_tensors for name in planned.rule.sources}
    return sum(checkpoint.info(name).nbytes for name in sources) + sum(
        planned.nbytes for planned in planned_tensors
    )


def writing_bytes(checkpoint: Checkpoint, planned_tensors: Sequence[PlannedTensor]) -> int:
    """While tensors stream through: the costliest one, and the next one as it is read meanwhile."""
    reads = [read_buffer_bytes(checkpoint, planned) for planned in planned_tensors]
    packs = [
        pack_buffer_bytes(planned, torch.Size(planned.shape).numel()) for planned in planned_tensors
    ]
    follows = [
        *(
            4 * torch.Size(p.shape).numel() if read else 0
            for p, read in zip(planned_tensors[1:], reads[1:])
        ),
        0,
    ]
    kept = [
        min(read, 4 * torch.Size(planned.shape).numel())
        for planned, read in zip(planned_tensors, reads)
    ]
    peaks = (
        max(read, mine + pack) + after
        for read, mine, pack, after in zip(reads, kept, packs, follows)
    )
    return WRITING_BYTES + max(peaks, default=0)


def read_buffer_bytes(checkpoint: Checkpoint, planned: PlannedTensor) -> int:
    """Bytes allocated while a tensor is read: none for one that is mapped as it is."""
    count = torch.Size(planned.shape).numel()
    infos = [checkpoint.info(name) for name in planned.rule.sources]
    if planned.kept_weight is not None:
        return planned.nbytes
    if any(is_expanded(checkpoint, info.name) for info in infos):
        return EXPAND_BYTES_PER_WEIGHT * count
    return count * infos[0].torch_dtype.itemsize if len(infos) > 1 else 0


def pack_buffer_bytes(planned: PlannedTensor, num_weights: int) -> int:
    """Bytes allocated while a tensor is packed: a cast, or what rounding makes."""
    return (
        planned.nbytes
        if planned.weight_format in (None, "dense")
        else ROUND_BYTES_PER_WEIGHT * num_weights
    )


def is_expanded(checkpoint: Checkpoint, name: str) -> bool:
    """Whether reading a tensor makes float32 of fewer bits, or computes it: nothing of it is
    mapped.
    """
    info = checkpoint.info(name)
    return info.nbytes < info.numel * info.torch_dtype.itemsize


def acceptance_bytes(
    checkpoint: Checkpoint,
    planned_tensors: Sequence[PlannedTensor],
    vocab_size: int,
    hidden_size: int,
) -> int:
    """While a language engine is judged: a layer in float32, or the rows of logits that are
    compared.
    """
    head = next((p for p in planned_tensors if p.module == "head"), None) or next(
        p for p in planned_tensors if p.module == "embed"
    )
    expanded = any(is_expanded(checkpoint, name) for name in head.rule.sources)
    table = 4 * vocab_size * hidden_size if expanded else 0
    logits = int(
        LOGITS_TENSORS * 4 * ACCEPTANCE_ROWS * vocab_size
    ) + 8 * BLOCK_LOGITS_TENSORS * min(BLOCK_LOGITS, ACCEPTANCE_ROWS * vocab_size)
    logits += 4 * min(HEAD_ROWS, vocab_size) * hidden_size
    weights = float32_bytes(planned_tensors, "layers.0.") // 4
    # the checkpoint's in float32, beside them what a rounded engine holds, and blocks of both that
    # are compared
    rounded = any(
        p.weight_format not in (None, "dense")
        for p in planned_tensors
        if p.module.startswith("layers.0.")
    )
    return ACCEPTANCE_BYTES + max(logits + table, weights * (9 if rounded else 5))


def calibration_bytes(
    planned_tensors: Sequence[PlannedTensor],
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    kv_size: int,
    *,
    needs_hessian: bool,
) -> int:
    """While a recipe reads calibration tokens.

    kv_size: numbers that a layer keeps of a token, keys and values. needs_hessian: whether the
    recipe asks for one.

    That is the embedding, a layer (three times at its widest matrix), the statistics of one site,
    the tokens at the widest site, and of one batch what the layer computes between two sites.
    """
    embed, layer = (
        float32_bytes(planned_tensors, "embed"),
        float32_bytes(planned_tensors, "layers.0."),
    )
    widest = max(intermediate_size, hidden_size)
    values = (
        num_tokens * (2 * hidden_size + widest + kv_size)
        + min(num_tokens, BATCH_TOKENS) * 2 * widest
    )
    statistics = 4 * 4 * widest**2 if needs_hessian else 0
    return (
        CALIBRATION_BYTES
        + embed
        + 3 * layer
        + statistics
        + int(CALIBRATION_FRAGMENTATION * 4 * values)
    )


def encoding_bytes(encoder: Any, workspace_bytes: int, itemsize: int) -> int:
    """While an image engine is judged: one image through both; workspace_bytes: its widest layer in
    float32.

    itemsize: of the engine's activations, in which it holds what positions add to the scores, and
    the scores.
    """
    if not hasattr(encoder, "inner"):  # no transformer throughout
        return ENCODING_BYTES + int(ENCODING_LAYERS * workspace_bytes)
    tokens = encoder.grid**2
    branches = 2 * 3 * tokens * max(3 * encoder.width, encoder.inner) * 4
    return (
        ENCODING_BYTES + branches + tokens**2 * (4 * ENCODING_SCORES + 2 * encoder.heads * itemsize)
    )


def layer_read_bytes(planned_tensors: Sequence[PlannedTensor]) -> int:
    """While layers are read for a GPU that calibrates: the embedding, or a layer and the next one,
    in float32.
    """
    return LAYER_READ_BYTES + max(
        float32_bytes(planned_tensors, "embed"), 2 * float32_bytes(planned_tensors, "layers.0.")
    )


def float32_bytes(planned_tensors: Sequence[PlannedTensor], prefix: str) -> int:
    """Bytes in float32 of the tensors of modules whose names begin with ``prefix``."""
    return sum(
        4 * torch.Size(p.shape).numel() for p in planned_tensors if p.module.startswith(prefix)
    )
