"""Products of a few rows of clustered integers through the tensor cores (clustered_linear.cu)."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda import build, launch, one_row
from modelmill.ops.cuda.narrow_weights import PIECE, THREADS, TYPES, Form, fits, shift

# rows of q up to … → how the kernel is compiled, for 8-bit and for 4-bit weights
FORMS = {
    torch.int8: ((8, Form(1, 1, 1, 4)), (16, Form(2, 1, 2, 2)), (32, Form(4, 2, 2, 1)), (64, Form(8, 4, 2, 1))),
    torch.uint8: ((8, Form(1, 1, 2, 3)), (16, Form(2, 1, 4, 2)), (32, Form(4, 2, 2, 1)), (64, Form(8, 4, 2, 1))),
}
MOST = 64


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles the commonest form, once a machine."""
    form = form_of(1, torch.int8)
    common = _macros(torch.bfloat16, form, packed=False, offset=False, wide=False, dynamic=False)
    return build.serves(kind, "clustered_linear", common)


def form_of(tokens: int, kind: torch.dtype) -> Form:
    """How the kernel for so many rows of q and weights of this type is compiled."""
    return next(form for most, form in FORMS[kind] if tokens <= most)


def supports(
    q: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    step: torch.Tensor,
    constant: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> bool:
    """Up to 64 rows, P a multiple of 128, groups of 128, 256, 512 … columns or of all, everything packed."""
    if q.dim() != 2 or not 0 < q.shape[0] <= MOST or not q.is_cuda or dtype not in TYPES:
        return False
    packed = all(t is None or t.is_contiguous() for t in (q, weight, scale, offset, step, constant, bias))
    aligned = q.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and (bias is None or bias.dtype == dtype)
    alike = scale.dtype in (torch.float16, torch.float32) and (offset is None or offset.dtype == scale.dtype)
    whole = q.shape[1] % PIECE == 0 and shift(group, q.shape[1]) is not None
    return packed and aligned and alike and whole and fits(form_of(q.shape[0], weight.dtype), scale.shape[1])


def run(
    q: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    step: torch.Tensor,
    constant: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As the reference."""
    tokens, columns = q.shape
    rows, groups = weight.shape[0], scale.shape[1]
    if one_row.serves(q, weight, scale, offset, group):
        return one_row.product(q, weight, (scale, offset, group), (step, constant, bias), dtype)
    out = torch.empty((tokens, rows), dtype=dtype, device=q.device)
    form = form_of(tokens, weight.dtype)
    with torch.cuda.device(q.device):
        macros = _macros(
            dtype, form, packed=weight.dtype is torch.uint8, offset=offset is not None,
            wide=scale.dtype is torch.float32, dynamic=step.dim() == 2,
        )  # fmt: skip
        shared = form.shared(groups)
        kernel = launch.kernel("clustered_linear", "clustered_linear", macros, THREADS, shared, q.get_device())
        pointers = launch.addresses(q, weight, scale, offset, step, constant, bias, out)
        counts = (tokens, rows, columns, groups, shift(group, columns))
        kernel.launch(form.grid(rows), struct.pack("=8Q5i4x", *pointers, *counts), early=True)
    return out


def _macros(
    dtype: torch.dtype, form: Form, *, packed: bool, offset: bool, wide: bool, dynamic: bool
) -> tuple[str, ...]:
    switches = {"PACKED": packed, "OFFSET": offset, "WIDE": wide, "DYNAMIC": dynamic, "GATED": False}
    return (*form.macros, *(f"{name}={int(on)}" for name, on in switches.items()), *TYPES[dtype])
