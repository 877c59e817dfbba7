"""Products of many rows of 8-bit activations with 8-bit weights, scaled where they are stored (products8.cu)."""

from __future__ import annotations

import functools
import struct

import torch

from modelmill.ops.cuda import build, launch

KINDS = {torch.int8: (), torch.float8_e4m3fn: ("FP8",)}
OUTPUTS = {torch.bfloat16: (), torch.float16: ("HALF",), torch.float32: ("WIDE",)}
# Sizes of products8.cu.
THREADS, SLAB, BARRIER_BYTES, SHARED_BYTES = 384, 128, 16, 227 << 10
Form = tuple[int, int, int]  # MT, BN, TAKE_TURNS
# A tile's rows of x and of w, and what a multiprocessor makes of it beside the largest (measured on an H200).
FORMS: dict[Form, tuple[int, int, float]] = {
    (1, 256, 0): (128, 256, 1.0),
    (2, 128, 1): (128, 128, 0.97),
    (1, 192, 0): (128, 192, 0.92),
    (1, 128, 1): (64, 128, 0.785),
    (1, 64, 1): (64, 64, 0.457),
    (1, 32, 1): (64, 32, 0.305),
}
# by whether there is a bias, and a gate
_TOLD = {
    (False, False): (),
    (True, False): ("BIAS=1",),
    (False, True): ("GATED=1",),
    (True, True): ("BIAS=1", "GATED=1"),
}


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles the commonest form, once a machine."""
    return build.serves(kind, "products8", macros((1, 256, 0), torch.int8, torch.bfloat16))


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """x [T, K] and weight [N, K] of one 8-bit type and packed, K a multiple of 16 and N of 8; bias of the output's."""
    if x.dtype not in KINDS or weight.dtype != x.dtype or dtype not in OUTPUTS or not x.is_cuda or x.dim() != 2:
        return False
    if scale.dtype != torch.float32 or x_scale.dtype != torch.float32 or not x.numel():
        return False
    if not (x.is_contiguous() and weight.is_contiguous() and scale.is_contiguous() and x_scale.is_contiguous()):
        return False
    if bias is not None and not (bias.dtype == dtype and bias.is_contiguous() and bias.data_ptr() % 8 == 0):
        return False
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return aligned and x.shape[1] % 16 == 0 and weight.shape[0] % 8 == 0


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    form: Form | None = None,
) -> torch.Tensor:
    """(x · weightᵀ) · x_scale · scale (+ bias), [T, N] of ``dtype``; x_scale [T] or [1].

    gated: silu(first half) · second half of that, [T, N / 2]; N is a multiple of 16.
    """
    (tokens, k), n = x.shape, weight.shape[0]
    device = x.get_device()
    out = torch.empty((tokens, n // 2 if gated else n), dtype=dtype, device=x.device)
    form = form or chosen(tokens, n, launch.multiprocessors(device), gated)
    down, across, _ = FORMS[form]
    pointers = (scale.data_ptr(), x_scale.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
    work = struct.pack("=4Q4i", *pointers, tokens, n, -(-k // SLAB), x_scale.numel() > 1)
    maps = _map(x.data_ptr(), tokens, k, down), _map(weight.data_ptr(), n, k, across >> gated)
    blocks = _blocks(form, tokens, n, device)
    if device == torch.cuda.current_device():
        _kernel(form, x.dtype, dtype, bias is not None, gated, device).launch(blocks, *maps, work, early=True)
    else:
        with torch.cuda.device(device):
            _kernel(form, x.dtype, dtype, bias is not None, gated, device).launch(blocks, *maps, work, early=True)
    return out


@functools.cache
def _kernel(form: Form, kind: torch.dtype, dtype: torch.dtype, biased: bool, gated: bool, device: int) -> launch.Kernel:
    told = _TOLD[biased, gated]
    return launch.kernel("products8", "products8", macros(form, kind, dtype, told), THREADS, _shared(form), device)


@functools.lru_cache(4096)
def _blocks(form: Form, tokens: int, n: int, device: int) -> int:
    return min(_tiles(form, tokens, n), launch.multiprocessors(device))


@functools.lru_cache(4096)
def chosen(tokens: int, n: int, processors: int, gated: bool = False) -> Form:
    """The form whose rounds of tiles take the least time; a gated one stores 32 columns of out at a time, or more."""

    def cost(form: Form) -> float:
        down, across, rate = FORMS[form]
        return -(-_tiles(form, tokens, n) // processors) * down * across / rate

    return min((form for form in FORMS if not gated or form[1] >= 64), key=cost)


def rows_of_forms(n: int, processors: int, few: int, most: int, gated: bool = False) -> list[int]:
    """Numbers of rows above ``few`` and up to ``most``, one for each form that is chosen with n rows of the weight."""
    found: dict[Form, int] = {}
    for rows in dict.fromkeys((few + 1, *range(64, most + 1, 64), most)):
        if few < rows <= most:
            found.setdefault(chosen(rows, n, processors, gated), rows)
    return list(found.values())


def forms(x: torch.Tensor, weight: torch.Tensor, few: int, most: int, gated: bool = False) -> list[int]:
    """``rows_of_forms`` for x's kind and place; none where the kernel does not read x."""
    if x.dtype not in KINDS:
        return []
    return rows_of_forms(weight.shape[0], launch.multiprocessors(x.get_device()), few, most, gated)


def _tiles(form: Form, tokens: int, n: int) -> int:
    down, across, _ = FORMS[form]
    return -(-tokens // down) * -(-n // across)


def macros(form: Form, kind: torch.dtype, dtype: torch.dtype, told: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Of the kernel for inputs of ``kind`` and outputs of ``dtype``; told: BIAS=1, GATED=1."""
    mt, bn, turns = form
    sizes = (f"MT={mt}", f"BN={bn}", f"TAKE_TURNS={turns}")
    return (*sizes, f"STAGES={_stages(form)}", *KINDS[kind], *OUTPUTS[dtype], *told)


def _stages(form: Form) -> int:
    down, across, _ = FORMS[form]
    return min(16, SHARED_BYTES // (SLAB * (down + across) + BARRIER_BYTES))


def _shared(form: Form) -> int:
    down, across, _ = FORMS[form]
    return _stages(form) * (SLAB * (down + across) + BARRIER_BYTES)


@functools.lru_cache(4096)
def _map(address: int, rows: int, columns: int, box: int) -> bytes:
    """A matrix of bytes as the copy engine sees it; it takes 128 columns of ``box`` rows at a time."""
    return launch.tensor_map(address, torch.uint8, (columns, rows), (columns,), (SLAB, box))
