"""LFM2-MoE's router at small scores, where what is added to their sum counts."""

from __future__ import annotations

import pytest
import torch

from modelmill.models import lfm2_moe
from modelmill.nn.moe import TopKRouting
from modelmill.ops.fused_topk import fused_topk


@pytest.mark.parametrize("logit", [0.0, -6.0, -12.0])
def test_weights_are_those_of_transformers(logit: float) -> None:
    modeling = pytest.importorskip("transformers.models.lfm2_moe.modeling_lfm2_moe")
    sizes = {"hidden_size": 32, "num_experts": 8, "num_experts_per_tok": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    config = modeling.Lfm2MoeConfig(**sizes, layer_types=["conv"] * 2, num_hidden_layers=2)
    router = modeling.Lfm2MoeTopKRouter(config)
    router.weight.data = torch.eye(8, 32)
    draw = torch.Generator().manual_seed(1)
    logits, weights, ids = router(torch.randn(9, 32, generator=draw) + logit, torch.zeros(8))
    moe = lfm2_moe.config_from_hf(config.to_dict()).moe
    assert moe is not None
    routing = TopKRouting(moe.router)
    routing.selection_bias = torch.zeros(8)
    our_weights, our_ids = fused_topk(routing.topk_inputs(logits))
    assert torch.equal(our_ids.long(), ids)
    torch.testing.assert_close(our_weights, weights, rtol=1e-6, atol=0)
