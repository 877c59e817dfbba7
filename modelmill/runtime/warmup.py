"""Warm-up: compiles every kernel specialization before a request needs it.

Graphs need few specializations, since their sizes are rounded up. A mixed step may be launched
kernel by kernel, if it has many tokens or its graph is not captured yet: the split of attention
depends on the number and length of the sequences, the tile shape of a GEMM on the number of tokens,
and each is a separate kernel. A compilation during serving stops all streams for up to two seconds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from modelmill.core import log
from modelmill.core.quoting import truncate_to_one_line
from modelmill.ops import registry
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.registry import Ops
from modelmill.runtime.model_runner import ModelRunner

_log = log.get_logger(__name__)
# chunk sizes and batch sizes that together use every tile size of the kernels
QUERY_LENS, BATCH_SIZES = (16, 64, 512), (1, 2, 17)
# (tokens, sequences) as in mixed steps: Triton specializes kernels on divisibility by 16
UNALIGNED_STEP_SIZES = ((37, 9), (137, 9), (501, 17))
# GEMM ops whose kernel depends on the number of rows.
ROW_SPECIALIZED_GEMM_OPS = (
    "linear_swiglu",
    "w8a8_linear",
    "w8a8_linear_swiglu",
    "fp8_linear",
    "int4_linear",
    "int4_linear_swiglu",
    "int8_linear",
    "int8_linear_swiglu",
    "int8_group_linear",
    "qkv_rope_cache",
)
# Operands beside x that have one row per row of x: its scales, if per row; slots, angles and query
# factors of qkv_rope_cache.
ROW_OPERANDS = ("x_scale", "slots", "cos", "sin", "q_scale")


@torch.inference_mode()
def warm_up(
    runner: ModelRunner, max_seqs: int, max_tokens: int, *, all_specializations: bool = False
) -> None:
    """Run steps with prompts, so that kernels are compiled, and capture the decode graphs.

    Args:
        runner: Runs the steps, on all ranks.
        max_seqs: Capture the graphs of every batch size up to this, for the shortest contexts.
        max_tokens: Most tokens of a step.
        all_specializations: Also compile all specializations of attention and GEMMs, and capture
            the prefill graphs.
    """
    packer = runner.packer
    for query in QUERY_LENS:
        for seqs in BATCH_SIZES:
            batch = packer.dummy_batch(query, seqs)
            runner.forward_all_ranks(batch)
            if (
                runner.kv.keys_serve_as_values
            ):  # latent attention computes new prompts in another way
                runner.forward_all_ranks(replace(batch, num_decodes=0))
    usual_ops = runner.ops
    attention = AttentionRecorder(usual_ops.paged_attention)
    recording_ops, gemms = wrap_with_gemm_recorders(usual_ops)
    runner.set_ops(recording_ops.replace({"paged_attention": attention}))
    for tokens, seqs in UNALIGNED_STEP_SIZES:
        runner.forward_all_ranks(packer.dummy_batch(tokens, seqs))
    runner.set_ops(usual_ops)
    if all_specializations:
        columns = packer.tables.table.shape[1]
        warm_up_decode_attention(
            usual_ops, attention, max_seqs, columns * packer.page_size, columns
        )
        warm_up_gemms(usual_ops, gemms, max_tokens)
        runner.capture_prefill_graphs()
    runner.capture_decode_graphs(max_seqs)


class AttentionRecorder:
    """Wraps ``paged_attention`` and stores the arguments of one call per layer type."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        self._run = run
        self.calls: dict[tuple[Any, ...], PagedAttentionInputs] = {}

    def __call__(self, inputs: PagedAttentionInputs) -> torch.Tensor:
        """Call the op; keep the first inputs of every specialization."""
        q = inputs.q
        k = inputs.k_cache
        window = inputs.window
        mods = None if inputs.score_mods is None else inputs.score_mods.specialization_key
        self.calls.setdefault((q.shape[1:], q.dtype, k.shape[1:], k.dtype, window, mods), inputs)
        return self._run(inputs)


@torch.inference_mode()
def warm_up_decode_attention(
    ops: Ops, recorder: AttentionRecorder, max_seqs: int, max_len: int, table_columns: int
) -> int:
    """Call attention once for every specialization of decode queries.

    The sequences are empty: nothing is read or stored. Other ranks load the compiled kernels from
    Triton's disk cache.

    Args:
        ops: The ops to call.
        recorder: Calls recorded from a real step.
        max_seqs: Most sequences of a step.
        max_len: Most tokens of a sequence.
        table_columns: Columns of the page tables.

    Returns:
        The number of calls.
    """
    count = 0
    for inputs in recorder.calls.values():
        q, k = inputs.q, inputs.k_cache
        starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=q.device)
        empty = torch.zeros((max_seqs, table_columns), dtype=torch.int32, device=q.device)
        queries = q.new_zeros((max_seqs, *q.shape[1:]))
        for list_cases in registry.warmup_size_functions(
            "paged_attention", ops.backends["paged_attention"]
        ):
            for batch, context in list_cases(q, k, max_seqs, max_len, inputs.window):
                step = inputs._replace(
                    q=queries[:batch],
                    block_tables=empty[:batch],
                    query_start=starts[: batch + 1],
                    context_lens=torch.zeros_like(starts[:batch]),
                    max_query=1,
                    max_context=context,
                )
                ops.paged_attention(step)
                count += 1
    return count


class GemmRecorder:
    """Wraps a GEMM op and stores the arguments of one call per weight shape and dtype."""

    def __init__(self, run: Callable[..., torch.Tensor | None]) -> None:
        self._run = run
        self.calls: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, *args: Any) -> torch.Tensor | None:
        """Call the op; the first operands are x and the weight."""
        x, weight, *rest = _flatten_operands(args)
        kinds = (each if isinstance(each, int) else each is None for each in rest)  # a group size
        key = (x.dtype, weight.shape, weight.dtype, *kinds)
        self.calls.setdefault(key, args)
        return self._run(*args)


def _flatten_operands(args: tuple[Any, ...]) -> list[Any]:
    """The arguments of a call, those put together as inputs one by one."""
    parts = (arg if hasattr(arg, "_fields") else (arg,) for arg in args)
    return list(itertools.chain(*parts))


def wrap_with_gemm_recorders(ops: Ops) -> tuple[Ops, dict[str, GemmRecorder]]:
    """``ops`` with recording GEMM ops, and their recorders by name."""
    recorders = {
        name: GemmRecorder(run)
        for name in ROW_SPECIALIZED_GEMM_OPS
        if (run := getattr(ops, name)) is not None
    }
    return ops.replace(recorders), recorders


def warm_up_gemms(ops: Ops, recorders: Mapping[str, GemmRecorder], max_tokens: int) -> int:
    """Call each GEMM once for every specialization of steps of up to ``max_tokens`` tokens.

    Runs in parallel on the CPU cores: each compilation takes 2 to 4 s. A failure is only logged: it
    will be raised again by a request that needs the kernel.

    Returns:
        The number of successful calls.
    """
    jobs: list[Callable[[], object]] = []
    for name, recorder in recorders.items():
        for args in recorder.calls.values():
            x, weight = _flatten_operands(args)[:2]
            for list_rows in registry.warmup_size_functions(name, ops.backends[name]):
                jobs += [
                    partial(_run_gemm, getattr(ops, name), args, rows)
                    for rows in list_rows(x, weight, max_tokens)
                ]
    count = 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "compile") as pool:
        for future in [pool.submit(job) for job in jobs]:
            try:
                future.result()
                count += 1
            except Exception as error:
                _log.warning(
                    "a GEMM kernel failed in warm-up: %s", truncate_to_one_line(str(error), 300)
                )
    return count


@torch.inference_mode()
def _run_gemm(run: Callable[..., object], args: tuple[Any, ...], rows: int) -> None:
    """Run a GEMM op on ``rows`` zero rows; row operands become ones, and slots −1 (no store)."""
    x = _flatten_operands(args)[0]
    zeros = x.new_zeros((rows, x.shape[1]))

    def resized(arg: Any) -> Any:
        if arg is x:
            return zeros
        if not hasattr(arg, "_fields"):
            return arg
        row_operands = {
            name: _resize_row_operand(value, len(x), rows)
            for name, value in zip(arg._fields, arg, strict=True)
            if name in ROW_OPERANDS
        }
        return arg._replace(**row_operands, **({"x": zeros} if "x" in arg._fields else {}))

    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        run(*map(resized, args))


def _resize_row_operand(arg: torch.Tensor | None, rows: int, new_rows: int) -> torch.Tensor | None:
    """Ones (integers: −1) in the place of an operand with one row per row of x; others as is."""
    if arg is None or arg.dim() == 0 or len(arg) != rows:
        return arg
    return arg.new_full((new_rows, *arg.shape[1:]), 1 if arg.is_floating_point() else -1)
