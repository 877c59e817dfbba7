"""Baichuan and Baichuan 2; transformers has no class of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from tests.models import plain_forward as plain
from tests.models.family_cases import ALIBI_FAULTS, LLAMA_FAULTS, SMALL, FamilyCase, GgufCase, fault

# arXiv:2108.12409: 2^(-8/4), …; for six heads those of four, then every second one of eight
SLOPES = {4: [1 / 4, 1 / 16, 1 / 64, 1 / 256], 6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]}
ALIBI = {"max_position_embeddings": None, "model_max_length": 256}
SIX_HEADS = ALIBI | {"num_attention_heads": 6}


def save(raw: dict[str, Any], folder: Path) -> plain.Logits:
    """LLaMA with W_pack; Baichuan 2 divides the head's rows by their norms."""
    shapes, hidden = plain.llama_shapes(raw), raw["hidden_size"]
    for layer in range(raw["num_hidden_layers"]):
        stem = f"model.layers.{layer}.self_attn"
        for part in "qkv":
            del shapes[f"{stem}.{part}_proj.weight"]
        shapes[f"{stem}.W_pack.weight"] = (3 * hidden, hidden)
    tensors = plain.save_drawn(folder, shapes, raw)
    parts = plain.llama_parts(raw, tensors)
    parts["qkv"] = lambda layer: [
        (rows, None) for rows in tensors[f"model.layers.{layer}.self_attn.W_pack.weight"].chunk(3)
    ]
    if "z_loss_weight" in raw:
        parts["head"] = normalize
    if "max_position_embeddings" not in raw:  # 13B
        return plain.PlainModel(**parts, slopes=torch.tensor(SLOPES[parts["heads"]])).logits
    return plain.PlainModel(
        **parts, frequencies=plain.plain_frequencies(parts["dim"], 10000.0)
    ).logits


def as_converted(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """q, k and v apart; users divide Baichuan 2's head by its norms before they convert it."""
    out = {}
    for name, tensor in tensors.items():
        if "W_pack" in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                out[name.replace("W_pack", f"{part}_proj")] = rows.contiguous()
        elif name == "lm_head.weight" and "z_loss_weight" in raw:
            out[name] = normalize(tensor)
        else:
            out[name] = tensor
    return out


CASE = FamilyCase(
    "baichuan",
    {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    | {"z_loss_weight": 0},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3},
        {"intermediate_size": 72}, {"max_position_embeddings": 128}, {"rms_norm_eps": 1e-3},
        {"z_loss_weight": None}, {"model_max_length": 4096},
        ALIBI, SIX_HEADS, ALIBI | {"z_loss_weight": None},
    ),
    {"hidden_act": "gelu", "max_position_embeddings": "x", "rms_norm_eps": "x"},
    {
        **LLAMA_FAULTS,
        "head as stored": fault("head", None, normed_head=False),
        **{name: replace(each, case=SIX_HEADS) for name, each in ALIBI_FAULTS.items()},
    },
    make=save,
    gguf=GgufCase(
        "baichuan", lambda _: {"attention.layer_norm_rms_epsilon": 1e-6}, permuted=True,
        tensors=as_converted,
    ),
)  # fmt: skip
