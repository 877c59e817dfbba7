"""Multimodal checkpoints with a wrong config of their text half."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.errors import CheckpointError
from tests.trust.error_lines import check_one_line


@pytest.mark.parametrize(
    ("model_type", "changes", "key"),
    [
        ("gemma3", {"text_config": 3}, "text_config"),
        ("gemma4", {"text_config": 3}, "text_config"),
        ("qwen3_5", {"text_config": 3}, "text_config"),
    ],
)
def test_a_wrong_config_is_one_line(
    model_type: str, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **changes}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    assert key in check_one_line(error.value)
