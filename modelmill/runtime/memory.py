"""How many KV pages there are."""

from __future__ import annotations

import torch
from torch import nn

from modelmill.core import ram
from modelmill.core.config import RunConfig
from modelmill.core.errors import CapacityError
from modelmill.core.size import byte_text
from modelmill.nn.kv import KVCache, KVShape, held_dtype
from modelmill.nn.step import Step
from modelmill.ops.shelf import Ops
from modelmill.parallel.mesh import ALONE, Mesh
from modelmill.runtime import prompt_graph
from modelmill.weights.held import expanded_tensors

CPU_SHARE = 0.3
_GIB = 1 << 30


def count_pages(
    model: nn.Module, ops: Ops, config: RunConfig, kv_dtype: torch.dtype, max_model_len: int, mesh: Mesh = ALONE
) -> int:
    """Pages of the KV cache of a loaded model: what was asked for, or what its device has free.

    Raises CapacityError where not even one sequence, or one step, fits, or where more is asked for than there is.
    """
    held, device = weight_bytes(model), device_of(model)
    if config.kv_cache_bytes is not None:
        free = config.kv_cache_bytes
    elif device.startswith("cuda"):
        try:
            free = free_on_cuda(model, ops, config, device, config.max_num_seqs, mesh)
        except torch.OutOfMemoryError:
            raise CapacityError(
                f"a step of {config.max_num_batched_tokens} tokens does not fit beside {held / _GIB:.2f} GiB of "
                "weights; lower --max-num-batched-tokens or --max-num-seqs"
            ) from None
    else:
        free = free_on_cpu(mesh.size)
    shape = model.kv
    assert isinstance(shape, KVShape)
    pages = page_count(shape, kv_dtype, config, max_model_len, free, held, mesh)
    if device == "cpu":
        _refuse_more_than_there_is((pages + 1) * shape.page_bytes(config.page_size, kv_dtype) * mesh.size)
    return pages


def page_count(
    shape: KVShape,
    dtype: torch.dtype,
    config: RunConfig,
    max_model_len: int,
    free: int,
    weights: int = 0,
    mesh: Mesh = ALONE,
) -> int:
    """Pages for ``free`` bytes, or for ``config.kv_cache_bytes``; no more than the limits can ever use.

    mesh: the page of a sequence has the same number on every rank, so all have as many as the one with the fewest.
    Raises CapacityError where not even one sequence of ``max_model_len`` tokens fits.
    """
    size = shape.page_bytes(config.page_size, dtype)
    per_seq = -(-max_model_len // config.page_size)
    given = free if config.kv_cache_bytes is None else config.kv_cache_bytes
    # one page is the scrap page that padding is written to
    pages = min(mesh.least(given // size) - 1, per_seq * config.max_num_seqs)
    if pages < per_seq:
        longest = max(pages, 0) * config.page_size
        source = "free memory gives" if config.kv_cache_bytes is None else "--kv-cache-bytes gives"
        advice = f"--max-model-len {longest} would fit" if longest else "free memory or use a smaller model or dtype"
        held = f" beside {byte_text(weights)} of weights" if weights else ""
        raise CapacityError(
            f"one sequence of {max_model_len} tokens needs {byte_text((per_seq + 1) * size)} of KV cache, "
            f"{source} {byte_text(max(given, 0))}{held}; {advice}"
        )
    return pages


def kept_pages(config: RunConfig, pages: int, page_bytes: int, device: str) -> int:
    """Of ``pages``, those that may be taken for kept prefixes before older ones give theirs up."""
    if not config.enable_prefix_caching:
        return 0
    if config.prefix_cache_bytes is not None:
        return min(config.prefix_cache_bytes // page_bytes, pages)
    if device == "cpu" and config.kv_cache_bytes is None:
        return ram.prefix_bytes(pages * page_bytes) // page_bytes
    return pages


def _refuse_more_than_there_is(wanted: int) -> None:
    """Pages in RAM are backed as they are written: too many would end the process in the middle of an answer."""
    total = ram.memory().total
    if wanted > total:
        raise CapacityError(
            f"the KV cache would take {byte_text(wanted)}, and this process may have {byte_text(total)}; "
            "lower --kv-cache-bytes"
        )


def free_on_cpu(ranks: int = 1, aside: int = 0) -> int:
    """Bytes of RAM that a KV cache may take: a share, since pages are only backed by memory once they are written.

    aside: bytes that are for others.
    """
    return int(max(ram.memory().free - aside, 0) * CPU_SHARE) // ranks


def free_on_cuda(model: nn.Module, ops: Ops, config: RunConfig, device: str, rows: int, mesh: Mesh = ALONE) -> int:
    """Bytes left for KV pages after weights and the largest step, measured by running one.

    rows: most rows of logits that a step samples.
    """
    index = torch.device(device)
    torch.cuda.synchronize(index)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(index)
    torch.cuda.reset_peak_memory_stats(index)
    _largest_step(model, ops, config, device, rows, mesh)
    torch.cuda.synchronize(index)
    peak = torch.cuda.max_memory_allocated(index) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(index)
    # graphs of decode steps and of prompts, the sampler's tables and fragmentation
    reserve = _GIB // 2 + peak // 8 + (prompt_graph.MOST_BYTES if prompt_graph.wanted(config, mesh) else 0)
    return int(total * config.gpu_memory_utilization) - (total - free) - peak - reserve


@torch.inference_mode()
def _largest_step(model: nn.Module, ops: Ops, config: RunConfig, device: str, rows: int, mesh: Mesh) -> None:
    """As many tokens as a step may hold, in sequences of one page that all write to the same page."""
    size, shape = config.page_size, model.kv
    assert isinstance(shape, KVShape)
    dtype = held_dtype(config.kv_cache_dtype, activation_dtype(model))
    count = max(config.max_num_batched_tokens // size, 1)
    kv = KVCache.allocate(shape, 1, size, dtype, device)
    positions = torch.arange(size, device=device).repeat(count)
    starts = torch.arange(0, (count + 1) * size, size, dtype=torch.int32, device=device)
    step = Step(
        ids=torch.zeros_like(positions),
        positions=positions,
        slots=positions.clone(),
        rope_keys=torch.zeros_like(positions),
        block_tables=torch.zeros(count, 1, dtype=torch.int32, device=device),
        query_start=starts,
        context_lens=torch.full((count,), size, dtype=torch.int32, device=device),
        logit_rows=torch.zeros(rows, dtype=torch.int64, device=device),
        max_query=size,
        max_context=size,
        kv=kv,
        ops=ops,
        mesh=mesh,
    )
    logits = model(step)
    # what a sampling step holds beside the logits
    torch.empty_like(logits)


def device_of(model: nn.Module) -> str:
    """Where a model is: its embedding's device."""
    weight = model.embed.weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.Tensor)
    return str(weight.device)


def activation_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's activations, and of its KV cache unless that is kept in 8 bits: the embedding's."""
    weight = model.embed.weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.Tensor)
    return weight.dtype


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, shared ones counted once, and of what they were expanded to."""
    seen: dict[int, int] = {}
    for module in model.modules():
        tensors = [*module.buffers(recurse=False)]
        held = getattr(module, "held", None)
        if held is not None:
            tensors += [*held.tensors().values(), *expanded_tensors(held)]
        for t in tensors:
            seen[t.data_ptr()] = t.numel() * t.element_size()
    return sum(seen.values())
