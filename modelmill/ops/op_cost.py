"""Bytes and operations that a call of an op needs, counted from its arguments.

An op's declaration names the function that counts: one of these, or one in the op's own file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from modelmill.ops.case import nbytes

INT8_DTYPE_NAME, FP8_DTYPE_NAME = "int8", "float8_e4m3fn"


@dataclass(frozen=True)
class OpCost:
    """Bytes and operations of op calls.

    nbytes: bytes read and written, each once. unavoidable_bytes: the part of them that no fusion
    saves: weights of matrix products, keys and values, recurrent states. operations:
    multiplications and additions of the products. int8_operations, fp8_operations: the part of them
    with 8-bit activations, which has a higher rate.
    """

    nbytes: int = 0
    unavoidable_bytes: int = 0
    operations: int = 0
    int8_operations: int = 0
    fp8_operations: int = 0

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    @property
    def ops_by_8bit_dtype(self) -> dict[str, int]:
        """Operations by 8-bit dtype, as ``RooflineCeilings`` takes them."""
        return {
            dtype: count
            for dtype, count in (
                (INT8_DTYPE_NAME, self.int8_operations),
                (FP8_DTYPE_NAME, self.fp8_operations),
            )
            if count
        }


CostFunction = Callable[[Mapping[str, Any], Any], OpCost]
"""(arguments by name, result) of a call → its cost."""


def read_write_cost(args: Mapping[str, Any], result: Any) -> OpCost:
    """Count every tensor of the arguments and of the result once, and no operations."""
    return OpCost(tensor_bytes(list(args.values())) + tensor_bytes(result))


def gemm_cost(
    args: Mapping[str, Any],
    result: Any,
    *,
    matrices: int = 1,
    activations: tuple[str, ...] = ("x", "q"),
) -> OpCost:
    """Count x · weightᵀ: all arguments but the activations are the weight's.

    Args:
        args: of the call; the rows are ``x``, or ``q`` where they are quantized.
        result: [..., N].
        matrices: products that the result is made of: 2 with a gate.
        activations: names of the arguments that are not the weight's.
    """
    weight_bytes = tensor_bytes([v for name, v in args.items() if name not in activations])
    other_bytes = tensor_bytes([v for name, v in args.items() if name in activations])
    operations = 2 * gemm_rows(args).numel() * result.shape[-1] * matrices
    return product_cost(
        other_bytes + tensor_bytes(result), weight_bytes, operations, act_8bit_dtype_name(args)
    )


def product_cost(
    act_bytes: int, weight_bytes: int, operations: int, act_dtype: str | None = None
) -> OpCost:
    """The cost of products, whose weights have to be read whatever is fused.

    act_dtype: name of the activations' dtype if it has 8 bits.
    """
    return OpCost(
        act_bytes + weight_bytes,
        weight_bytes,
        operations,
        operations * (act_dtype == INT8_DTYPE_NAME),
        operations * (act_dtype == FP8_DTYPE_NAME),
    )


def gemm_rows(args: Mapping[str, Any]) -> torch.Tensor:
    """The rows that a weight is multiplied by."""
    rows: torch.Tensor = args["x"] if "x" in args else args["q"]
    return rows


def act_8bit_dtype_name(args: Mapping[str, Any]) -> str | None:
    """Name of the activations' dtype if it has 8 bits, else None."""
    x = args.get("x", args.get("q"))
    return (
        str(x.dtype).removeprefix("torch.")
        if isinstance(x, torch.Tensor) and x.dtype.itemsize == 1
        else None
    )


def recurrence_cost(
    args: Mapping[str, Any], result: Any, *, operations_per_state_value: int
) -> OpCost:
    """Count an op that advances recurrent states: those of the step's sequences, not all slots.

    A state is read and written once. Copies for the prefix cache are not counted.

    Args:
        args: of the call, with ``state`` [slots, …] and ``rows``.
        result: [T, …].
        operations_per_state_value: of one token.
    """
    rows, state = args["rows"], args["state"]
    states = 2 * int((rows.query_start.diff() > 0).sum()) * nbytes(state[:1])
    others = tensor_bytes([v for name, v in args.items() if name not in ("state", "rows")])
    operations = operations_per_state_value * len(rows.positions) * state[:1].numel()
    return product_cost(others + tensor_bytes(result), states, operations)


def tensor_bytes(values: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists and tuples."""
    return nbytes(*_iter_tensors(values))


def _iter_tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from _iter_tensors(each)
