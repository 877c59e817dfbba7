"""Most likely token of each row of logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.row_op_support import make_row_op_problem

DECLARATION = OpDeclaration(
    problem=make_row_op_problem, operands=("logits",), guard=make_row_op_guard
)

# Ids are exact.
TOLERANCE = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Token ids [B] int64 of logits [B, V] float32.

    The lowest id wins a tie; NaN counts as −inf.
    """
    neg_inf = float("-inf")
    return logits.nan_to_num(neg_inf, float("inf"), neg_inf).argmax(-1)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:  # noqa: ARG001 - logits are float32 in any model
    """Ties and odd sizes; large vocabularies only on a GPU."""
    shapes = [(1, 97), (5, 1000), (3, 4099), (1, 1)]
    if device != "cpu":
        shapes += [(1, 151936), (8, 151936), (64, 151936)]
    for rows, vocab in shapes:
        logits = randn(rows, vocab, device=device, dtype=torch.float32, seed=rows + vocab)
        if rows == 5:
            logits = logits.round()
        yield Case(f"{rows}x{vocab}", {"logits": logits}, nbytes(logits))
