"""Soft cap, ALiBi and sinks of paged attention: by their formulas, in each kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops.attention_support import AttentionSupportRange
from modelmill.ops.bound_op import CachedOpBinding, SelectedOp
from modelmill.ops.cuda.attention import paged_attention as cuda
from modelmill.ops.cuda.attention import paged_decode, paged_decode16
from modelmill.ops.paged_attention import DECLARATION, PagedAttentionInputs, paged_attention
from modelmill.ops.score_mods import ScoreMods
from modelmill.ops.triton.attention import paged_attention as triton_attention
from tests.ops.test_cpu_kernels import _attention

HEADS = 6
MODS = {
    "cap": ScoreMods(softcap=1.5),
    "alibi": ScoreMods(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.05, 0.01, 0.3])),
    "sinks": ScoreMods(sinks=torch.tensor([0.0, 2.0, -3.0, 8.0, 40.0, -100.0])),
    "all": ScoreMods(2.0, torch.linspace(0.01, 0.5, HEADS), torch.linspace(-2, 3, HEADS)),
}
LENGTHS = [(1, 700), (100, 333), (3, 40), (1, 17), (1, 1), (2, 2)]


def step(mods: ScoreMods | None, window: int | None = None, **changes: Any) -> PagedAttentionInputs:
    args = _attention(LENGTHS, torch.float32, torch.float32, window, heads=(HEADS, 2))
    return PagedAttentionInputs(**args, score_mods=mods, **changes)


def by_definition(inputs: PagedAttentionInputs) -> torch.Tensor:
    """One query, one key at a time, in Python's floats."""
    mods, size = inputs.score_mods or ScoreMods(), inputs.k_cache.shape[2]
    rows = []
    for b, (queries, context) in enumerate(LENGTHS):
        place = [divmod(p, size) for p in range(context)]
        table = inputs.block_tables[b].tolist()
        keys = torch.stack([inputs.k_cache[table[page], :, at] for page, at in place]).double()
        values = torch.stack([inputs.v_cache[table[page], :, at] for page, at in place]).double()
        first = int(inputs.query_start[b])
        for i in range(queries):
            position = context - queries + i
            for head in range(HEADS):
                visible = range(max(0, position + 1 - (inputs.window or context)), position + 1)
                scores = (
                    keys[visible.start : visible.stop, head // 3]
                    @ inputs.q[first + i, head].double()
                )
                scores = scores * inputs.scale
                if mods.softcap is not None:
                    scores = mods.softcap * torch.tanh(scores / mods.softcap)
                if mods.alibi_slopes is not None:
                    scores = scores + float(mods.alibi_slopes[head]) * (
                        torch.tensor(visible) - position
                    )
                weights = scores.exp()
                total = float(weights.sum())
                if mods.sinks is not None:
                    total += math.exp(float(mods.sinks[head]))
                rows.append(weights @ values[visible.start : visible.stop, head // 3] / total)
    return torch.stack(rows).view(-1, HEADS * inputs.q.shape[2])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", MODS)
def test_the_reference_follows_the_formulas(name: str, window: int | None) -> None:
    inputs = step(MODS[name], window)
    actual = paged_attention(inputs)
    torch.testing.assert_close(actual.double(), by_definition(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pages", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("name", MODS)
def test_the_cpu_kernel_computes_the_same(
    name: str, window: int | None, pages: torch.dtype
) -> None:
    """Also where a context is split, and with pages of 8 bits."""
    module = registry.implementations("paged_attention")["cpu"]
    if module.unavailable_reason("cpu") is not None:
        pytest.skip("the CPU kernels are not compiled here")
    inputs = step(MODS[name], window)
    if pages is torch.int8:
        parts = {}
        for part in ("k", "v"):
            wide = getattr(inputs, f"{part}_cache")
            scale = wide.abs().amax(-1).clamp(min=1e-3) / 127
            parts[f"{part}_cache"] = (wide / scale[..., None]).round().to(torch.int8)
            parts[f"{part}_scale"] = scale
        inputs = inputs._replace(**parts)
    problem = DECLARATION.make_problem(inputs)
    assert any(each.covers(problem) for each in module.SUPPORTED_PROBLEMS)
    torch.testing.assert_close(module.run(inputs), paged_attention(inputs), rtol=1e-4, atol=1e-5)


def test_kernels_without_them_do_not_serve_them() -> None:
    problem = DECLARATION.make_problem(step(MODS["cap"]))
    assert problem.has_score_mods
    assert not AttentionSupportRange().covers(problem)
    assert AttentionSupportRange(serves_score_mods=True).covers(problem)
    assert AttentionSupportRange(serves_score_mods=True).covers(
        DECLARATION.make_problem(step(None))
    )


@pytest.mark.parametrize("name", MODS)
def test_cuda_kernels_serve_sinks_alone_and_single_queries(name: str) -> None:
    bf16 = [
        each.bfloat16() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in step(MODS[name])[:6]
    ]
    inputs = step(MODS[name])._replace(
        **dict(zip(PagedAttentionInputs._fields, bf16, strict=False))
    )
    serving = [kernel for kernel in cuda.KERNELS if kernel.range.serves_score_mods]
    assert serving == list(paged_decode16.KERNELS)
    assert all(kernel.range.phases == paged_decode.DECODE_PHASES for kernel in serving)
    assert paged_decode16.supports_decode(inputs) == (name == "sinks")


def test_a_binding_tells_calls_with_them_from_calls_without() -> None:
    binding, op = CachedOpBinding(), registry.select_backends("cpu").paged_attention
    assert isinstance(op, SelectedOp)
    plain = step(None)
    capped = plain._replace(score_mods=MODS["cap"])
    for inputs in (plain, capped, plain, capped._replace(score_mods=MODS["sinks"]), capped):
        torch.testing.assert_close(
            binding(op, inputs), paged_attention(inputs), rtol=1e-4, atol=1e-5
        )


# 2^-(-1e30) of rows that are not decoded is infinite, and unused; NumPy warns
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("pages", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["one head", "group"])
@pytest.mark.parametrize("splits", [1, 3])
def test_triton_decodes_the_same(
    splits: int, heads: tuple[int, int], pages: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decode kernel, whole and in splits that are merged, and prefill over 8-bit pages."""
    module = registry.implementations("paged_attention")["triton"]
    if module.unavailable_reason("cpu") is not None:
        pytest.skip("Triton's interpreter is off")
    monkeypatch.setattr(triton_attention, "_num_splits", lambda *_: splits)
    lengths = [(1, 150), (3, 20), (1, 5)]
    args = _attention(lengths, torch.float16, torch.float16, 140, heads=heads, dim=32)
    if pages is torch.int8:
        for part in ("k", "v"):
            wide = args[f"{part}_cache"].float()
            scale = wide.abs().amax(-1).clamp(min=1e-3) / 127
            args[f"{part}_cache"] = (wide / scale[..., None]).round().to(torch.int8)
            args[f"{part}_scale"] = scale
    mods = ScoreMods(2.0, torch.linspace(0.01, 0.3, heads[0]), torch.linspace(-2, 3, heads[0]))
    inputs = PagedAttentionInputs(**args, score_mods=mods)
    torch.testing.assert_close(module.run(inputs), paged_attention(inputs), rtol=1e-2, atol=1e-2)
