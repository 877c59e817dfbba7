"""Causal attention over a paged KV cache (Kwon et al. 2023, arXiv:2309.06180).

One op serves prefill and decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from modelmill.ops.attention_cost import attention_cost
from modelmill.ops.attention_support import (
    AttentionPhase,
    AttentionProblem,
    compose_mixed_step_kernel,
    split_mixed_problem,
)
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import (
    OPERAND_ALIGNMENT_BYTES,
    Guard,
    StepOperandValidator,
    make_weak_reference,
)
from modelmill.ops.score_mods import ScoreMods, softmax_with_score_mods

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class PagedAttentionInputs(NamedTuple):
    """New tokens, the pages that they read, and where each sequence lies.

    Attributes:
        q: [T, heads, D], the new tokens of all sequences, concatenated.
        k_cache: [pages, kv_heads, page_size, D]; already contains the new tokens.
        v_cache: as k_cache.
        block_tables: [B, P] int32 page numbers.
        query_start: [B + 1] int32 offsets into T.
        context_lens: [B] int32, keys of each sequence including the new ones; the last query of a
            sequence is at position context_len − 1.
        max_query: upper bound of the new tokens per sequence (host integer, for launch sizes).
        max_context: upper bound of context_lens (host integer, for launch sizes).
        scale: factor of the scores.
        window: a query at position p attends to keys > p − window; None: to all.
        k_scale: [pages, kv_heads, page_size] float32, one per token and head, for caches of int8 or
            float8_e4m3fn.
        v_scale: as k_scale.
        score_mods: soft cap, ALiBi and sinks; None: the scores are only scaled.
        value_dim: values are the first so many channels of the keys, and ``v_cache`` and
            ``v_scale`` are not read (latent attention); None: they are in ``v_cache``.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    max_query: int
    max_context: int
    scale: float
    window: int | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    score_mods: ScoreMods | None = None
    value_dim: int | None = None

    @property
    def output_dim(self) -> int:
        """Channels of a head's output."""
        return self.q.shape[2] if self.value_dim is None else self.value_dim


def _make_problem(*operands: Any) -> AttentionProblem:
    q, k_cache, v_cache, block_tables, *_ = inputs = PagedAttentionInputs(*operands)
    _, kv_heads, page_size, dim = k_cache.shape
    sequences, queries = block_tables.shape[0], inputs.max_query
    return AttentionProblem(
        q.shape[0],
        queries,
        sequences,
        sequences * kv_heads,
        q.shape[1],
        kv_heads,
        dim,
        page_size,
        q.dtype,
        (k_cache.dtype, v_cache.dtype),
        inputs.k_scale is not None and inputs.v_scale is not None,
        q.device,
        q.is_cuda,
        AttentionPhase.classify_step(queries, sequences),
        inputs.score_mods is not None,
        inputs.value_dim,
    )


def _make_attention_guard(_: OpDeclaration, operands: Sequence[Any]) -> Guard | None:
    """The counts of a call with these pages, and queries that lie in memory alike."""
    q, k_cache, v_cache, *indices = operands[:6]
    k_scale, v_scale, score_mods, value_dim = operands[10:]
    if (
        q.data_ptr() % OPERAND_ALIGNMENT_BYTES
        or not _INDEX_VALIDATOR.present_flags_if_valid(*indices)
        or not indices[0].numel()
    ):
        return None
    dtype, inner, strides, kv_heads = q.dtype, q.shape[1:], q.stride(), k_cache.shape[1]
    keys, values = make_weak_reference(k_cache), make_weak_reference(v_cache)
    key_scales, value_scales = make_weak_reference(k_scale), make_weak_reference(v_scale)

    def counts_of(inputs: PagedAttentionInputs) -> tuple[int, int, int, int] | None:
        q, k_cache, v_cache, tables, starts, lengths, queries = inputs[:7]
        shape, (sequences, columns) = q.shape, tables.shape
        if (
            k_cache is keys()
            and v_cache is values()
            and inputs.k_scale is key_scales()
            and inputs.v_scale is value_scales()
            and inputs.score_mods is score_mods
            and inputs.value_dim == value_dim
            and q.dtype is dtype
            and shape[1:] == inner
            and q.stride() == strides
            and not q.data_ptr() % OPERAND_ALIGNMENT_BYTES
            and columns
            and _INDEX_VALIDATOR.present_flags_if_valid(tables, starts, lengths)
        ):
            return shape[0], queries, sequences, sequences * kv_heads
        return None

    return counts_of


_INDEX_VALIDATOR = StepOperandValidator((torch.int32, 1), (torch.int32, 1), (torch.int32, 1))
DECLARATION = OpDeclaration(
    inputs=PagedAttentionInputs,
    problem=_make_problem,
    guard=_make_attention_guard,
    counts=("m", "queries", "sequences", "pairs"),
    split=split_mixed_problem,
    join=compose_mixed_step_kernel,
    cost=attention_cost,
)


def paged_attention(inputs: PagedAttentionInputs) -> torch.Tensor:
    """Attend from each query to the keys of its own sequence up to its own position.

    Query head h uses KV head h // (heads / kv_heads). A sequence with context_len 0 is padding; its
    output rows are undefined.

    Returns:
        [T, heads·D] in q's dtype; [T, heads·value_dim] where that is given.
    """
    q, k_cache, v_cache, block_tables, query_start, context_lens = inputs[:6]
    scale, window, k_scale, v_scale, mods, value_dim = inputs[8:]
    _, kv_heads, page_size, _ = k_cache.shape
    tokens, heads, _ = q.shape
    out = q.new_zeros(tokens, heads, inputs.output_dim)
    starts, lengths = query_start.tolist(), context_lens.tolist()
    for b, length in enumerate(lengths):
        first, last = starts[b], starts[b + 1]
        if length == 0 or first == last:
            continue
        pages = block_tables[b, : -(-length // page_size)].long()
        k = _gather_pages(k_cache, k_scale, pages, q.dtype)[:, :length]
        v = k[..., :value_dim]
        if value_dim is None:
            v = _gather_pages(v_cache, v_scale, pages, q.dtype)[:, :length]
        rows = q[first:last].transpose(0, 1)
        mask = _causal_mask(last - first, length, window, q.device)
        if mods is not None:
            out[first:last] = _attend_with_score_mods(rows, k, v, mask, scale, mods).transpose(0, 1)
            continue
        gqa = heads != kv_heads
        attended = F.scaled_dot_product_attention(
            rows[None], k[None], v[None], mask, scale=scale, enable_gqa=gqa
        )[0]
        out[first:last] = attended.transpose(0, 1)
    return out.flatten(1)


def _attend_with_score_mods(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    mods: ScoreMods,
) -> torch.Tensor:
    """Attention [heads, queries, D] of the last positions to keys [kv_heads, keys, D]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.to(dtype).unflatten(0, (k.shape[0], -1))
    scores = (groups @ k.to(dtype).unsqueeze(1).mT).flatten(0, 1) * scale
    column = torch.arange(k.shape[1], device=q.device)
    distances = column[None] - column[k.shape[1] - q.shape[1] :, None]
    weights = softmax_with_score_mods(scores, distances, mask, mods)
    weights = weights.unflatten(0, (k.shape[0], -1))
    return (weights @ v.to(dtype).unsqueeze(1)).flatten(0, 1).to(q.dtype)


def _gather_pages(
    cache: torch.Tensor, scale: torch.Tensor | None, pages: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Keys or values [kv_heads, tokens, D] of the pages, dequantized if there are scales."""
    gathered = cache.index_select(0, pages)  # copies whole pages; indexing copies single values
    if scale is not None:
        gathered = gathered.to(scale.dtype) * scale[pages][..., None]
    return gathered.to(dtype).transpose(0, 1).flatten(1, 2)


def _causal_mask(
    queries: int, keys: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Mask [queries, keys] of the keys that each of the last ``queries`` positions attends to.

    None if all attend to all keys.
    """
    if queries == 1 and (window is None or keys <= window):
        return None
    row = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None]
    mask = column <= row
    return mask if window is None else mask & (column > row - window)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode, prefill, chunks with history, mixed; GQA; windows; odd lengths; heads of 8 to 128.

    Soft cap, ALiBi and sinks, alone and with what models combine them with.
    """
    shapes: list[tuple[str, int, int, int, list[tuple[int, int]], int | None]] = [
        ("decode", 9, 3, 64, [(1, 1), (1, 17), (1, 100)], None),
        ("prefill", 4, 4, 128, [(33, 33), (1, 1)], None),
        ("chunk", 8, 2, 64, [(5, 37), (16, 16), (1, 50)], None),
        ("window", 4, 2, 32, [(40, 40), (1, 60), (3, 33)], 16),
        ("tiny", 2, 1, 8, [(3, 3), (1, 9)], None),
        ("odd", 5, 5, 80, [(7, 19)], None),
    ]
    if device != "cpu":
        shapes += [
            ("decode-7b-1", 32, 32, 128, [(1, 4096)], None),
            ("decode-7b-64", 32, 32, 128, [(1, 1024)] * 64, None),
        ]
    for number, (name, heads, kv_heads, dim, lengths, window) in enumerate(shapes):
        yield _case(name, heads, kv_heads, dim, lengths, window, device, dtype, number)
    mixed = [(5, 37), (1, 60), (1, 3)]
    yield from _latent_cases(mixed, device, dtype)
    for name, heads, kv_heads, window in (
        ("softcap", 4, 2, 16),
        ("softcap-far", 4, 2, 16),
        ("alibi", 6, 6, None),
        ("sinks", 8, 2, 16),
        ("softcap-alibi-sinks", 3, 3, 9),
    ):
        case = _case(name, heads, kv_heads, 32, mixed, window, device, dtype, 9)
        slopes = torch.logspace(-1, -8, heads, base=2.0, device=device)
        sinks = randn(heads, device=device, dtype=torch.float32, seed=3)
        mods = ScoreMods(
            (500.0 if "far" in name else 1.5) if "softcap" in name else None,
            slopes if "alibi" in name else None,
            sinks if "sinks" in name else None,
        )
        yield replace(case, args=case.args | {"score_mods": mods})


def _latent_cases(mixed: list[tuple[int, int]], device: str, dtype: torch.dtype) -> Iterator[Case]:
    """DeepSeek-V2-Lite's and V3's sizes where there is a GPU, else smaller ones."""
    shapes = [("latent", 6, 40, 24, mixed), ("latent-decode", 20, 80, 64, [(1, 70), (1, 1)])]
    if device != "cpu":
        shapes += [
            ("latent-decode-v2-lite", 16, 576, 512, [(1, 4096), (1, 77)]),
            ("latent-v3", 128, 576, 512, [(1, 1500), (20, 300)]),
        ]
    for name, heads, dim, value_dim, lengths in shapes:
        yield latent_case(name, heads, (dim, value_dim), lengths, device, dtype, 5)


def latent_case(
    name: str,
    heads: int,
    dims: tuple[int, int],
    lengths: list[tuple[int, int]],
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> Case:
    """Query heads on one KV head of dims[0] channels, of which dims[1] are the values."""
    dim, value_dim = dims
    case = _case(name, heads, 1, dim, lengths, None, device, dtype, seed)
    args = case.args | {"v_cache": case.args["k_cache"], "value_dim": value_dim}
    q = args["q"]
    outputs = q.numel() // dim * value_dim * q.element_size()
    keys = sum(context for _, context in lengths)
    bytes_moved = keys * dim * q.element_size() + nbytes(q) + outputs
    return Case(name, args, bytes_moved, case.flops // (2 * dim) * (dim + value_dim))


def _case(
    name: str,
    heads: int,
    kv_heads: int,
    dim: int,
    lengths: list[tuple[int, int]],
    window: int | None,
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> Case:
    page_size = 16
    counts = [-(-context // page_size) for _, context in lengths]
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for b, count in enumerate(counts):
        tables[b, :count] = torch.tensor(order[:count], dtype=torch.int32)
        order = order[count:]
    starts = torch.tensor(
        [0, *torch.tensor([n for n, _ in lengths]).cumsum(0).tolist()], dtype=torch.int32
    )
    contexts = torch.tensor([c for _, c in lengths], dtype=torch.int32)
    q = randn(int(starts[-1]), heads, dim, device=device, dtype=dtype, seed=seed)
    k = randn(pages, kv_heads, page_size, dim, device=device, dtype=dtype, seed=seed + 1)
    v = randn(pages, kv_heads, page_size, dim, device=device, dtype=dtype, seed=seed + 2)
    args = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "block_tables": tables.to(device),
        "query_start": starts.to(device),
        "context_lens": contexts.to(device),
        "max_query": max(n for n, _ in lengths),
        "max_context": max(c for _, c in lengths),
        "scale": dim**-0.5,
        "window": window,
    }
    kv_bytes = 2 * sum(c for _, c in lengths) * kv_heads * dim * k.element_size()
    flops = 4 * heads * dim * sum(n * c - n * (n - 1) // 2 for n, c in lengths)
    return Case(name, args, kv_bytes + 2 * nbytes(q), flops)
