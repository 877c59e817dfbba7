"""Fits an engine core to its model and device: sequence length, step limits, graphs and buffers."""

from __future__ import annotations

import math

from torch import nn

from modelmill.core.config import RunConfig
from modelmill.core.errors import UsageError
from modelmill.nn.linear import Linear
from modelmill.parallel.tp_group import TPGroup
from modelmill.runtime import kv_memory, prefill_graphs
from modelmill.runtime.batch import Packer
from modelmill.runtime.batch_layout import BatchLayout
from modelmill.runtime.chunked_prefill import max_mixed_tokens
from modelmill.runtime.model_runner import GraphLimits
from modelmill.runtime.scheduler import SchedulerLimits

MAX_GRAPH_SEQS = 512
"""Sequences of the largest decode graph."""


def max_sequence_len(model: nn.Module, config: RunConfig, built_max_len: int | None) -> int:
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


def scheduler_limits(model: nn.Module, config: RunConfig, *, on_gpu: bool) -> SchedulerLimits:
    """Limits of a step; on a GPU the size of the weights decides ``max_mixed_tokens``."""
    mixed = config.max_mixed_tokens
    if mixed is None and on_gpu:
        mixed = max_mixed_tokens(
            kv_memory.weight_bytes(model), inputs_8bit=_mostly_8bit_inputs(model)
        )
    return SchedulerLimits(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.page_size,
        config.enable_prefix_caching,
        mixed,
        prefill_all_first=config.max_mixed_tokens is None,
    )


def _mostly_8bit_inputs(model: nn.Module) -> bool:
    """Whether most of the weights take 8-bit inputs."""
    balance = 0
    for module in model.modules():
        if isinstance(module, Linear):
            balance += math.prod(module.shape) * (1 if module.weight.act_quant is not None else -1)
    return balance > 0


def reserve_step_buffers(packer: Packer, config: RunConfig, max_pages_per_seq: int) -> None:
    """Reserve the buffers of the largest step.

    Graphs contain the buffer's address, so it must never be reallocated.
    """
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    packer.reserve(BatchLayout(tokens, seqs, tokens + seqs, 2 * max_pages_per_seq))


def graph_limits(
    config: RunConfig, max_pages_per_seq: int, tp_group: TPGroup
) -> GraphLimits | None:
    """Which CUDA graphs are captured on a GPU; None: none."""
    if not config.cuda_graphs:
        return None
    with_prefill = prefill_graphs.prefill_graphs_enabled(config, tp_group)
    return GraphLimits(
        min(config.max_num_seqs, MAX_GRAPH_SEQS),
        max_pages_per_seq * config.page_size,
        config.max_num_batched_tokens if with_prefill else None,
    )
