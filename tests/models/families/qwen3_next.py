"""Qwen3-Next."""

from __future__ import annotations

from tests.models.delta_net_faults import with_delta_net
from tests.models.delta_net_gguf import with_gguf
from tests.models.moe_faults import moe_family

CASE = with_gguf(with_delta_net(moe_family(
    "qwen3_next",
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
     "shared_expert_intermediate_size": 24},
    (
        {"num_experts": 3, "num_experts_per_tok": 3}, {"norm_topk_prob": False},
        {"moe_intermediate_size": 24}, {"shared_expert_intermediate_size": 40},
        {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]},
    ),
    {"num_experts_per_tok": 5, "num_experts": "8", "norm_topk_prob": 1, "mlp_only_layers": "x",
     "decoder_sparse_step": 0, "moe_intermediate_size": 0},
    ropes=(),
)), "qwen3next")  # fmt: skip
