"""Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.models.families import mamba2
from tests.models.family_cases import (
    NULL,
    FamilyCase,
    GgufCase,
    changed,
    decoder_family,
    fault,
    rms_facts,
)

SSM_MULTIPLIERS = (0.9, 1.1, 0.8, 1.3, 0.7)  # of z, x, B, C, dt
OTHER_X, OTHER_DT = (0.9, 1.2, 0.8, 1.3, 0.7), (0.9, 1.1, 0.8, 1.3, 0.8)


def multiplied(**changes: Any) -> Any:
    """Other multipliers."""
    return lambda multipliers: replace(multipliers, **changes)


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF; the multipliers are in the weights."""
    dim = raw["hidden_size"] // raw["num_attention_heads"]
    return {
        **rms_facts(raw),
        "attention.key_length": dim, "attention.value_length": dim,
        "ssm.conv_kernel": 4, "ssm.inner_size": raw["mamba_d_ssm"],
        "ssm.state_size": raw["mamba_d_state"], "ssm.time_step_rank": raw["mamba_n_heads"],
        "ssm.group_count": raw["mamba_n_groups"],
    }  # fmt: skip


def as_converted(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As of Mamba2; weights times their multipliers."""
    mixers = {name.replace(".mamba.", ".mixer."): each for name, each in tensors.items()}
    converted = mamba2.as_converted({"n_groups": raw["mamba_n_groups"]}, mixers)
    shared = raw["mamba_n_groups"] * raw["mamba_d_state"]
    sizes = [raw["mamba_d_ssm"], raw["mamba_d_ssm"], shared, shared, raw["mamba_n_heads"]]
    by_row = torch.repeat_interleave(torch.tensor(raw["ssm_multipliers"]), torch.tensor(sizes))
    attention_in = raw["attention_in_multiplier"]
    factors = {
        "down_proj": raw["mlp_multipliers"][1], "gate_proj": raw["mlp_multipliers"][0],
        "k_proj": raw["key_multiplier"] * attention_in, "q_proj": attention_in,
        "v_proj": attention_in, "o_proj": raw["attention_out_multiplier"],
        "out_proj": raw["ssm_out_multiplier"],
        "in_proj": raw["ssm_in_multiplier"] * by_row[:, None],
        "lm_head": raw["lm_head_multiplier"], "embed_tokens": raw["embedding_multiplier"],
    }  # fmt: skip
    return {
        name.replace(".mixer.", ".mamba."): each * factors.get(name.split(".")[-2], 1.0)
        for name, each in converted.items()
    }


CASE: FamilyCase = decoder_family(
    "falcon_h1",
    {
        "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2,
        "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "mlp_multipliers": [0.8, 0.7],
        "key_multiplier": 0.6, "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.2,
        "ssm_multipliers": list(SSM_MULTIPLIERS), "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.85,
    },
    (
        {"attention_bias": True}, {"mlp_bias": True}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"mamba_d_ssm": NULL},
        {"mamba_d_ssm": NULL, "mamba_expand": 4},
        {"mamba_d_ssm": 64}, {"mamba_n_heads": 4, "mamba_d_head": 24}, {"mamba_n_groups": 1},
        {"mamba_d_state": 8}, {"mamba_d_conv": 3}, {"mamba_conv_bias": False},
        {"mamba_proj_bias": True}, {"projectors_bias": True}, {"mamba_rms_norm": True},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False}, {"mamba_chunk_size": 16},
        {"num_logits_to_keep": NULL}, {"time_step_limit": [0.4, 0.9]},
        {"lm_head_multiplier": 1.0, "embedding_multiplier": 1.0, "mlp_multipliers": NULL,
         "key_multiplier": 1.0, "attention_out_multiplier": 1.0, "attention_in_multiplier": 1.0,
         "ssm_multipliers": NULL, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0},
    ),
    {
        "mamba_n_heads": 7, "mamba_d_head": 13, "mamba_n_groups": 3, "mamba_d_state": 0,
        "mamba_d_conv": 1, "mamba_expand": 0, "mamba_conv_bias": 1, "mamba_proj_bias": 1,
        "projectors_bias": 1, "mamba_rms_norm": 1, "mamba_norm_before_gate": "yes",
        "mamba_d_ssm": 97, "time_step_limit": [1.0], "mlp_multipliers": [1.0],
        "ssm_multipliers": [1.0, 2.0], "key_multiplier": 0.0, "attention_in_multiplier": "x",
        "attention_out_multiplier": -1.0, "ssm_in_multiplier": 0, "ssm_out_multiplier": True,
        "embedding_multiplier": 0, "lm_head_multiplier": 0,
    },
    {
        "steps limited": fault(
            "mamba.ssm", parallel_recurrence=changed(dt_limit=(0.0, 0.5))
        ),
        "key multiplier": fault("attn.k_proj", multipliers=multiplied(key=0.66)),
        "multiplier of x": fault("mamba.x_proj", multipliers=multiplied(ssm=OTHER_X)),
        "multiplier of dt": fault("mamba.rates", multipliers=multiplied(ssm=OTHER_DT)),
        "multiplier of the gate": fault("mlp.gate_proj", multipliers=multiplied(mlp=(0.9, 0.7))),
        "multiplier of its output": fault("mamba.out_proj", multipliers=multiplied(ssm_out=0.95)),
        "norm behind the gate": fault(
            "mamba.gated_norm", case={"mamba_rms_norm": True},
            parallel_recurrence=changed(norm_first=False),
        ),
    },
    gguf=GgufCase(
        "falcon-h1", gguf_facts, tensors=as_converted,
        changes={"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
)  # fmt: skip
