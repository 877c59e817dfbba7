"""Fused decode gives the results of the modules, and the modules run if hooks are attached."""

from __future__ import annotations

import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.config import RunConfig
from modelmill.nn.linear import Linear
from modelmill.ops.cpu.common import build
from modelmill.runtime.engine_core import EngineCore
from modelmill.weights import base
from tests.runtime import tiny

pytestmark = pytest.mark.skipif(
    build.unavailable_reason("cpu") is not None, reason=str(build.unavailable_reason("cpu"))
)


def _loop(rope_length_source: str, window: int | None, weight: str) -> EngineCore:
    model = tiny.decoder(rope_length_source, window)
    if weight == "int8":
        for module in model.modules():
            if isinstance(module, Linear):
                module.weight = base.pack_as_format(
                    "int8", module.weight.dequantize(), torch.float32
                )
    return EngineCore(
        model, RunConfig(device="cpu", max_num_batched_tokens=16, kv_cache_bytes=1 << 20)
    )


@pytest.mark.parametrize("weight", ["dense", "int8"])
@pytest.mark.parametrize(
    ("rope_length_source", "window"),
    [("fixed", None), ("prompt", None), ("running", None), ("fixed", 8)],
)
def test_whole_steps_equal_watched_ones(
    rope_length_source: str, window: int | None, weight: str
) -> None:
    loop = _loop(rope_length_source, window, weight)
    assert loop.ops.decode is not None
    ids = [
        torch.randint(tiny.VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (5, 30, 1)
    ]
    fused_logits = TeacherForcedScorer(loop).compute_logits(ids, decode_from=3)
    visited = []
    with loop.model_runner.forward_hooks(after=lambda name, *_: visited.append(name)):
        watched = TeacherForcedScorer(loop).compute_logits(ids, decode_from=3)
    assert "layers.1.mlp.down_proj" in visited
    for fused, other in zip(fused_logits, watched, strict=True):
        assert torch.equal(fused, other)


def test_another_weight_is_noticed() -> None:
    loop = _loop("fixed", None, "dense")
    before = TeacherForcedScorer(loop).compute_logits([[1, 2, 3]])[0]
    down = loop.model.get_submodule("layers.0.mlp.down_proj")
    assert isinstance(down, Linear)
    down.weight = base.pack_as_format("dense", down.weight.dequantize() * 2, torch.float32)
    assert not torch.equal(TeacherForcedScorer(loop).compute_logits([[1, 2, 3]])[0], before)
