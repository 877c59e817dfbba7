"""Mamba2."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.family_cases import EPS_FAULT, VOCAB, FamilyCase, GgufCase, changed, fault


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF; the converter writes sizes that it has not as 0."""
    inner = raw.get("expand", 2) * raw["hidden_size"]
    return {
        "context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0,
        "attention.head_count_kv": None, "rope.freq_base": None,
        "ssm.conv_kernel": raw.get("conv_kernel", 4), "ssm.inner_size": inner,
        "ssm.state_size": raw["state_size"], "ssm.time_step_rank": inner // raw["head_dim"],
        "ssm.group_count": raw["n_groups"], "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip


def as_converted(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A and D as columns, the norm by group, the convolution as a matrix."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            out[name] = -tensor.exp()[:, None]
        elif name.endswith(".D"):
            out[name] = tensor[:, None].contiguous()
        elif name.endswith(".mixer.norm.weight"):
            out[name] = tensor.reshape(raw["n_groups"], -1)
        elif name.endswith(".conv1d.weight"):
            out[name] = tensor[:, 0].contiguous()
        else:
            out[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return out


CASE = FamilyCase(
    "mamba2",
    {
        "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 8,
        "head_dim": 12, "state_size": 16, "n_groups": 2, "time_step_limit": [0.0, 100.0],
    },
    (
        {"num_heads": 4, "head_dim": 24}, {"hidden_size": 64, "head_dim": 16},
        {"num_hidden_layers": 3}, {"vocab_size": 96}, {"state_size": 8}, {"n_groups": 1},
        {"n_groups": 8}, {"expand": 4, "head_dim": 24}, {"conv_kernel": 3}, {"use_bias": True},
        {"use_conv_bias": False}, {"layer_norm_epsilon": 1e-3}, {"tie_word_embeddings": True},
        {"time_step_limit": [0.4, 0.9]}, {"chunk_size": 16},
        {"time_step_rank": 5, "time_step_min": 0.1, "time_step_max": 0.5, "time_step_floor": 0.01,
         "rescale_prenorm_residual": True, "residual_in_fp32": False},
        {"norm_before_gate": True},
    ),
    {
        "is_encoder_decoder": True, "hidden_act": "gelu", "num_heads": 7, "head_dim": 13,
        "n_groups": 3, "state_size": 0, "conv_kernel": 1, "use_bias": 1, "use_conv_bias": "no",
        "expand": 3, "time_step_limit": [2.0, 1.0],
    },
    {
        "eps x 10": EPS_FAULT,
        "gated norm's eps of 1": fault("attn.gated_norm", recurrence=changed(eps=1.0)),
        "steps limited": fault("attn.ssm", recurrence=changed(dt_limit=(0.0, 0.5))),
    },
    gguf=GgufCase(
        "mamba2", gguf_facts, changes={"time_step_limit": None}, tensors=as_converted
    ),
)  # fmt: skip
