"""A norm that rounds its output and a product that rounds its input are the same model, bit for
bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from modelmill.loader.model_loader import build_model
from modelmill.nn.fusion import fuse_model
from modelmill.nn.linear import Linear
from modelmill.nn.synthetic_step import fill_random_weights, synthetic_step
from modelmill.ops import registry
from modelmill.weights import base

LLAMA = {
    "model_type": "llama", "vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 100, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def random_decoder(weight_format: str, static: bool, dtype: torch.dtype) -> Any:
    model = build_model("llama", LLAMA)
    weight_formats = {
        n: weight_format for n, m in model.named_modules() if hasattr(m, "shape") and n != "head"
    }
    fill_random_weights(model, weight_formats, dtype, "cpu")
    for module in model.modules():
        if static and isinstance(module, Linear) and module.weight.format == weight_format:
            tensors = module.weight.tensors() | {"input_scale": torch.tensor([0.03])}
            module.weight = base.from_tensors(weight_format, tensors)
    return model


@pytest.mark.parametrize("weight_format", ["w8a8", "fp8"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_and_unfused_give_the_same_bits(
    weight_format: str, static: bool, dtype: torch.dtype
) -> None:
    plain = registry.select_backends("cpu", dict.fromkeys(registry.op_names(), "torch"))
    norm_args: list[Any] = []
    gates: list[Any] = []

    def norm(*args: Any) -> Any:
        norm_args.append(args[4].dtype)
        return registry.reference("add_rms_norm_quant")(*args)

    def gate(*args: Any) -> Any:
        gates.append(args[1])
        return registry.reference("silu_mul_quant")(*args)

    backends = {**plain.backends, "add_rms_norm_quant": "triton", "silu_mul_quant": "triton"}
    bound = {"add_rms_norm_quant": norm, "silu_mul_quant": gate}
    fused = plain.replace(bound, backends=backends)
    assert fused.fuses_norm_quant
    assert fused.fuses_silu_mul_quant
    assert not plain.fuses_norm_quant
    assert not plain.fuses_silu_mul_quant
    model = random_decoder(weight_format, static, dtype)
    with torch.inference_mode():
        step = synthetic_step(model, plain, (2, 5, 20))
        shape = [c.clone() for c in (*step.kv.k, *step.kv.v)]
        expected = fuse_model(model)(step)
        for cache, original in zip((*step.kv.k, *step.kv.v), shape, strict=True):
            cache.copy_(original)
        fused_logits = fuse_model(model)(replace(step, ops=fused))
        assert torch.equal(fused_logits, expected)
        assert len(norm_args) == 3, "all norms but the first (which has no residual) and the last"
        assert len(gates) == 2
        model(replace(step, ops=fused))
        assert (len(norm_args), len(gates)) == (3, 2), "plain modules put out floating point"
