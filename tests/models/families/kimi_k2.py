"""Kimi K2, whose checkpoints name DeepSeek-V3's class in transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.models.families import deepseek_v3
from tests.models.family_cases import save_transformers
from tests.models.plain_forward import Logits


def save(raw: dict[str, Any], folder: Path) -> Logits:
    """DeepSeek-V3 under its own name."""
    logits = save_transformers(raw | {"model_type": "deepseek_v3"}, folder)
    (folder / "config.json").write_text(json.dumps(raw))
    return logits


CASE = replace(deepseek_v3.CASE, model_type="kimi_k2", make=save)
