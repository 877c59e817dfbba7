"""Checks the text half of a multimodal checkpoint against the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.config import RunConfig
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept


@torch.no_grad()
def seeded_model(cls: Any, config: Any) -> Any:
    """A model of a transformers class with seeded tensors."""
    torch.manual_seed(0)
    model = cls(config).float().eval()
    for parameter in model.parameters():
        spread = 0.3 if parameter.dim() == 1 else 1.2 * parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape) * spread)
    return model


@torch.no_grad()
def check_logits(folder: Path, model: Any, out: Path) -> None:
    """Accepted against its own reference, and equal to the whole model."""
    report, written = build_and_accept(folder, out, "float32", "none")
    assert written, report.get("reason", report)
    engine = EngineCore.open(out, RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    ids = torch.randint(2, 120, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    actual = TeacherForcedScorer(engine).compute_logits([ids], decode_from=30)[0]
    assert (actual - model(torch.tensor([ids])).logits[0]).abs().max() < 1e-4
