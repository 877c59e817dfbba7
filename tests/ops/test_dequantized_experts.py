"""Experts that are dequantized before the products of many tokens, in Triton's interpreter."""

from __future__ import annotations

import importlib

import pytest
import torch

from modelmill.ops import fused_moe, registry

DTYPES = {
    "int4_fused_moe": torch.float16,
    "mxfp4_fused_moe": torch.bfloat16,
}
# imported before any test may say that kernels are not interpreted
KERNELS = {op: registry.implementations(op, ["triton"]).get("triton") for op in DTYPES}
FEW, MANY = (40, 64, 32, 2, 2), (130, 64, 32, 2, 2)  # as many pairs an expert as tokens


@pytest.mark.parametrize("op", DTYPES)
def test_many_tokens_take_dequantized_weights(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KERNELS[op]
    if kernel is None or kernel.unavailable_reason("cpu") is not None:
        pytest.skip("Triton's interpreter is not available")
    from modelmill.ops.triton.moe import dequantize_experts, grouped_gemm

    dtypes: list[torch.dtype] = []
    launch = grouped_gemm._launch_grouped_gemm

    def noted(inputs: fused_moe.FusedMoEInputs, name: str, *rest: object) -> None:
        dtypes.append(getattr(inputs, name).dtype)
        launch(inputs, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(grouped_gemm, "_launch_grouped_gemm", noted)
    monkeypatch.setattr(fused_moe, "case_shapes", lambda _: [FEW, MANY])
    dtype, declaration = DTYPES[op], importlib.import_module(f"modelmill.ops.{op}")
    reference = registry.adapt_to_named_args(op, registry.reference(op))
    call = registry.adapt_to_named_args(op, kernel.run)
    few, many = declaration.cases("cpu", dtype)
    call(**few.args)
    assert dtype not in dtypes, "few tokens multiply the codes"
    dtypes.clear()
    out, expected = call(**many.args), reference(**many.args)
    assert dtypes == [dtype, dtype]
    torch.testing.assert_close(
        out.float(), expected.float(), rtol=0, atol=declaration.TOLERANCE[dtype]
    )
    monkeypatch.setattr(dequantize_experts, "total_memory", lambda _: 1 << 16)
    dtypes.clear()
    call(**many.args)
    assert dtype not in dtypes, "a small GPU has no room for them"
