"""Bounds that no token of the acceptance text reaches: faults of them are refused by name.

Windows longer than the text, soft caps, clamps of experts, limits of a recurrence's steps, and
factors of queries by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.models import gemma2, gpt_oss, mamba2, ministral3
from modelmill.nn.attention_temperature import AttentionTemperature
from modelmill.nn.embedding_and_head import LMHead
from modelmill.nn.mlp import ClampedSwiglu
from modelmill.ops import score_mods
from modelmill.ops.fused_moe import SwigluOaiParams, swiglu_oai
from tests.accept.build_and_accept import build_and_accept
from tests.models import planted_fault as planted
from tests.models.all_families import CASES
from tests.models.families.ministral3 import YARN
from tests.models.family_cases import Change, changed, times

LAYERS = {"num_hidden_layers": 2}
FAR: dict[str, tuple[str, Mapping[str, Any]]] = {
    "clamp": ("gpt_oss", LAYERS | {"num_local_experts": 4, "swiglu_limit": 50.0}),
    "window": ("gemma2", LAYERS | {"sliding_window": 120}),
    "caps": ("gemma2", LAYERS | {"attn_logit_softcapping": 500.0,
                                 "final_logit_softcapping": 500.0}),
    "largest step": ("mamba2", {"time_step_limit": [0.0, 50.0]}),
    "least step": ("mamba2", {"time_step_limit": [0.001, 50.0]}),
    "factors": ("ministral3", {
        "max_position_embeddings": 4096,
        "rope_parameters": YARN | {"original_max_position_embeddings": 256},
    }),
}  # fmt: skip
"""Families with a bound that the text does not reach."""

CORE, ACT, HEAD, SSM = "attn.core.bound", "mlp.experts.0.act.bound", "head.bound", "attn.ssm.bound"
FACTORS = "rotary.query_factors"


def limit(value: float) -> Change:
    """Another bound of the experts' gate and up."""
    clamp = SwigluOaiParams(1.702, value)
    return changed(moe=lambda moe: replace(moe, expert=replace(moe.expert, clamp=clamp)))


def steps(low: float, high: float) -> Change:
    """Other limits of the recurrence's steps."""
    return changed(recurrence=changed(dt_limit=(low, high)))


def growth(slope: float, length: int) -> Change:
    """Other factors of queries."""
    return changed(attention_temperature=AttentionTemperature(slope, length))


def up_from_above_only(self: Any, gate_up: torch.Tensor, step: Any) -> torch.Tensor:
    del step
    gate, up = gate_up.chunk(2, -1)
    up = torch.where(up < 0, up, up.clamp(max=self.clamp.limit))
    unbounded = SwigluOaiParams(self.clamp.alpha, float("inf"))
    return swiglu_oai(torch.cat((gate.clamp(max=self.clamp.limit), up), -1), unbounded)


def logits_from_above_only(self: Any, logits: torch.Tensor) -> torch.Tensor:
    return torch.where(logits > 0, self.softcap * (logits / self.softcap).tanh(), logits)


def scores_from_above_only(
    scores: torch.Tensor, distances: torch.Tensor, mask: torch.Tensor | None, mods: Any
) -> torch.Tensor:
    bounded = (scores / mods.softcap).tanh() * mods.softcap
    bounded = torch.where(scores > 0, bounded, scores)
    return real_softmax(bounded, distances, mask, mods._replace(softcap=None))


real_softmax = score_mods.softmax_with_score_mods


def config(far: str, family: Any, module: str, change: Change) -> tuple[str, str, Any]:
    return far, module, lambda: planted.changed_config(family, change)


def one_sided_scores() -> Any:
    from modelmill.ops import paged_attention

    return planted.reference_fault(
        paged_attention, "softmax_with_score_mods", scores_from_above_only
    )


FAULTS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "no clamp": config("clamp", gpt_oss, ACT, limit(1e9)),
    "clamp x 1.1": config("clamp", gpt_oss, ACT, limit(55.0)),
    "up from above only": (
        "clamp", ACT, lambda: planted.changed_module(ClampedSwiglu, up_from_above_only)
    ),
    "no window": config("window", gemma2, CORE, changed(windows=(None, None))),
    "window + 1": config("window", gemma2, CORE, changed(windows=(121, None))),
    "window x 0.9": config("window", gemma2, CORE, changed(windows=(108, None))),
    "a window in every layer": (
        "window", CORE, lambda: planted.changed_config(gemma2, changed(windows=(120, 120)))
    ),
    "no cap of scores": config("caps", gemma2, CORE, changed(attention_softcap=None)),
    "cap of scores x 1.1": config("caps", gemma2, CORE, changed(attention_softcap=times(1.1))),
    "scores from above only": ("caps", CORE, one_sided_scores),
    "no cap of logits": config("caps", gemma2, HEAD, changed(logit_softcap=None)),
    "cap of logits x 1.1": config("caps", gemma2, HEAD, changed(logit_softcap=times(1.1))),
    "logits from above only": (
        "caps", HEAD,
        lambda: mock.patch.object(LMHead, "scale_and_softcap_logits", logits_from_above_only),
    ),
    "no largest step": config("largest step", mamba2, SSM, steps(0.0, float("inf"))),
    "largest step x 1.1": config("largest step", mamba2, SSM, steps(0.0, 55.0)),
    "a least step that is none": config("largest step", mamba2, SSM, steps(0.001, 50.0)),
    "no least step": config("least step", mamba2, SSM, steps(0.0, 50.0)),
    "least step x 1.1": config("least step", mamba2, SSM, steps(0.0011, 50.0)),
    "queries that do not grow": config(
        "factors", ministral3, FACTORS, changed(attention_temperature=None)
    ),
    "slope of queries x 1.1": config("factors", ministral3, FACTORS, growth(0.33, 256)),
    "length of queries x 1.1": config("factors", ministral3, FACTORS, growth(0.3, 282)),
}  # fmt: skip
SEEN_BEFORE = {"no cap of scores", "cap of scores x 1.1", "scores from above only",
               "no cap of logits"}  # fmt: skip
"""Their text shows them in float32, where the cap bends a little."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(far: str) -> Path:
        if far not in made:
            family, changes = FAR[far]
            made[far] = tmp_path_factory.mktemp("far")
            CASES[family].save(made[far], **changes)
        return made[far]

    return checkpoint


def in_every_engine(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in two dtypes and every recipe."""
    test = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])(test)
    return pytest.mark.parametrize("recipe", planted.RECIPES)(test)


@in_every_engine
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_bound_that_no_text_reaches(
    name: str, dtype: str, recipe: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    far, module, plant = FAULTS[name]
    checkpoint, options = checkpoints(far), planted.RECIPES[recipe]
    with plant():
        report, written = build_and_accept(checkpoint, tmp_path / "e", dtype, recipe, **options)
    assert not written
    layer = {HEAD: None, FACTORS: None}.get(module, 1 if name.startswith("a window") else 0)
    names = {module, module.removesuffix(".bound")} if name in SEEN_BEFORE else {module}
    assert (report["layer"], report["module"] in names) == (layer, True), report["reason"]


@in_every_engine
@pytest.mark.parametrize("far", FAR)
def test_a_right_engine_with_such_a_bound_is_accepted(
    far: str, dtype: str, recipe: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint, options = checkpoints(far), planted.RECIPES[recipe]
    report, written = build_and_accept(checkpoint, tmp_path / "e", dtype, recipe, **options)
    assert written, report["reason"]
