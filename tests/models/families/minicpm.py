"""MiniCPM 1, 2 and 4, dense; transformers has no class of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from tests.models import plain_forward as plain
from tests.models.family_cases import (
    LLAMA_FAULTS,
    SMALL,
    FamilyCase,
    GgufCase,
    fault,
    rms_facts,
    times,
)

SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.5, 1.8], [1.0, 1.5, 2.0, 3.0, 5.0, 8.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
            "original_max_position_embeddings": 40}  # fmt: skip


def save(raw: dict[str, Any], folder: Path) -> plain.Logits:
    """Factors: scale_emb; scale_depth / √layers; dim_model_base / hidden_size."""
    tensors = plain.save_drawn(folder, plain.llama_shapes({"tie_word_embeddings": True} | raw), raw)
    parts = plain.llama_parts({"tie_word_embeddings": True} | raw, tensors)
    frequencies = plain.plain_frequencies(parts["dim"], raw.get("rope_theta", 10000.0))
    scaling, temperature = raw.get("rope_scaling"), 1.0
    if scaling:
        trained = scaling["original_max_position_embeddings"]
        lists = [torch.tensor(scaling[f"{n}_factor"], dtype=torch.float64) for n in LISTS]
        unscaled = frequencies
        frequencies = lambda length: unscaled(length) / lists[length > trained]  # noqa: E731
        ratio = raw["max_position_embeddings"] / trained
        temperature = math.sqrt(1 + math.log(ratio) / math.log(trained))
    return plain.PlainModel(
        **parts,
        frequencies=frequencies,
        temperature=temperature,
        embedding_scale=raw.get("scale_emb", 1.0),
        branch_scale=raw.get("scale_depth", 1.0) / math.sqrt(raw["num_hidden_layers"]),
        logit_scale=raw.get("dim_model_base", 1) / raw["hidden_size"],
    ).logits


LISTS = ("short", "long")
CASE = FamilyCase(
    "minicpm",
    {**SMALL, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3},
        {"intermediate_size": 72}, {"max_position_embeddings": 128}, {"rms_norm_eps": 1e-3},
        {"rope_theta": 300.0},
        {"num_key_value_heads": 4}, {"num_key_value_heads": None}, {"scale_emb": None},
        {"scale_depth": None}, {"dim_model_base": 48}, {"tie_word_embeddings": False},
        {"rope_scaling": LONGROPE},
    ),
    {"hidden_act": "gelu", "num_experts": 8, "scale_emb": "x", "scale_depth": 0,
     "sparse_config": {"block_size": 64}, "dim_model_base": 0, "attention_bias": 1},
    {
        **LLAMA_FAULTS,
        "branches x 1.05": fault("attn_post", branch_scale=times(1.05)),
        "embeddings x 1.05": fault("embed", None, embedding_scale=times(1.05)),
        "logits x 1.05": fault("head", None, logit_scale=times(1.05)),
    },
    make=save,
    gguf=GgufCase(
        "minicpm",
        lambda raw: {
            **rms_facts(raw), "embedding_scale": float(raw["scale_emb"]),
            "residual_scale": raw["scale_depth"] / raw["num_hidden_layers"] ** 0.5,
            "logit_scale": raw["hidden_size"] / raw["dim_model_base"],
        },
        permuted=True,
        changes={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
