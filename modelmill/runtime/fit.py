"""How a loop is fitted to its model and device: how long answers may be, what a step may hold, graphs and buffers."""

from __future__ import annotations

import math

from torch import nn

from modelmill.core.config import RunConfig
from modelmill.core.errors import UsageError
from modelmill.nn.linear import Linear
from modelmill.runtime import memory, prompt_graph
from modelmill.runtime.graph import Graphs
from modelmill.runtime.layout import Layout
from modelmill.runtime.pace import mixed_tokens
from modelmill.runtime.prompt_graph import PromptGraphs, Recorder
from modelmill.runtime.runner import Runner
from modelmill.runtime.scheduler import Limits
from modelmill.weights.held import wanted

LARGEST = 512
"""Sequences of the largest decode graph."""


def longest(model: nn.Module, config: RunConfig, built: int | None) -> int:
    """Tokens of a sequence. built: what the engine was built for. Raises UsageError where more is asked for."""
    most = int(model.config.max_len) if built is None else built  # type: ignore[union-attr, arg-type]
    if config.max_model_len is None:
        return most
    if config.max_model_len > most:
        raise UsageError(f"--max-model-len {config.max_model_len} exceeds the engine's {most}; lower it or rebuild")
    if config.max_model_len < 1:
        raise UsageError(f"--max-model-len must be at least 1, not {config.max_model_len}")
    return config.max_model_len


def limits(model: nn.Module, config: RunConfig, *, on_gpu: bool) -> Limits:
    """What a step may hold; on a GPU the weights decide how many tokens join running answers."""
    mixed = config.max_mixed_tokens
    if mixed is None and on_gpu:
        mixed = mixed_tokens(memory.weight_bytes(model), eight_bits=_in_eight_bits(model))
    return Limits(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.page_size,
        config.enable_prefix_caching,
        mixed,
        together=config.max_mixed_tokens is None,
    )


def _in_eight_bits(model: nn.Module) -> bool:
    """Whether most of the weights take inputs of 8 bits."""
    share = 0
    for module in model.modules():
        if isinstance(module, Linear):
            share += math.prod(module.shape) * (1 if wanted(module.held) is not None else -1)
    return share > 0


def fit_on_gpu(runner: Runner, config: RunConfig, width: int) -> None:
    """Room for the largest step, and graphs where they are wanted. width: pages of the longest sequence."""
    packer, tokens = runner.packer, config.max_num_batched_tokens
    # graphs know the buffer's address: it must never have to grow
    packer.reserve(Layout(tokens, config.max_num_seqs, tokens + config.max_num_seqs, 2 * width))
    if config.cuda_graphs:
        rows, context = min(config.max_num_seqs, LARGEST), width * config.page_size
        runner.graphs = Graphs(runner.forward, runner.sampler.pick, runner.last, packer, rows, context)
        if prompt_graph.wanted(config, runner.mesh):
            runner.prompts = PromptGraphs(runner.forward, Recorder(), tokens, context)
