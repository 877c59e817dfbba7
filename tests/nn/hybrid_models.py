"""Seeded models of the hybrid families, of their smallest configs."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from modelmill.nn.synthetic_step import fill_random_weights
from tests.models.all_families import CASES

HYBRIDS = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mamba2", "falcon_h1", "granitemoehybrid",
    "nemotron_h",
)  # fmt: skip


def hybrid_model(family: str, dtype: torch.dtype) -> Any:
    """The model."""
    case = CASES[family]
    raw = case.raw()
    module = importlib.import_module(f"modelmill.models.{case.model_type}")
    model = module.Model(module.config_from_hf(raw))
    return fill_random_weights(model, {}, dtype, "cpu")
