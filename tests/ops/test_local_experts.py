"""A mixture on a rank that has some of its experts: the ranks' sum is the whole mixture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelmill.nn.fused_moe import FusedMoE, compute_all_experts, route_tokens
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import SIGMOID, MoE, RouterConfig
from modelmill.nn.moe_spec import MoESpec
from modelmill.ops import registry
from modelmill.ops.cpu.common import build
from modelmill.ops.moe_align_block_size import NO_EXPERT
from modelmill.parallel.shard import Range, partition
from tests.nn.test_moe import EXPERTS, HIDDEN, STEP, filled
from tests.ops.test_fused_moe import GROUPED, KERNELS

FORMATS = ("dense", "int8", "int4", "w8a8", "fp8", "mxfp4")
INNER = 32
RANKS = partition(EXPERTS, 3)  # 3, 3 and 2 experts
ROUTERS = {
    "softmax": RouterConfig(EXPERTS, 2),
    "groups": RouterConfig(EXPERTS, 2, SIGMOID, True, True, False, 2.5, 4, 2),
    "factors": RouterConfig(EXPERTS, 2, expert_scale=True),
}


def part_of(moe: MoE, spec: MoESpec, experts: Range) -> MoE:
    """The rank of a mixture that has these experts, with the same weights."""
    part = spec.build_module()
    part.keep_local_experts(experts)
    for name, module in part.named_modules():
        if isinstance(module, Linear):
            whole = moe.get_submodule(name)
            assert isinstance(whole, Linear)
            module.weight = whole.weight
    for name, _ in list(part.named_buffers()):
        parent, _, leaf = name.rpartition(".")
        setattr(part.get_submodule(parent), leaf, moe.get_buffer(name))
    return part


def triton_step() -> Any:
    """A step on the CPU with the fused MoE ops of Triton's interpreter."""
    if any(each is None or each.unavailable_reason("cpu") is not None for each in KERNELS.values()):
        pytest.skip("Triton's interpreter is not available")
    return SimpleNamespace(ops=registry.select_backends("cpu", dict.fromkeys(GROUPED, "triton")))


def run_plain(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """One expert after another."""
    return moe(x, STEP)


def run_on_host(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The experts that have tokens, by the host's order."""
    return FusedMoE(moe, stacks=False)(x, STEP)


def run_stacked(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The CPU's fused MoE op where a weight format has one."""
    return FusedMoE(moe, stacks=True)(x, STEP)


def run_in_triton(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The fused MoE ops of the GPU."""
    return FusedMoE(moe, stacks=True)(x, triton_step())


def run_all_experts(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """Every expert for every token, as a CUDA graph without a fused MoE op has it."""
    return compute_all_experts(moe, x, moe.routing(moe.router(x, STEP), STEP), STEP)


ROUTES = {
    each.__name__: each
    for each in (run_plain, run_on_host, run_stacked, run_in_triton, run_all_experts)
}


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("route_name", ROUTES)
def test_the_ranks_sum_is_the_whole_mixture(
    route_name: str, tokens: int, weight_format: str
) -> None:
    spec = MoESpec(RouterConfig(EXPERTS, 2), MLPSpec(HIDDEN, INNER))
    moe = filled(spec, weight_format)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    expected = moe(x, STEP)
    parts = [ROUTES[route_name](part_of(moe, spec, experts), x) for experts in RANKS]
    # a quantized value at the border of two codes may take either one
    atol = 2e-2 if weight_format in ("w8a8", "fp8") else 1e-5
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=1e-4, atol=atol)
    chosen = moe.routing(moe.router(x, STEP), STEP) != 0
    for part, (first, end) in zip(parts, RANKS, strict=True):
        has_some = chosen[:, first:end].any(1)
        assert not part[~has_some].any(), "nothing for a token of other ranks' experts"
        assert bool((part[has_some] != 0).any(1).all())
    assert tokens > 1 or any(not part.any() for part in parts), "a rank has nothing to do"


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("name", ROUTERS)
def test_ids_count_from_the_ranks_first_expert(name: str, tokens: int) -> None:
    """In the interpreter too, where it has the router's op."""
    spec = MoESpec(ROUTERS[name], MLPSpec(HIDDEN, INNER))
    moe = filled(spec, "dense")
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(5))
    for step in (STEP, triton_step()):
        weights, ids = route_tokens(moe, x, step)
        total = torch.zeros_like(weights)
        for first, end in RANKS:
            local_weights, local = route_tokens(part_of(moe, spec, (first, end)), x, step)
            here = (ids >= first) & (ids < end)
            assert torch.equal(local, torch.where(here, ids - first, NO_EXPERT))
            assert not local_weights[~here].any()
            total += local_weights
        torch.testing.assert_close(total, weights)


def test_the_cpus_kernels_take_part() -> None:
    """int8 and int4 experts of a rank are one call there, too."""
    if build.unavailable_reason("cpu") is not None:
        pytest.skip(str(build.unavailable_reason("cpu")))
    spec = MoESpec(RouterConfig(EXPERTS, 2), MLPSpec(HIDDEN, INNER))
    for weight_format in ("int8", "int4"):
        fused = FusedMoE(part_of(filled(spec, weight_format), spec, RANKS[1]), stacks=True)
        stacked = fused._stacked
        assert stacked is not None
        assert stacked.is_fused_moe_op_usable(torch.zeros(1, HIDDEN), STEP.ops)


def test_ids_that_count_from_another_expert_change_the_result() -> None:
    """The router's op and the stack have to speak of the same experts."""
    spec = MoESpec(RouterConfig(EXPERTS, 2), MLPSpec(HIDDEN, INNER))
    moe = filled(spec, "int8")
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(3))
    step, total = triton_step(), torch.zeros_like(x)
    for first, end in RANKS:
        part = part_of(moe, spec, (first, end))
        fused = FusedMoE(part, stacks=True)
        part.local_experts = (first - 1, end - 1)
        total += fused(x, step)
    assert (total - moe(x, STEP)).abs().max() > 1e-2
