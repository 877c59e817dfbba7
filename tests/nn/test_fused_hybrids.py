"""Fused layers of the hybrids: the logits and the states of the plain ones."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from modelmill.nn.decoder import Decoder
from modelmill.nn.fused_branch_norms import FusedBranchNormLM
from modelmill.nn.fused_moe_lm import FusedMoELM
from modelmill.nn.fusion import FusedCausalLM, fuse_model
from modelmill.nn.synthetic_step import synthetic_step
from modelmill.ops import registry
from modelmill.ops.branches_add_rms_norm import BranchesAddRMSNormInputs, branches_add_rms_norm
from tests.nn.hybrid_models import HYBRIDS, hybrid_model

OPS = registry.select_backends("cpu")
FUSED = {"branches_add_rms_norm": registry.reference("branches_add_rms_norm")}
"""Ops that no backend of a CPU has."""
FUSED_FORMS = {
    "mamba2": Decoder, "falcon_h1": FusedBranchNormLM, "granitemoehybrid": FusedBranchNormLM,
    "nemotron_h": FusedMoELM,
}  # fmt: skip
"""Of the others FusedCausalLM; Mamba2 has nothing to be fused."""
STEPS = {"decode": [(3, 1, 20)], "prompt": [(1, 19, 19)], "mixed": [(2, 17, 17), (2, 1, 30)]}


@pytest.mark.parametrize("family", HYBRIDS)
@torch.inference_mode()
def test_logits_and_states_are_those_of_the_plain_modules(family: str) -> None:
    plain = hybrid_model(family, torch.float32)
    fused = fuse_model(plain)
    assert type(fused) is FUSED_FORMS.get(family, FusedCausalLM)
    assert {name for name, _ in fused.named_modules()} == {
        name for name, _ in plain.named_modules()
    }
    for sequences, ops in product(STEPS.values(), (OPS, OPS.replace(FUSED))):
        step = synthetic_step(plain, ops, sequences)
        assert step.state is not None
        cache = step.state.cache
        with cache.restore_slots_on_exit(torch.arange(cache.num_slots)):
            expected = plain(step)
            states = [each.clone() for each in cache.states]
        torch.testing.assert_close(fused(step), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(list(cache.states), states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "norms_of_a_layer"), [("falcon_h1", 1), ("granitemoehybrid", 2)]
)
@torch.inference_mode()
def test_every_norm_behind_branches_adds_them(family: str, norms_of_a_layer: int) -> None:
    """Falcon-H1's norm behind two branches; Granite's norms behind scaled ones, but the first."""
    model, calls = hybrid_model(family, torch.float32), []

    def counting(inputs: BranchesAddRMSNormInputs) -> Any:
        calls.append(inputs.other is not None)
        return branches_add_rms_norm(inputs)

    ops = OPS.replace({"branches_add_rms_norm": counting})
    fuse_model(model)(synthetic_step(model, ops, STEPS["decode"]))
    assert calls == [norms_of_a_layer == 1] * (norms_of_a_layer * len(model.layers))
