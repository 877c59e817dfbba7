"""How much fits: the longest sequence, and the KV pages beside the weights and the largest step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from modelmill.core import memory_limits
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import RunConfig
from modelmill.core.errors import CapacityError, UsageError
from modelmill.core.kv_page_counts import max_fitting_length, max_sequence_pages_in_groups
from modelmill.loader.state_capacity import StateCapacity, state_capacity
from modelmill.nn.expert_stack import largest_dequantized_experts_bytes
from modelmill.nn.kv import KVCache, ModelKVCacheSpec, kv_cache_dtype
from modelmill.nn.layer_stack import model_state_shape
from modelmill.nn.linear import Linear
from modelmill.nn.recurrent_state import RecurrentStateCache, make_standalone_step_states
from modelmill.nn.step import Step
from modelmill.nn.whole_model_decode import model_kv_shape
from modelmill.ops.recurrent_metadata import chunk_size_for_page
from modelmill.ops.registry import Ops
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup

CPU_MEMORY_FRACTION = 0.3
MAX_PAGES_WITHOUT_KV = 1 << 16
_GIB = 1 << 30


def resolve_max_model_len(model: nn.Module, config: RunConfig, built_max_len: int | None) -> int:
    """Most tokens of a sequence.

    Args:
        model: The model.
        config: Run options.
        built_max_len: The engine's limit; None: the model's.

    Raises:
        UsageError: ``config.max_model_len`` exceeds the limit.
    """
    limit = int(model.config.max_len) if built_max_len is None else built_max_len  # type: ignore[union-attr, arg-type]
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise UsageError(
            f"--max-model-len {config.max_model_len} exceeds the engine's {limit}; lower it or "
            "rebuild"
        )
    if config.max_model_len < 1:
        raise UsageError(f"--max-model-len must be at least 1, not {config.max_model_len}")
    return config.max_model_len


def determine_num_kv_pages(
    model: nn.Module,
    ops: Ops,
    config: RunConfig,
    kv_dtype: torch.dtype,
    max_model_len: int,
    tp_group: TPGroup = SINGLE_RANK,
    graph_bytes: int = 0,
    state: StateCapacity | None = None,
) -> int:
    """Pages of the KV cache of a loaded model: as configured, or as free memory allows.

    Args:
        model: The model, on its device.
        ops: The ops that it calls.
        config: Run options.
        kv_dtype: Of the cache.
        max_model_len: Most tokens of a sequence.
        tp_group: This rank's group.
        graph_bytes: Device memory that CUDA graphs captured later will take.
        state: The recurrent states, which share the memory.

    Raises:
        CapacityError: Not even one sequence or one step fits, or the configured size exceeds the
            memory.
    """
    weights, device = weight_bytes(model), model_device(model)
    if config.kv_cache_bytes is not None:
        free = config.kv_cache_bytes
    else:
        free = measure_cache_budget_bytes(model, ops, config, tp_group, graph_bytes)
        free -= 0 if state is None else state.nbytes
    shape = model_kv_shape(model, max_model_len, ops.decode, kv_dtype, ranks=tp_group.size)
    pages = kv_pages_for_bytes(shape, kv_dtype, config, max_model_len, free, weights, tp_group)
    if device == "cpu":
        _check_cache_fits_in_ram(
            (pages + 1) * shape.page_bytes(config.page_size, kv_dtype) * tp_group.size
        )
    return pages


def measure_cache_budget_bytes(
    model: nn.Module, ops: Ops, config: RunConfig, tp_group: TPGroup, graph_bytes: int = 0
) -> int:
    """Bytes of free memory for KV pages and recurrent states, as ``determine_num_kv_pages``."""
    if not model_device(model).startswith("cuda"):
        return cpu_kv_cache_budget(tp_group.size)
    try:
        return _measure_available_bytes(model, ops, config, tp_group) - graph_bytes
    except torch.OutOfMemoryError:
        raise CapacityError(
            f"a step of {config.max_num_batched_tokens} tokens does not fit beside "
            f"{weight_bytes(model) / _GIB:.2f} GiB of "
            "weights; lower --max-num-batched-tokens or --max-num-seqs"
        ) from None


def model_state_capacity(
    model: nn.Module, ops: Ops, config: RunConfig, tp_group: TPGroup, graph_bytes: int = 0
) -> StateCapacity | None:
    """The slots of recurrent state of a loaded model; None for a model without any.

    Raises:
        CapacityError: Not even one sequence's state fits.
    """
    shape = model_state_shape(model)
    if not shape:
        return None
    needed = config.state_cache_bytes is None
    free = measure_cache_budget_bytes(model, ops, config, tp_group, graph_bytes) if needed else 0
    capacity = state_capacity(shape, activation_dtype(model), config, free, tp_group)
    if capacity is not None and model_device(model) == "cpu":
        _check_cache_fits_in_ram(capacity.nbytes * tp_group.size, "states", "--state-cache-bytes")
    return capacity


def kv_pages_for_bytes(
    shape: ModelKVCacheSpec,
    dtype: torch.dtype,
    config: RunConfig,
    max_model_len: int,
    free_bytes: int,
    weights: int = 0,
    tp_group: TPGroup = SINGLE_RANK,
) -> int:
    """Pages for ``free_bytes``, or for ``config.kv_cache_bytes``; at most as many as can be used.

    All ranks get the smallest number of any rank, since they share page numbers.

    Args:
        shape: Of the model's cache.
        dtype: Of the cache.
        config: Run options.
        max_model_len: Most tokens of a sequence.
        free_bytes: Memory for pages.
        weights: Bytes of the weights, for the message.
        tp_group: This rank's group.

    Raises:
        CapacityError: Not even one sequence of ``max_model_len`` tokens fits.
    """
    size = shape.page_bytes(config.page_size, dtype)
    longest = -(-max_model_len // config.page_size) * len(shape.group_windows)
    groups = config.page_size, shape.group_windows, config.max_num_batched_tokens
    per_seq = max_sequence_pages_in_groups(max_model_len, *groups)
    if not size:  # pages of a model without attention only number its tokens
        return min(per_seq * config.max_num_seqs, max(per_seq, MAX_PAGES_WITHOUT_KV))
    available = free_bytes if config.kv_cache_bytes is None else config.kv_cache_bytes
    # one page is reserved: kernels write padding there
    pages = min(tp_group.all_reduce_min(available // size) - 1, longest * config.max_num_seqs)
    if pages < per_seq:
        max_len = max_fitting_length(max_model_len, *groups, pages)
        source = "free memory gives" if config.kv_cache_bytes is None else "--kv-cache-bytes gives"
        advice = (
            f"--max-model-len {max_len} would fit"
            if max_len
            else "free memory or use a smaller model or dtype"
        )
        beside_weights = f" beside {format_bytes(weights)} of weights" if weights else ""
        raise CapacityError(
            f"one sequence of {max_model_len} tokens needs {format_bytes((per_seq + 1) * size)} "
            "of KV cache, "
            f"{source} {format_bytes(max(available, 0))}{beside_weights}; {advice}"
        )
    return pages


def max_idle_prefix_cache_pages(config: RunConfig, pages: int, page_bytes: int, device: str) -> int:
    """``max_idle`` of the page pool: most pages that the prefix cache keeps idle."""
    if not config.enable_prefix_caching:
        return 0
    if not page_bytes:
        return pages
    if config.prefix_cache_bytes is not None:
        return min(config.prefix_cache_bytes // page_bytes, pages)
    if device == "cpu" and config.kv_cache_bytes is None:
        return memory_limits.max_cached_prefix_bytes(pages * page_bytes) // page_bytes
    return pages


def _check_cache_fits_in_ram(
    required_bytes: int, what: str = "KV cache", option: str = "--kv-cache-bytes"
) -> None:
    """Raise CapacityError if a cache in RAM exceeds the process's memory.

    Pages take memory when first written, so the process would be killed in the middle of a request.
    """
    total = memory_limits.read_memory_info().total
    if required_bytes > total:
        raise CapacityError(
            f"the {what} would take {format_bytes(required_bytes)}, and this process may have "
            f"{format_bytes(total)}; "
            f"lower {option}"
        )


def cpu_kv_cache_budget(ranks: int = 1, reserved_bytes: int = 0) -> int:
    """Bytes of RAM for one rank's KV cache: CPU_MEMORY_FRACTION of the free memory.

    Args:
        ranks: Ranks on this machine.
        reserved_bytes: Memory needed for other purposes.
    """
    return (
        int(max(memory_limits.read_memory_info().free - reserved_bytes, 0) * CPU_MEMORY_FRACTION)
        // ranks
    )


def total_gpu_bytes(device: str) -> int:
    """Memory of a GPU in bytes; 0 of a CPU, which captures no graphs."""
    return torch.cuda.mem_get_info(torch.device(device))[1] if device != "cpu" else 0


def _measure_available_bytes(
    model: nn.Module, ops: Ops, config: RunConfig, tp_group: TPGroup
) -> int:
    """Bytes left for KV pages after weights and the largest step, measured by running one."""
    index = torch.device(model_device(model))
    torch.cuda.synchronize(index)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(index)
    torch.cuda.reset_peak_memory_stats(index)
    _run_largest_step(model, ops, config, tp_group)
    torch.cuda.synchronize(index)
    peak = torch.cuda.max_memory_allocated(index) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(index)
    # for graphs, the sampler's tables, fragmentation, and experts that only fused layers dequantize
    reserve = _GIB // 2 + peak // 8 + largest_dequantized_experts_bytes(model, total)
    return int(total * config.gpu_memory_utilization) - (total - free) - peak - reserve


@torch.inference_mode()
def _run_largest_step(model: nn.Module, ops: Ops, config: RunConfig, tp_group: TPGroup) -> None:
    """Run a step with the most tokens, in sequences of one page that all write to the same page.

    Latent attention runs in both its ways: as of prompts that begin, and as of chunks with a
    history, which takes more memory where heads are many.
    """
    size, shape, device = config.page_size, model.kv, model_device(model)
    assert isinstance(shape, ModelKVCacheSpec)
    dtype = kv_cache_dtype(config.kv_cache_dtype, activation_dtype(model))
    count = max(config.max_num_batched_tokens // size, 1)
    kv = KVCache.allocate(shape, 1, size, dtype, device)
    positions = torch.arange(size, device=device).repeat(count)
    starts = torch.arange(0, (count + 1) * size, size, dtype=torch.int32, device=device)
    step = Step(
        ids=torch.zeros_like(positions),
        positions=positions,
        slots=positions.clone(),
        rope_frequency_ids=torch.zeros_like(positions),
        block_tables=torch.zeros(count, 1, dtype=torch.int32, device=device),
        query_start=starts,
        context_lens=torch.full((count,), size, dtype=torch.int32, device=device),
        logit_rows=torch.zeros(config.max_num_seqs, dtype=torch.int64, device=device),
        max_query=size,
        max_context=size,
        kv=kv,
        ops=ops,
        tp_group=tp_group,
        num_decodes=0,
        state=make_standalone_step_states(
            model_state_shape(model),
            starts,
            positions,
            activation_dtype(model),
            max_query=size,
            chunk=chunk_size_for_page(size),
            cache=RecurrentStateCache.allocate_shared_scratch(
                model_state_shape(model), count + 1, activation_dtype(model), device
            ),
        ),
    )
    logits = model(step)
    # sampling needs a second buffer of this size
    torch.empty_like(logits)
    del logits
    if shape.keys_serve_as_values:
        model(replace(step, num_decodes=None))


def model_device(model: nn.Module) -> str:
    """The device of a model: that of its embedding."""
    weight = model.embed.weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.Tensor)
    return str(weight.device)


def activation_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of activations (and of a KV cache that is not 8-bit): that of the embedding."""
    weight = model.embed.weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.Tensor)
    return weight.dtype


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights and their unpacked copies; shared tensors are counted once."""
    size_by_address: dict[int, int] = {}
    for module in model.modules():
        tensors = [*module.buffers(recurse=False)]
        weight = getattr(module, "weight", None) if isinstance(module, Linear) else None
        if weight is not None:
            tensors += [*weight.tensors().values(), *weight.extra_unpacked_tensors()]
        for t in tensors:
            size_by_address[t.data_ptr()] = t.numel() * t.element_size()
    return sum(size_by_address.values())


def has_mostly_8bit_inputs(model: nn.Module) -> bool:
    """Whether most of the weights take 8-bit inputs."""
    balance = 0
    for module in model.modules():
        if isinstance(module, Linear):
            balance += math.prod(module.shape) * (
                1 if module.weight.input_quant_spec is not None else -1
            )
    return balance > 0
