"""The 8-bit cache write: what the kernel stores is what the reference rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops.case import Case
from modelmill.ops.quant_types import QUANT_MAX, quantize_per_row
from modelmill.ops.rope_cache import cases, rope_cache
from tests.ops.test_implementations import EDGES, quick

# Share of the rotated values that may round to a neighbour, and tolerance of their scales.
MAX_DIFFERENT_SHARE = {torch.float32: 0.005, torch.float16: 0.02, torch.bfloat16: 0.05}
SCALE_RTOL = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WITHOUT_8_BITS = ("cpu",)  # backends that leave 8-bit pages to the reference
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _poison_cache(case: Case, cache_dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """The case with an 8-bit cache filled with bytes and scales that no token would write."""
    args = dict(case.args)
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(args["qkv"].shape, generator=generator).to(args["qkv"])
    draw[0, : draw.shape[1] // 2] *= 1e4
    draw[-1] = 0.0
    args["qkv"] = draw
    for name in ("k", "v"):
        shape, device = args[f"{name}_cache"].shape, args["qkv"].device
        args[f"{name}_cache"] = torch.full(shape, -128, dtype=torch.int8, device=device).view(
            cache_dtype
        )
        args[f"{name}_scale"] = torch.full(shape[:3], float("nan"), device=device)
    return args


def _cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    yield from cases(device, dtype)
    yield from EDGES["rope_cache"](device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", list(QUANT_MAX))
@pytest.mark.parametrize("device", DEVICES)
def test_the_cache_write_rounds_as_the_reference(
    device: str, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    ran = 0
    for name, module in registry.implementations("rope_cache").items():
        if module.unavailable_reason(device) is not None:
            continue
        for number, case in enumerate(_cases(device, dtype)):
            if not quick(case, name, device):
                continue
            actual, reference = (
                _poison_cache(case, cache_dtype, number),
                _poison_cache(case, cache_dtype, number),
            )
            served = name not in WITHOUT_8_BITS
            assert registry.backend_serves_args("rope_cache", name, **actual) is served, (
                f"{name} {case.name}"
            )
            if not served:
                continue
            registry.adapt_to_named_args("rope_cache", module.run)(**actual)
            # on the CPU: on a GPU the reference writes padding to the last page
            reference = {
                k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in reference.items()
            }
            registry.adapt_to_named_args("rope_cache", rope_cache)(**reference)
            actual = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in actual.items()}
            for part in ("k", "v"):
                label = f"{name} {case.name} {part}"
                scale, expected = actual[f"{part}_scale"], reference[f"{part}_scale"]
                assert torch.equal(scale.isnan(), expected.isnan()), label
                written = ~expected.isnan()
                assert torch.allclose(scale[written], expected[written], rtol=SCALE_RTOL[dtype]), (
                    label
                )
                actual_bytes, expected_bytes = (
                    a[f"{part}_cache"].view(torch.int8) for a in (actual, reference)
                )
                assert torch.equal(actual_bytes[~written], expected_bytes[~written]), label
                # v is stored as it comes: the same bytes. k was turned and rounded, in another
                # order of operations.
                different = float((actual_bytes[written] != expected_bytes[written]).float().mean())
                assert different <= (0.0 if part == "v" else MAX_DIFFERENT_SHARE[dtype]), (
                    f"{label}: {different}"
                )
                steps = (actual[f"{part}_cache"].float() - reference[f"{part}_cache"].float())[
                    written
                ].abs()
                assert float(steps.max()) <= (1.0 if cache_dtype is torch.int8 else 32.0), label
            ran += 1
    if not ran:
        pytest.skip("no variant runs here")


@pytest.mark.parametrize("cache_dtype", list(QUANT_MAX))
def test_rows_of_any_size_keep_their_largest_value(cache_dtype: torch.dtype) -> None:
    size = 10.0 ** torch.arange(-5, 6)
    x = torch.randn(len(size), 80, generator=torch.Generator().manual_seed(0)) * size[:, None]
    values, scale = quantize_per_row(x, cache_dtype)
    back = values.float() * scale[:, None]
    assert torch.allclose(back.abs().amax(-1), x.abs().amax(-1), rtol=1e-6)
