"""Nemotron-H."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import Tensors, expert_facts, stack_experts
from tests.models.family_cases import VOCAB, FamilyCase, GgufCase, changed, fault, head_facts
from tests.models.moe_faults import MOE_KV_TOLERANCE, ROUTING, one_fewer, with_router

TYPES = ["linear_attention", "moe", "full_attention", "mlp"]


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF, dense or with experts."""
    types, heads = raw["layers_block_type"], raw["mamba_num_heads"]
    inner = {"mlp": raw["intermediate_size"], "moe": raw["moe_intermediate_size"]}
    facts = {
        "block_count": len(types),
        "attention.head_count_kv": [
            raw["num_key_value_heads"] if each == "full_attention" else 0 for each in types
        ],
        "feed_forward_length": [inner.get(each, 0) for each in types],
        **head_facts(raw),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": 4,
        "ssm.state_size": raw["ssm_state_size"],
        "ssm.group_count": raw["n_groups"],
        "ssm.inner_size": heads * raw["mamba_head_dim"],
        "ssm.time_step_rank": heads,
    }
    if "moe" not in types:
        return facts
    return {
        **facts,
        **expert_facts(raw, "n_routed_experts"),
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": raw["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": True,
        "expert_weights_scale": raw["routed_scaling_factor"],
        "expert_group_count": raw["n_group"],
        "expert_group_used_count": raw["topk_group"],
    }


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """Decays, columns, groups of the gated norm, and the experts of a layer in one tensor."""
    out = {}
    for name, tensor in stack_experts(tensors).items():
        if name.endswith(".A_log"):
            out[name] = -tensor.exp()[:, None]
        elif name.endswith(".D"):
            out[name] = tensor[:, None].contiguous()
        elif name.endswith(".dt_bias"):
            out[name.replace("dt_bias", "dt.bias")] = tensor
        elif name.endswith(".conv1d.weight"):
            out[name] = tensor[:, 0].contiguous()
        elif name.endswith("mixer.norm.weight"):
            out[name] = tensor.reshape(raw["n_groups"], -1)
        elif ".mixer.experts." in name:
            out[name.replace("backbone.", "model.").replace("mixer", "mlp")] = tensor
        else:
            out[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return out


CASE = FamilyCase(
    "nemotron_h",
    {
        "vocab_size": VOCAB, "hidden_size": 48, "layers_block_type": TYPES,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "intermediate_size": 80, "max_position_embeddings": 256,
        "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2,
        "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 40, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.5, "chunk_size": 16,
    },
    (
        {"layers_block_type": None, "hybrid_override_pattern": "M-*E", "num_hidden_layers": 4},
        {"layers_block_type": None},
        {"layers_block_type": ["mamba", "mlp", "attention"]},
        {"layers_block_type": ["full_attention", "moe"], "num_hidden_layers": 2},
        {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"hidden_size": 64},
        {"vocab_size": 96}, {"max_position_embeddings": 128}, {"head_dim": 16},
        {"intermediate_size": 72}, {"mlp_hidden_act": "gelu"}, {"mlp_bias": True},
        {"mamba_num_heads": 4}, {"mamba_head_dim": 16}, {"ssm_state_size": 8}, {"n_groups": 4},
        {"n_groups": None, "mamba_n_groups": 4}, {"conv_kernel": 3},
        {"use_conv_bias": False}, {"mamba_conv_bias": False}, {"use_bias": True},
        {"layer_norm_epsilon": 1e-3}, {"tie_word_embeddings": True},
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
        {"num_experts_per_tok": 1}, {"moe_intermediate_size": 24},
        {"moe_shared_expert_intermediate_size": 24}, {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False}, {"n_group": 2, "topk_group": 1}, {"n_shared_experts": 1},
        {"expand": 4, "chunk_size": 8, "use_mamba_kernels": False, "num_logits_to_keep": 2,
         "time_step_max": 0.5, "time_step_floor": 1e-3, "residual_in_fp32": True,
         "rescale_prenorm_residual": False, "hidden_dropout": 0.1,
         "moe_shared_expert_overlap": False, "mamba_ssm_cache_dtype": "bfloat16",
         "mtp_layers_block_type": ["moe"], "time_step_min": 1e-4},
    ),
    {
        "is_encoder_decoder": True, "mlp_hidden_act": "quick_gelu", "mamba_hidden_act": "relu",
        "layers_block_type": ["mamba", "lstm"], "layer_types": 3, "num_hidden_layers": 5,
        "hybrid_override_pattern": "MX", "attention_bias": True, "sliding_window": 20,
        "mamba_proj_bias": True, "n_shared_experts": 2, "moe_latent_size": 24,
        "time_step_limit": [0.1, 1.0], "n_groups": 3, "mamba_num_heads": 0, "mamba_head_dim": "x",
        "ssm_state_size": 0, "conv_kernel": 1, "use_bias": 1, "use_conv_bias": "no",
        "mlp_bias": 1, "n_group": 3, "topk_group": 5, "num_experts_per_tok": 9,
        "n_routed_experts": 0, "moe_intermediate_size": 0, "norm_topk_prob": 1,
        "moe_shared_expert_intermediate_size": 0, "routed_scaling_factor": 0, "head_dim": 7,
        "attention_head_dim": 16,
        "num_key_value_heads": 3, "num_attention_heads": 0,
    },
    {
        "eps x 10": fault("attn_norm.eps", eps=lambda eps: 10 * eps),
        "gated norm's eps of 1": fault("attn.gated_norm", recurrence=changed(eps=1.0)),
        "steps limited": fault("attn.ssm", recurrence=changed(dt_limit=(0.0, 0.5))),
        "ReLU for its square": fault("mlp.act", 3, activation="relu"),
        "scores x 1.1": fault("attn.core", 2, attention_scale=1.1 * 12**-0.5),
        "one expert fewer": fault(ROUTING, 1, moe=with_router(top_k=one_fewer)),
        "weights x 1.05": fault(ROUTING, 1, moe=with_router(scale=1.05 * 1.5)),
        "no groups": fault(ROUTING, 1, moe=with_router(groups=1, top_groups=1)),
    },
    unnamed_fields=frozenset({"num_nextn_predict_layers"}),
    gguf=GgufCase(
        "nemotron_h_moe", gguf_facts, permuted=True, tensors=as_converted,
        changes={"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    kv_tolerance=MOE_KV_TOLERANCE,
)  # fmt: skip
