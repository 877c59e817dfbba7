"""Memory of a build and of its engine: reported by ``--dry-run``, and checked before the build.

A build maps the checkpoint and the engine, and allocates buffers. The OS counts mapped pages as
resident but reclaims them when memory is short. It cannot reclaim allocations: if they do not fit,
the process is killed. The bytes per weight follow from the code; the constants are the rest of the
peaks that ``tools/build_memory.py`` measures on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from modelmill.builder.kv_capacity import MAX_STEP_TOKENS, KVCapacityEstimator
from modelmill.builder.rank_memory import (
    RankShardSummary,
    WeightFormatAndShape,
    largest_rank_memory,
    matrix_formats_and_shapes,
    single_rank_memory,
)
from modelmill.builder.segmentation import segmentation_memory_report
from modelmill.builder.tensor_plan import PlannedTensor
from modelmill.checkpoint.open import Checkpoint
from modelmill.core import memory_limits
from modelmill.core.byte_size import format_bytes
from modelmill.core.errors import UsageError
from modelmill.core.model_family import LANGUAGE_ENGINE_TYPE
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.kv import QUANTIZED_KV_DTYPES, ModelKVCacheSpec, kv_cache_dtype
from modelmill.nn.latent_attention import KV_UP_PROJECTION
from modelmill.ops import registry
from modelmill.quant.calibration_state import BATCH_TOKENS, EMBEDDING_MODULES
from modelmill.weights.base import UNPACKED_MEMORY_FRACTION, unpack_op_and_nbytes

if TYPE_CHECKING:
    from modelmill.builder.plan import BuildPlan

MIB = 1 << 20
LATE_IMPORT_BYTES = 20 * MIB
"""Memory that the process loads after the plan: the runtime's modules and the kernels."""
WRITE_BASE_BYTES = 40 * MIB
CALIBRATION_BASE_BYTES = 25 * MIB
ACCEPTANCE_BASE_BYTES = 60 * MIB
ENCODER_CHECK_BASE_BYTES = 110 * MIB
"""Allocations of a stage for a model of size zero: buffers of threads, KV pages of the acceptance
text.
"""
GPU_CALIBRATION_BASE_BYTES = 130 * MIB
"""Host memory of calibration on a GPU for a model of size zero: buffers of threads."""
DEQUANT_BYTES_PER_WEIGHT = 9
"""Bytes per weight while a packed tensor of a checkpoint is expanded to float32: input and result.
"""
QUANTIZE_BYTES_PER_WEIGHT = 12
"""Bytes per weight while a matrix is rounded: in float32, divided by its scales, and rounded."""
ACCEPTANCE_ROWS = 128
"""Rows of the acceptance text whose logits are compared (``accept.sequence_logits_check``)."""
NUM_LOGITS_TENSORS = 3.8
"""Tensors of these rows' logits in float32: the engine's, the reference's, and their difference."""
MAX_LOGITS_PER_BLOCK, NUM_BLOCK_LOGITS_TENSORS = 1 << 21, 6
"""Logits that are in float64 at a time (``accept.error_metrics``), and tensors made of them."""
CALIBRATION_FRAGMENTATION = 1.1
"""Ratio of allocated memory to the calibration tensors' size, because of fragmentation."""
CONV_ENCODER_CHECK_BUFFERS = 4.5
"""Number of float32 buffers, each the size of the widest layer of one image, held while an engine
with a convolutional encoder is checked.
"""
VIT_REFERENCE_SCORE_MATRICES = 7
"""Float32 scores of one head over a whole image that the reference of a ViT holds at once."""
GPU_MEMORY_UTILIZATION = 0.9
"""Share of a device's memory that an engine uses."""
DOES_NOT_FIT_PREFIX = "does not fit"
"""How the report begins of a model whose weights are too large (``fit_advice`` says what fits)."""
LM_HEAD_ROWS_PER_BLOCK = 4096
"""Rows of the vocabulary that the reference converts to float32 at a time."""


@dataclass(frozen=True)
class BuildMemory:
    """Bytes at the peak of a build.

    Attributes:
        projected_process_bytes: resident before the build, with later imports.
        mapped_bytes: pages of the checkpoint and of the engine.
        write_buffer_bytes: allocated by this stage; 0 for a stage that is skipped.
        calibration_bytes: likewise.
        acceptance_bytes: likewise.
    """

    projected_process_bytes: int
    mapped_bytes: int
    write_buffer_bytes: int
    calibration_bytes: int
    acceptance_bytes: int

    @property
    def peak_buffer_bytes(self) -> int:
        """Return the bytes that must be free when the build starts."""
        return max(self.write_buffer_bytes, self.calibration_bytes, self.acceptance_bytes)

    @property
    def peak_bytes(self) -> int:
        """Return the largest resident size."""
        return self.projected_process_bytes + self.mapped_bytes + self.peak_buffer_bytes

    def without_acceptance(self) -> BuildMemory:
        """Return the memory of the same build with --no-check."""
        return BuildMemory(
            self.projected_process_bytes,
            self.mapped_bytes,
            self.write_buffer_bytes,
            self.calibration_bytes,
            0,
        )

    def check_free_memory(self, checkpoint_name: str, *, with_acceptance: bool) -> None:
        """Check that enough memory is free.

        Args:
            checkpoint_name: for the message.
            with_acceptance: False for --no-check.

        Raises:
            UsageError: if too little memory is free.
        """
        needed = self if with_acceptance else self.without_acceptance()
        free = memory_limits.read_memory_info().free
        if needed.peak_buffer_bytes <= free:
            return
        less = self.without_acceptance().peak_buffer_bytes
        way = f"; --no-check needs {format_bytes(less)}" if with_acceptance and less <= free else ""
        raise UsageError(
            f"the build of {checkpoint_name} needs {format_bytes(needed.peak_buffer_bytes)} of "
            "memory "
            f"and {format_bytes(free)} are free: "
            f"give it more memory, or build on a larger machine{way}"
        )


def estimate_build_memory(plan: BuildPlan) -> BuildMemory:
    """Return the memory of the build itself, including acceptance."""
    shared = (
        projected_process_bytes(),
        mapped_bytes(plan.checkpoint, plan.tensors),
    )
    writing = write_buffer_bytes(plan.checkpoint, plan.tensors)
    if plan.engine_type != LANGUAGE_ENGINE_TYPE:
        encoder, itemsize = plan.model_config.encoder, plan.dtype.itemsize
        encoding = encoder_acceptance_bytes(encoder, _image_encoder_workspace_bytes(plan), itemsize)
        return BuildMemory(*shared, writing, 0, encoding)
    judging = acceptance_bytes(
        plan.checkpoint, plan.tensors, plan.model_config.vocab, plan.model_config.hidden
    )
    judging += min(
        _weight_unpacking_extra_bytes(plan, matrix_formats_and_shapes(plan)),
        int(UNPACKED_MEMORY_FRACTION * memory_limits.read_memory_info().free),
    )
    calibrating = 0
    if plan.calibration is not None and plan.device == "cuda":
        # the tokens, their statistics and the layer are on the GPU; here one is read, and one
        # read ahead
        calibrating = gpu_calibration_host_bytes(plan.tensors)
    elif plan.calibration is not None:
        tokens = plan.calibration.num_samples * plan.calibration.max_length
        kv = _kv_shape(plan)
        calibrating = calibration_bytes(
            plan.tensors,
            tokens,
            plan.model_config.hidden,
            plan.model_config.inner,
            2 * kv.kv_heads * kv.head_dim
            + _recurrent_state_elements_per_token(plan)
            + plan.per_layer_input_size,
            needs_hessian=plan.recipe is not None and plan.recipe.needs_hessian,
        )
    return BuildMemory(*shared, writing, calibrating, judging)


def memory_report(plan: BuildPlan) -> dict[str, Any]:
    """Return the memory in bytes now and at run time, and the largest batch × length.

    If none fits, it contains the reason.
    """
    room = _device_memory_bytes(plan.config.target)
    if plan.engine_type == LANGUAGE_ENGINE_TYPE:
        return _runtime_memory_report(plan, single_rank_memory(plan), room) | _build_memory_report(
            plan
        )
    weights = plan.weight_bytes + _weight_unpacking_extra_bytes(
        plan, matrix_formats_and_shapes(plan)
    )
    report = segmentation_memory_report(plan.model_config, weights, room, plan.dtype.itemsize)
    return report | _build_memory_report(plan)


def largest_rank_memory_report(
    plan: BuildPlan, ranks: int, expert_parallel: bool = False
) -> dict[str, Any]:
    """Return the same of the largest of some ranks that run a language model together.

    Args:
        plan: The plan.
        ranks: How many there are, on a device each; on a CPU they share its memory.
        expert_parallel: Whether they divide whole experts.

    Raises:
        UsageError: the model cannot be split over so many ranks.
    """
    memory = largest_rank_memory(plan, ranks, expert_parallel)
    total, free = _device_memory_bytes(plan.config.target)
    if plan.config.target == "cpu":
        total, free = total // ranks, free // ranks
    return _runtime_memory_report(plan, memory, (total, free), ranks) | _build_memory_report(plan)


def _build_memory_report(plan: BuildPlan) -> dict[str, Any]:
    return {
        "build_peak": plan.build_memory.peak_bytes,
        "build_mapped": plan.build_memory.mapped_bytes,
    }


def _runtime_memory_report(
    plan: BuildPlan, memory: RankShardSummary, device: tuple[int, int], ranks: int = 1
) -> dict[str, Any]:
    """Return the memory at run time of a rank.

    device: total and free bytes of what it may have. ranks: how many there are.
    """
    total, free = device
    expanded = _weight_unpacking_extra_bytes(plan, memory.matrices) + _mla_up_projection_copy_bytes(
        plan, ranks
    )
    workspace = MAX_STEP_TOKENS * _step_activation_channels(plan, ranks) * plan.dtype.itemsize
    left = int(total * GPU_MEMORY_UTILIZATION) - memory.weight_bytes - expanded - workspace
    kv_dtype = kv_cache_dtype(plan.config.kv_cache_dtype, plan.dtype)
    # each sequence has a state, a copy of it in the prefix cache, and there is one for padding
    per_seq = 2 * memory.state.slot_bytes(plan.dtype)
    room = max(left - per_seq // 2, 0)
    pages = KVCapacityEstimator(memory.kv, kv_dtype)
    full = pages.max_concurrent_sequences(plan.max_model_len, room, per_seq)
    tokens = plan.max_model_len * full  # of a model without attention
    if pages.token_bytes:
        tokens = max(room - max(full, 1) * per_seq, 0) // pages.token_bytes
    if full < 1:
        tokens = pages.max_sequence_length(plan.max_model_len, room - per_seq)
    if left <= 0:
        needed = format_bytes(memory.weight_bytes + expanded + workspace)
        verdict = (
            f"{DOES_NOT_FIT_PREFIX}: weights and workspace need {needed}, the device has "
            f"{format_bytes(total)}"
        )
    else:
        verdict = _describe_capacity(plan, memory.kv, full, tokens)
    return {
        "ranks": ranks,
        "device_total": total,
        "device_free": free,
        "weights": memory.weight_bytes,
        "expanded": expanded,
        "kv_per_token": memory.kv.token_bytes(kv_dtype),
        "kv_per_token_8bit": memory.kv.token_bytes(QUANTIZED_KV_DTYPES["int8"]),
        "kv_page_groups": pages.describe_page_groups(plan.max_model_len),
        "state_per_sequence": memory.state.slot_bytes(plan.dtype),
        "workspace": workspace,
        "kv_tokens": tokens,
        "max_batch_at_max_len": full,
        "fits": verdict,
    }


def _weight_unpacking_extra_bytes(plan: BuildPlan, matrices: Iterable[WeightFormatAndShape]) -> int:
    """Return the additional bytes of expanded weights on a CPU without a compiled kernel.

    They are expanded once at load, as far as memory allows (``loader.unpack_weights``).
    """
    if plan.config.target != "cpu":
        return 0
    chosen = registry.select_backends("cpu", plan.config.kernels).backends
    sizes = [unpack_op_and_nbytes(*each, plan.dtype) for each in matrices]
    total = sum(size for op, size in filter(None, sizes) if chosen[op] == "torch")
    return min(
        total,
        int(
            UNPACKED_MEMORY_FRACTION
            * max(memory_limits.read_memory_info().total - plan.weight_bytes, 0)
        ),
    )


def _step_activation_channels(plan: BuildPlan, ranks: int) -> int:
    """Return the channels per token that a rank's step holds at once."""
    config = plan.model_config
    inner = -(-config.inner // ranks)
    # a family may have a config of its own
    latent = config.latent_attention if isinstance(config, DecoderConfig) else None
    attention = 0 if latent is None else -(-latent.heads // ranks) * latent.step_channels_per_head
    return max(8 * inner, 16 * config.hidden, attention)


def _mla_up_projection_copy_bytes(plan: BuildPlan, ranks: int) -> int:
    """Return the bytes of the copies that latent attention keeps on a CPU, of a rank's heads."""
    if plan.config.target != "cpu" or plan.dtype.itemsize != 2:
        return 0
    ends = f".{KV_UP_PROJECTION}"
    total = sum(each.nbytes for each in plan.tensors if each.rule.target.endswith(ends))
    return -(-total // ranks)


def _describe_capacity(plan: BuildPlan, kv: ModelKVCacheSpec, full: int, tokens: int) -> str:
    """Say how many sequences fit: ``full`` of the longest, or ``tokens`` of one."""
    longest, state = plan.max_model_len, " with its recurrent state" if plan.state else ""
    if full < 1:
        return f"{longest} tokens{state} do not fit; the longest that do: --max-model-len {tokens}"
    if plan.state:
        return f"{full} sequences of {longest} tokens with their recurrent states"
    if kv.window is not None:
        return f"{full} sequences of {longest} tokens, of which the last {kv.window} are kept"
    if kv.groups:
        return f"{full} sequences of {longest} tokens, or {tokens} tokens in short sequences"
    return f"{full} sequences of {longest} tokens, or {tokens} tokens in any mixture"


def _recurrent_state_elements_per_token(plan: BuildPlan) -> int:
    """Return the largest state of a layer, as elements of float32 per calibration token."""
    assert plan.calibration is not None, "a plan that calibrates"
    widest = max((each.nbytes(torch.float32) for each in plan.state.states), default=0)
    return -(-widest // (4 * plan.calibration.max_length))


def _kv_shape(plan: BuildPlan) -> ModelKVCacheSpec:
    assert plan.kv is not None, "a language model has a KV cache"
    return plan.kv


def _image_encoder_workspace_bytes(plan: BuildPlan) -> int:
    """Return the bytes of an image engine's widest layer in float32 in the reference."""
    return int(segmentation_memory_report(plan.model_config, 0, (0, 0), 4)["workspace"])


def _device_memory_bytes(target: str) -> tuple[int, int]:
    """Return (total, free) bytes of the device; the CPU's if the target does not exist here."""
    if target == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total, free
    return memory_limits.read_memory_info()


def projected_process_bytes() -> int:
    """Return the resident memory of this process now, with what a build still loads."""
    return int(psutil.Process().memory_info().rss) + LATE_IMPORT_BYTES


def mapped_bytes(checkpoint: Checkpoint, planned_tensors: Sequence[PlannedTensor]) -> int:
    """Return the bytes of the checkpoint's tensors that are read, and of the engine."""
    sources = {name for planned in planned_tensors for name in planned.rule.sources}
    return sum(checkpoint.tensor_info(name).nbytes for name in sources) + sum(
        planned.nbytes for planned in planned_tensors
    )


def write_buffer_bytes(checkpoint: Checkpoint, planned_tensors: Sequence[PlannedTensor]) -> int:
    """Return the bytes while tensors are written: the most expensive tensor, and the next one."""
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
        max(read, own + pack) + after for read, own, pack, after in zip(reads, kept, packs, follows)
    )
    return WRITE_BASE_BYTES + max(peaks, default=0)


def read_buffer_bytes(checkpoint: Checkpoint, planned: PlannedTensor) -> int:
    """Return the bytes allocated while a tensor is read; 0 if it is mapped."""
    count = torch.Size(planned.shape).numel()
    infos = [checkpoint.tensor_info(name) for name in planned.rule.sources]
    if planned.prequantized_weight is not None:
        return planned.nbytes
    if any(is_computed_on_read(checkpoint, info.name) for info in infos):
        return DEQUANT_BYTES_PER_WEIGHT * count
    return count * infos[0].decoded_dtype.itemsize if len(infos) > 1 else 0


def pack_buffer_bytes(planned: PlannedTensor, num_weights: int) -> int:
    """Return the bytes allocated while a tensor is packed: for a cast, or for rounding."""
    return (
        planned.nbytes
        if planned.weight_format in (None, "dense")
        else QUANTIZE_BYTES_PER_WEIGHT * num_weights
    )


def is_computed_on_read(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether reading a tensor computes new values, so that it is not mapped."""
    info = checkpoint.tensor_info(name)
    return info.nbytes < info.numel * info.decoded_dtype.itemsize


def acceptance_bytes(
    checkpoint: Checkpoint,
    planned_tensors: Sequence[PlannedTensor],
    vocab_size: int,
    hidden_size: int,
) -> int:
    """Return the bytes while a language engine is checked.

    It is the larger of a layer in float32 and the rows of logits that are compared.
    """
    head = next((p for p in planned_tensors if p.module == "head"), None) or next(
        p for p in planned_tensors if p.module == "embed"
    )
    expanded = any(is_computed_on_read(checkpoint, name) for name in head.rule.sources)
    table = 4 * vocab_size * hidden_size if expanded else 0
    logits = int(
        NUM_LOGITS_TENSORS * 4 * ACCEPTANCE_ROWS * vocab_size
    ) + 8 * NUM_BLOCK_LOGITS_TENSORS * min(MAX_LOGITS_PER_BLOCK, ACCEPTANCE_ROWS * vocab_size)
    logits += 4 * min(LM_HEAD_ROWS_PER_BLOCK, vocab_size) * hidden_size
    weights = largest_layer_float32_bytes(planned_tensors) // 4
    # the checkpoint's layer in float32, the quantized engine's, and blocks of both that are
    # compared
    rounded = any(
        p.weight_format not in (None, "dense")
        for p in planned_tensors
        if p.decoder_layer is not None
    )
    return ACCEPTANCE_BASE_BYTES + max(logits + table, weights * (9 if rounded else 5))


def calibration_bytes(
    planned_tensors: Sequence[PlannedTensor],
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    kv_size: int,
    *,
    needs_hessian: bool,
) -> int:
    """Return the bytes while a recipe reads calibration tokens.

    These are the embedding, a layer (three times at its widest matrix), the statistics of one site,
    the tokens at the widest site, and for one batch the activations between two sites.

    kv_size: elements of keys and values per token in a layer, and of layers' inputs beside the
    stream. needs_hessian: whether the recipe
    uses the Hessian.
    """
    embed = sum(module_float32_bytes(planned_tensors, part) for part in EMBEDDING_MODULES)
    layer = largest_layer_float32_bytes(planned_tensors)
    widest = max(intermediate_size, hidden_size)
    values = (
        num_tokens * (2 * hidden_size + widest + kv_size)
        + min(num_tokens, BATCH_TOKENS) * 2 * widest
    )
    statistics = 4 * 4 * widest**2 if needs_hessian else 0
    return (
        CALIBRATION_BASE_BYTES
        + embed
        + 3 * layer
        + statistics
        + int(CALIBRATION_FRAGMENTATION * 4 * values)
    )


def encoder_acceptance_bytes(encoder: Any, workspace_bytes: int, itemsize: int) -> int:
    """Return the bytes while an image engine is checked: one image through engine and reference.

    workspace_bytes: its widest layer in float32. itemsize: of the engine's activations, including
    the position bias and the scores.
    """
    if not hasattr(encoder, "inner"):  # not a pure transformer
        return ENCODER_CHECK_BASE_BYTES + int(CONV_ENCODER_CHECK_BUFFERS * workspace_bytes)
    tokens = encoder.tokens_per_side**2
    branches = 2 * 3 * tokens * max(3 * encoder.width, encoder.inner) * 4
    return int(
        ENCODER_CHECK_BASE_BYTES
        + branches
        + tokens**2 * (4 * VIT_REFERENCE_SCORE_MATRICES + 2 * encoder.heads * itemsize)
    )


def gpu_calibration_host_bytes(planned_tensors: Sequence[PlannedTensor]) -> int:
    """Return the bytes while layers are read for calibration on a GPU.

    In float32, they are the embedding, or a layer and the next one.
    """
    return GPU_CALIBRATION_BASE_BYTES + max(
        sum(module_float32_bytes(planned_tensors, part) for part in EMBEDDING_MODULES),
        2 * largest_layer_float32_bytes(planned_tensors),
    )


def largest_layer_float32_bytes(planned_tensors: Sequence[PlannedTensor]) -> int:
    """Return the float32 bytes of the largest decoder layer; layers may differ."""
    sizes: Counter[int] = Counter()
    for planned in planned_tensors:
        if planned.decoder_layer is not None:
            sizes[planned.decoder_layer] += 4 * torch.Size(planned.shape).numel()
    return max(sizes.values(), default=0)


def module_float32_bytes(planned_tensors: Sequence[PlannedTensor], prefix: str) -> int:
    """Return the float32 bytes of the tensors of modules whose names begin with ``prefix``."""
    return sum(
        4 * torch.Size(p.shape).numel() for p in planned_tensors if p.module.startswith(prefix)
    )
