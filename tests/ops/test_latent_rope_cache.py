"""MLA's norm, rotation and cache write as one op: 8-bit pages, the rotation's formula, ranges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.latent_rope_cache import latent_rope_cache, random_case
from modelmill.ops.quant_types import QUANT_MAX
from tests.ops.test_norm_quant import DEVICES

OP = "latent_rope_cache"
SCALE_RTOL = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_DIFFERENT_SHARE = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 0.1}


def arguments(
    device: str, dtype: torch.dtype, pages: torch.dtype | None = None, seed: int = 3, *,
    interleaved: bool = True, padding: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Arguments whose pages hold poison; ``pages``: the dtype of quantized ones."""
    sizes = 3, 48, 20, 12, 16
    case = random_case(
        9, sizes, device, dtype, seed, interleaved=interleaved, padding=padding
    )  # fmt: skip
    args = dict(case.args)
    if pages is not None:
        shape = args["k_cache"].shape
        codes = torch.full(shape, -128, dtype=torch.int8, device=device)
        args["k_cache"] = codes.view(pages)
        args["k_scale"] = torch.full(shape[:3], float("nan"), device=device)
        args["latent"][-1] = 0.0  # a row of zeros, whose scale must not be 0
    return args


def run(call: Any, args: dict[str, Any]) -> torch.Tensor:
    return registry.adapt_to_named_args(OP, call)(**args)


def triton(device: str) -> Any:
    module = registry.implementation(OP, "triton")
    if module is None or (reason := module.unavailable_reason(device)) is not None:
        pytest.skip("Triton is not installed" if module is None else reason)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pages", list(QUANT_MAX), ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "neox"])
@pytest.mark.parametrize("device", DEVICES)
def test_8_bit_pages_are_rounded_as_in_the_reference(
    device: str, interleaved: bool, pages: torch.dtype, dtype: torch.dtype
) -> None:
    """Where padding would be stored, nothing is."""
    module = triton(device)
    args, expected = (arguments(device, dtype, pages, interleaved=interleaved) for _ in range(2))
    assert registry.backend_serves_args(OP, "triton", **args)
    rotated, reference = run(module.run, args), run(latent_rope_cache, expected)
    torch.testing.assert_close(rotated, reference, rtol=SCALE_RTOL[dtype], atol=1e-5)
    written = ~expected["k_scale"].isnan()
    assert int(written.sum()) == 4, "of nine tokens every second is padding"
    assert torch.equal(written, ~args["k_scale"].isnan())
    torch.testing.assert_close(
        args["k_scale"][written], expected["k_scale"][written], rtol=SCALE_RTOL[dtype], atol=0.0
    )
    codes, other = (each["k_cache"].view(torch.int8) for each in (args, expected))
    assert torch.equal(codes[~written], other[~written])
    assert float((codes[written] != other[written]).float().mean()) <= MAX_DIFFERENT_SHARE[dtype]
    steps = (args["k_cache"].float() - expected["k_cache"].float())[written].abs()
    assert float(steps.max()) <= (1.0 if pages is torch.int8 else 32.0)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "neox"])
def test_the_reference_is_a_rotation_by_complex_numbers(interleaved: bool) -> None:
    """Pairs as complex numbers times m·exp(iφ), m being YaRN's factor; the norm by its formula."""
    args = arguments("cpu", torch.float64, interleaved=interleaved, padding=False)
    q, latent = args["q"].clone(), args["latent"].clone()
    run(latent_rope_cache, args)
    rank, factor = 48, torch.complex(args["cos"].double(), args["sin"].double())

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
        first, second = pairs.unbind(-1 if interleaved else -2)
        product = torch.complex(first, second) * factor
        parts = product.real, product.imag
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    for head in range(q.shape[1]):
        torch.testing.assert_close(args["q"][:, head, :-12], q[:, head, :-12], rtol=0, atol=0)
        torch.testing.assert_close(
            args["q"][:, head, -12:], turned(q[:, head, -12:]), rtol=1e-6, atol=1e-6
        )
    rows = args["k_cache"].flatten(0, 2)[args["slots"]]
    torch.testing.assert_close(rows[:, rank:], turned(latent[:, rank:]), rtol=1e-6, atol=1e-6)
    root = (latent[:, :rank].square().mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = latent[:, :rank] / root * args["weight"]
    torch.testing.assert_close(rows[:, :rank], normed, rtol=1e-6, atol=1e-6)


@settings(max_examples=20)
@given(
    sizes=st.tuples(
        st.integers(1, 9), st.integers(1, 70), st.integers(0, 9), st.integers(1, 9),
        st.sampled_from([1, 8, 16]),
    ),
    is_padding=st.lists(st.booleans(), min_size=1, max_size=6),
    interleaved=st.booleans(),
)  # fmt: skip
def test_any_sizes_and_any_padding_are_those_of_the_reference(
    sizes: tuple[int, int, int, int, int], is_padding: list[bool], interleaved: bool
) -> None:
    """(heads, rank, channels that do not rotate, pairs that do, page size); padding anywhere."""
    module = triton("cpu")
    heads, rank, nope_dim, pairs, page = sizes
    case = random_case(
        len(is_padding), (heads, rank, nope_dim + 2 * pairs, 2 * pairs, page), "cpu",
        torch.float32, rank, interleaved=interleaved,
    )  # fmt: skip
    slots = torch.where(torch.tensor(is_padding), -1, case.args["slots"])
    results = []
    for call in (module.run, latent_rope_cache):
        args = case.args | {"slots": slots}
        args |= {name: args[name].clone() for name in ("q", "k_cache")}
        results.append((run(call, args), args["k_cache"]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_step_of_padding_alone_stores_nothing() -> None:
    module = triton("cpu")
    for call in (module.run, latent_rope_cache):
        args = arguments("cpu", torch.float32, torch.int8)
        args["slots"].fill_(-1)
        run(call, args)
        assert args["k_scale"].isnan().all()
        assert (args["k_cache"] == -128).all()


def test_what_the_kernel_does_not_serve_is_declined() -> None:
    triton("cpu")
    args = arguments("cpu", torch.float32)
    assert registry.backend_serves_args(OP, "triton", **args)
    wide = torch.ones(4096)
    scaled = torch.zeros(args["k_cache"].shape[:3])
    for change in (
        {"q": args["q"].bfloat16()},
        {"k_cache": args["k_cache"].bfloat16()},
        {"k_scale": scaled},
        {"weight": wide},
        {"slots": args["slots"].int()},
        {"q": args["q"].mT.contiguous().mT},
    ):
        assert not registry.backend_serves_args(OP, "triton", **args | change), list(change)
