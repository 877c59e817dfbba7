"""A norm that rounds its output and a product that rounds its input are the same model, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from modelmill.nn.trial import draw_weights, trial_step
from modelmill.ops import shelf
from modelmill.runtime.load import build
from modelmill.weights import held

LLAMA = {
    "model_type": "llama", "vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def drawn(kind: str, static: bool, dtype: torch.dtype) -> Any:
    model = build("llama", LLAMA)
    kinds = {n: kind for n, m in model.named_modules() if hasattr(m, "shape") and n != "head"}
    draw_weights(model, kinds, dtype, "cpu")
    for module in model.modules():
        weight = getattr(module, "held", None)
        if static and weight is not None and weight.kind == kind:
            given = weight.tensors() | {"input_scale": torch.tensor([0.03])}
            module.held = held.from_tensors(kind, given)
    return model


@pytest.mark.parametrize("kind", ["w8a8", "fp8"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_and_unfused_give_the_same_bits(kind: str, static: bool, dtype: torch.dtype) -> None:
    plain = shelf.resolve("cpu", dict.fromkeys(shelf.OPS, "torch"))
    seen: list[Any] = []
    gates: list[Any] = []

    def norm(*args: Any) -> Any:
        seen.append(args[4])
        return shelf.reference("add_rms_norm_quant")(*args)

    def gate(*args: Any) -> Any:
        gates.append(args[1])
        return shelf.reference("silu_mul_quant")(*args)

    chosen = {**plain.chosen, "add_rms_norm_quant": "triton", "silu_mul_quant": "triton"}
    fused = replace(plain, add_rms_norm_quant=norm, silu_mul_quant=gate, chosen=chosen)
    assert fused.norms_quantize
    assert fused.gates_quantize
    assert not plain.norms_quantize
    assert not plain.gates_quantize
    model = drawn(kind, static, dtype)
    with torch.inference_mode():
        step = trial_step(model, plain, (2, 5, 20))
        shape = [c.clone() for c in (*step.kv.k, *step.kv.v)]
        right = model(step)
        for cache, kept in zip((*step.kv.k, *step.kv.v), shape, strict=True):
            cache.copy_(kept)
        mine = model(replace(step, ops=fused))
        assert torch.equal(mine, right)
        assert len(seen) == 3, "all norms but the first (which has no residual) and the last"
        assert len(gates) == 2
        model(replace(step, ops=fused, whole=False))
        assert (len(seen), len(gates)) == (3, 2), "who watches modules sees floating point"
