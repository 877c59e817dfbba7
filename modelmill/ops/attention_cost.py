"""Bytes and operations of attention over the KV cache, for the ops that read or write it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelmill.ops.case import nbytes
from modelmill.ops.op_cost import OpCost, product_cost


def attention_cost(args: Mapping[str, Any], result: torch.Tensor) -> OpCost:
    """Count each key and value of ``paged_attention`` once, and causal pairs only.

    Values that are channels of the keys (``value_dim``) are read with them.
    """
    q, value_dim = args["q"], args.get("value_dim")
    keys, pairs = count_attended_keys_and_pairs(
        query_counts(args["query_start"]), args["context_lens"].tolist(), args.get("window")
    )
    read = (2 if value_dim is None else 1) * keys * key_bytes_per_token(args["k_cache"])
    channels = q.shape[2] + (value_dim or q.shape[2])
    return product_cost(nbytes(q, result), read, 2 * q.shape[1] * channels * pairs)


def query_counts(query_start: torch.Tensor) -> list[int]:
    """The number of queries of each sequence; reads them on the host."""
    return [stop - start for start, stop in itertools.pairwise(query_start.tolist())]


def count_attended_keys_and_pairs(
    queries: Sequence[int], contexts: Sequence[int], window: int | None
) -> tuple[int, int]:
    """Count the keys and the query-key pairs of causal attention.

    Args:
        queries: number of queries of each sequence; they are its last tokens.
        contexts: context length of each sequence.
        window: sliding window in tokens, or None.

    Returns:
        Keys that are read, and pairs of a query and a key that it attends to.
    """
    keys = pairs = 0
    for new, context in zip(queries, contexts, strict=True):
        new = min(new, context)
        if window is None or window >= context:
            keys += context
            pairs += new * context - new * (new - 1) // 2
        else:
            keys += min(context, window + new - 1)
            pairs += sum(min(context - new + 1 + i, window) for i in range(new))
    return keys, pairs


def key_bytes_per_token(kv_cache: torch.Tensor) -> int:
    """Bytes of one token's keys in a cache [pages, kv_heads, page_size, dim].

    An 8-bit cache has a float32 scale per head.
    """
    scale = 4 if kv_cache.element_size() == 1 else 0
    return kv_cache.shape[1] * (kv_cache.shape[3] * kv_cache.element_size() + scale)
