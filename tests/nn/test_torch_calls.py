"""What torch computes in a step of the hybrids, beside their ops: a launch each on a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from modelmill.nn.fusion import fuse_model
from modelmill.nn.synthetic_step import synthetic_step
from modelmill.ops import registry
from tests.nn.hybrid_models import HYBRIDS, hybrid_model
from tests.nn.torch_calls import calls_of_a_step, uncounted

EMBED, LOGITS = {"embedding": 1}, {"_to_copy": 1}
SCALED = {"mul": 2}  # the embeddings, and the logits
PARTIAL_ROTATION = {"constant_pad_nd": 2}  # of cos and sin, which rotate some channels only
ONCE = {
    "qwen3_next": PARTIAL_ROTATION,
    "qwen3_5_text": PARTIAL_ROTATION,
    "qwen3_5_moe_text": PARTIAL_ROTATION,
    "falcon_h1": SCALED,
    "granitemoehybrid": SCALED,
}
"""Calls of a decode step beside those for the embeddings and the logits."""
LOGIT_ROWS = {"index": 2}  # of a prompt, in the last layer: branch and residual
CUT_STEP = Counter({"index": 7, "_to_copy": 2, "sub": 3, "searchsorted": 1, "clamp_": 1,
                    "arange": 1})  # fmt: skip
"""Calls that make the step of the logit rows (``Step.step_of_logit_rows``)."""
NOT_ON_A_GPU = ("decode", "routed_moe")


def _calls(model: Any, sequences: tuple[int, int, int]) -> Counter[str]:
    names = [name for name in registry.op_names() if name not in NOT_ON_A_GPU]
    ops = uncounted(registry.select_backends("cpu", dict.fromkeys(NOT_ON_A_GPU, "torch")), names)
    return Counter(calls_of_a_step(fuse_model(model), synthetic_step(model, ops, sequences)))


@pytest.mark.parametrize("family", HYBRIDS)
def test_torch_computes_no_more_than_this(family: str) -> None:
    model = hybrid_model(family, torch.bfloat16)
    expected = Counter(EMBED) + Counter(LOGITS) + Counter(ONCE.get(family, {}))
    assert _calls(model, (3, 1, 20)) == expected
    cut = CUT_STEP if hasattr(fuse_model(model), "_run_layers_and_final_norm") else Counter()
    assert _calls(model, (1, 9, 9)) == expected + Counter(LOGIT_ROWS) + cut
