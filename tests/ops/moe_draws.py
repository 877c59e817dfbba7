"""Random experts in each weight format, and the error of an implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from modelmill.ops import fused_moe, int4_linear, mxfp4_linear, registry
from modelmill.ops.fused_moe import (
    GELU_TANH,
    FusedMoEInputs,
    Shape,
    SwigluOaiParams,
    make_expert_weight_args,
)
from modelmill.ops.moe_align_block_size import NO_EXPERT
from modelmill.ops.moe_support import make_moe_problem
from modelmill.ops.quant_types import quantize_per_row

INT4, MXFP4, INT8 = "int4_fused_moe", "mxfp4_fused_moe", "int8_fused_moe"


def _random_int8(rows: int, columns: int) -> dict[str, torch.Tensor | None]:
    draw = torch.Generator().manual_seed(rows + columns)
    matrix = torch.randn(rows, columns, generator=draw) * columns**-0.5
    weight, scale = quantize_per_row(matrix, torch.int8)
    return {"weight": weight, "scale": scale}


def _random_weights(op: str, shape: Shape, group: int, *, symmetric: bool) -> dict[str, Any]:
    """Stacked as the op takes them."""
    if op == INT8:
        made = make_expert_weight_args(shape, _random_int8)
        return {
            name: value.squeeze(-1) if name.endswith("scale") else value
            for name, value in made.items()
        }
    module = int4_linear if op == INT4 else mxfp4_linear
    draw = partial(module.random_weight, group=group, device="cpu", symmetric=symmetric)
    return {**make_expert_weight_args(shape, draw), "group": group}


def random_moe_inputs(
    op: str, shape: Shape, dtype: torch.dtype, group: int, kind: str
) -> FusedMoEInputs:
    """kind: what is between and beside the products."""
    tokens, hidden, inner, experts, top_k = shape
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden + 8, generator=draw).to(dtype)[:, :hidden]
    scores = torch.rand(tokens, experts, generator=draw) + torch.linspace(0, 0.7, experts)
    topk_weights, ids = scores.softmax(-1).topk(top_k, dim=-1)
    more: dict[str, Any] = {}
    if kind == "local":  # the others' experts are another rank's
        ids[ids == 0], ids[-1] = NO_EXPERT, NO_EXPERT
        more["global_num_experts"] = experts + 1
    elif kind == "elsewhere":  # another rank has the experts of all tokens
        ids[:], more["global_num_experts"] = NO_EXPERT, 2 * experts
    elif kind in ("clamped", "gelu"):
        more["gate_up_bias"] = torch.randn(experts, 2 * inner, generator=draw).to(dtype)
        more["down_bias"] = torch.randn(experts, hidden, generator=draw).to(dtype)
        choice = {"clamp": SwigluOaiParams(1.702, 1.5)}
        more |= choice if kind == "clamped" else {"activation": GELU_TANH}
    if kind in ("shared", "elsewhere"):
        more["shared"] = torch.randn(tokens, hidden, generator=draw).to(dtype)
    own = _random_weights(op, shape, group, symmetric=kind in ("plain", "local", "clamped"))
    return FusedMoEInputs(x, topk_weights, ids.int(), **own, **more)


def moe_error(
    run: Callable[[FusedMoEInputs], torch.Tensor], op: str, inputs: FusedMoEInputs
) -> float:
    """Of ``run`` against the op's reference in float64, in the norm."""
    dtype = inputs.x.dtype
    exact: dict[str, Any] = {
        name: value.double()
        for name, value in inputs._asdict().items()
        if isinstance(value, torch.Tensor) and value.dtype == dtype
    }
    expected = registry.reference(op)(inputs._replace(**exact))
    actual = run(inputs)
    assert actual.dtype == dtype
    return float((actual.double() - expected).norm() / expected.norm())


def check_moe_on_gpu(op: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case of the CUDA implementation, twice with the same bits, and in a CUDA graph."""
    monkeypatch.setattr(fused_moe, "QWEN3_30B_A3B_SHAPES", [shape])
    cases = import_module(f"modelmill.ops.{op}").cases("cuda", torch.bfloat16)
    case = [each for each in cases if f"->2x{shape[2]}" in each.name][-1]
    inputs = FusedMoEInputs(**case.args)
    run = import_module(f"modelmill.ops.cuda.moe.{op}").run
    assert registry.backend_serves_args(op, "cuda", inputs), make_moe_problem(*inputs)
    expected = registry.reference(op)(inputs).double()
    actual = run(inputs)
    assert float((actual.double() - expected).norm() / expected.norm()) < 6e-3
    assert torch.equal(run(inputs), actual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(inputs)
    replayed.fill_(float("nan"))
    graph.replay()
    assert torch.equal(replayed, actual)
