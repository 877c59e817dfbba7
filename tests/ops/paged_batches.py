"""Batches of sequences over KV pages: what lies beside their tokens must not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops.attention_support import split_mixed_problem
from modelmill.ops.bound_op import OpImplementation
from modelmill.ops.paged_attention import DECLARATION, PagedAttentionInputs


def shuffled_pages(
    lengths: list[tuple[int, int]], page: int, generator: torch.Generator
) -> tuple[list[int], list[torch.Tensor], torch.Tensor]:
    """Pages in random order for sequences of (queries, context).

    Returns:
        The number of pages of each sequence; their numbers, and last three more that belong to
        none; block tables of nonsense, wider than needed.
    """
    counts = [-(-context // page) for _, context in lengths]
    pages = sum(counts) + 3
    order = torch.randperm(pages, generator=generator).to(torch.int32).split([*counts, 3])
    tables = torch.randint(
        -9, 2 * pages, (len(lengths), max(counts) + 2), generator=generator, dtype=torch.int32
    )
    return counts, list(order), tables


def ragged_inputs(lengths: list[tuple[int, int]], device: str) -> dict[str, Any]:
    """The inputs of attention that say where sequences of (queries, context) begin and end."""
    starts = torch.tensor([0, *(n for n, _ in lengths)]).cumsum(0)
    return {
        "query_start": starts.to(device, torch.int32),
        "context_lens": torch.tensor([c for _, c in lengths], dtype=torch.int32, device=device),
        "max_query": max(n for n, _ in lengths),
        "max_context": max(c for _, c in lengths),
    }


def run_with_nan_memory(
    run: Callable[[PagedAttentionInputs], torch.Tensor], args: dict[str, Any]
) -> torch.Tensor:
    """The output in float64, where memory that a kernel does not write stays NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty fill with NaN
    try:
        return run(PagedAttentionInputs(**args)).double()
    finally:
        torch.use_deterministic_algorithms(False)


def attention_arguments(
    q: torch.Tensor,
    caches: torch.Tensor,
    tables: torch.Tensor,
    lengths: list[tuple[int, int]],
    window: int | None,
) -> dict[str, Any]:
    """The arguments of a step on q's device; caches: [2, pages, kv_heads, page, D]."""
    device = str(q.device)
    return {
        "q": q,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": tables.to(device),
        **ragged_inputs(lengths, device),
        "scale": q.shape[-1] ** -0.5,
        "window": window,
    }


def select_single_token_sequences(args: dict[str, Any]) -> torch.Tensor:
    """The rows of q that are a sequence's only one."""
    singles = args["query_start"].diff() == 1
    return args["query_start"][:-1][singles].long()


def in_float64(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with all floating-point tensors in float64."""
    return {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in args.items()
    }


def check_step(
    args: dict[str, Any],
    truth: torch.Tensor,
    limit: float,
    rows: torch.Tensor | None = None,
    *,
    served: bool = True,
) -> None:
    """Check the registry's op on a GPU: of a mixed step, parts may be computed elsewhere.

    Args:
        args: of the op.
        truth: what is expected.
        limit: relative error in the norm.
        rows: that are compared; None: all.
        served: whether the CUDA C++ kernels serve the step or a part of it.
    """
    module = registry.implementation("paged_attention", "cuda")
    reason = "no such implementation" if module is None else module.unavailable_reason("cuda")
    if reason is not None:
        pytest.skip(reason)
    assert serves_part(args) == served
    run = registry.select_backends("cuda").paged_attention
    actual = run_with_nan_memory(run, args)
    assert not actual.isnan().any()
    compared = slice(None) if rows is None else rows
    actual, truth = actual[compared], truth[compared]
    assert float((actual - truth).norm() / truth.norm()) < limit
    assert_same_bits(run, args, compared, actual)


def of_every_page_size(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test on a GPU for both 16-bit types, two sizes of heads and all of pages."""
    test = pytest.mark.parametrize("page", [8, 16, 32, 64, 128])(test)
    test = pytest.mark.parametrize("dim", [64, 128])(test)
    test = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])(test)
    return pytest.mark.gpu(test)


def assert_same_bits(
    run: Callable[[PagedAttentionInputs], torch.Tensor],
    args: dict[str, Any],
    rows: torch.Tensor | slice,
    expected: torch.Tensor,
) -> None:
    """Check that ``run`` returns ``expected`` in these rows, call after call."""
    for _ in range(3):
        again = run(PagedAttentionInputs(**args)).double()[rows]
        assert torch.equal(again, expected), "the bits change from call to call"


def serves_part(args: dict[str, Any], backend: str = "cuda") -> bool:
    """Whether a backend serves a step, or of a mixed one its prompts or its single queries."""
    module = registry.implementation("paged_attention", backend)
    assert module is not None
    inputs, own = (
        PagedAttentionInputs(**args),
        OpImplementation.from_backend_module(module, module.run),
    )
    problem = DECLARATION.make_problem(inputs)
    parts = (problem, *split_mixed_problem(problem))
    return any(own.select_function(part, inputs) is not None for part in parts)
