"""Phi-3.5-MoE behind the trained length: LongRoPE's long factors, which transformers leaves out."""

from __future__ import annotations

import pytest
import torch

from modelmill.models import phimoe
from modelmill.nn.rotary import Rotary
from tests.models.all_families import CASES

TRAINED = 16


def test_transformers_keeps_the_factors_of_short_prompts() -> None:
    modeling = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    raw = CASES["phimoe"].raw()
    raw["rope_scaling"] = {**raw["rope_scaling"], "original_max_position_embeddings": TRAINED}
    rope = phimoe.config_from_hf(raw).rope
    assert rope is not None
    rotation = Rotary(rope)
    short, long = (rotation.frequencies_of_prompt(length) for length in (TRAINED, TRAINED + 1))
    assert not torch.equal(short, long)
    rotary = modeling.PhimoeRotaryEmbedding(modeling.PhimoeConfig(**raw))
    positions = torch.arange(TRAINED + 1)
    cos, _ = rotary(torch.zeros(1), position_ids=positions[None])
    turned = cos[0, :, : len(short)] / raw["rope_scaling"]["long_mscale"]
    torch.testing.assert_close(turned, torch.cos(positions[:, None] * short))
