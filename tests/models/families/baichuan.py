"""Baichuan and Baichuan 2, 7B; transformers has no class of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn.functional import normalize

from tests.models.family_cases import LLAMA_FAULTS, SMALL, FamilyCase, Logits, fault
from tests.models.plain_forward import (
    PlainModel,
    llama_parts,
    llama_shapes,
    plain_frequencies,
    save_drawn,
)


def save(raw: dict[str, Any], folder: Path) -> Logits:
    """LLaMA with W_pack; Baichuan 2 divides the head's rows by their norms."""
    shapes, hidden = llama_shapes(raw), raw["hidden_size"]
    for layer in range(raw["num_hidden_layers"]):
        stem = f"model.layers.{layer}.self_attn"
        for part in "qkv":
            del shapes[f"{stem}.{part}_proj.weight"]
        shapes[f"{stem}.W_pack.weight"] = (3 * hidden, hidden)
    tensors = save_drawn(folder, shapes, raw)
    parts = llama_parts(raw, tensors)
    parts["qkv"] = lambda layer: [
        (rows, None) for rows in tensors[f"model.layers.{layer}.self_attn.W_pack.weight"].chunk(3)
    ]
    if "z_loss_weight" in raw:
        parts["head"] = normalize
    return PlainModel(**parts, frequencies=plain_frequencies(parts["dim"], 10000.0)).logits


CASE = FamilyCase(
    "baichuan",
    {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    | {"z_loss_weight": 0},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3},
        {"intermediate_size": 72}, {"max_position_embeddings": 128}, {"rms_norm_eps": 1e-3},
        {"z_loss_weight": None}, {"model_max_length": 4096},
    ),
    {"hidden_act": "gelu", "max_position_embeddings": None, "rms_norm_eps": "x"},
    {**LLAMA_FAULTS, "head as stored": fault("head", None, normed_head=False)},
    make=save,
)  # fmt: skip
