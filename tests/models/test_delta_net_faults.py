"""Faults of recurrences and gates that no config makes: refused, with layer and module named."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.core.errors import UsageError
from modelmill.models import qwen3_5_text
from modelmill.nn.attention import OutputGate
from modelmill.nn.causal_conv import CausalConv
from modelmill.nn.gated_delta_net import DeltaRule, GatedHeadNorm
from modelmill.ops import causal_conv, gated_delta_rule, recurrence
from tests.accept.build_and_accept import build_and_accept
from tests.models.planted_fault import (
    PlantedFault,
    changed_module,
    changed_rules,
    module_fault,
    reference_fault,
    refusal_test,
    tensor_fault,
)

FAMILY = "qwen3_5_text"
LAYER = "layers.0.attn"


def norms_as_stored() -> AbstractContextManager[None]:
    """Norms without the 1 that they are stored less."""
    return changed_rules(
        qwen3_5_text, lambda rule: replace(rule, how=rule.how.replace("+plus_one", ""))
    )


def changed_tokens(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Another preparation of the tokens for the delta rule."""
    real = gated_delta_rule._prepare_tokens

    def prepare(inputs: Any) -> Any:
        tokens = real(inputs)
        return tokens._replace(
            **{name: change(getattr(tokens, name)) for name, change in changes.items()}
        )

    return reference_fault(gated_delta_rule, "_prepare_tokens", prepare)


def changed_state(module: type[torch.nn.Module], change: Callable[[torch.Tensor], Any]) -> Any:
    """A module that leaves another state behind."""
    real = module.forward

    def forward(self: Any, *args: Any) -> Any:
        out = real(self, *args)
        states = args[-1].state.cache.states[self.state_index]
        states.copy_(change(states))
        return out

    return changed_module(module, forward)


def older_state(self: Any, mixed: torch.Tensor, rates: torch.Tensor, step: Any) -> torch.Tensor:
    """The state without the last token's update: it is off by one token."""
    rows = step.state.rows
    states = step.state.cache.states[self.state_index]
    out = real_rule(self, mixed, rates, step)
    if len(mixed) > 1 and len(rows.slots) == 1:
        before = rows._replace(
            query_start=rows.query_start - torch.tensor([0, 1]), positions=rows.positions[:-1]
        )
        shorter = replace(step, state=replace(step.state, rows=before))
        real_rule(self, mixed[:-1], rates[:-1], shorter)
    assert states is step.state.cache.states[self.state_index]
    return out


def without_gate(self: Any, x: torch.Tensor, qkvz: torch.Tensor, step: Any) -> torch.Tensor:
    heads = x.view(-1, len(self.weight))
    return step.ops.rms_norm(heads, self.weight.float(), self.eps).view_as(x).to(qkvz.dtype)


def gate_before_norm(self: Any, x: torch.Tensor, qkvz: torch.Tensor, step: Any) -> torch.Tensor:
    gate = torch.nn.functional.silu(qkvz[:, -x.shape[1] :].float())
    heads = (x * gate).view(-1, len(self.weight))
    return step.ops.rms_norm(heads, self.weight.float(), self.eps).view_as(x).to(qkvz.dtype)


def plain_output(self: Any, x: torch.Tensor, gate: torch.Tensor, step: Any) -> torch.Tensor:
    del self, gate, step
    return x


def gate_without_sigmoid(self: Any, x: torch.Tensor, gate: torch.Tensor, step: Any) -> torch.Tensor:
    del self, step
    return x * gate


def swapped(first: slice, second: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(rows: torch.Tensor) -> torch.Tensor:
        out = rows.clone()
        out[first], out[second] = rows[second], rows[first]
        return out

    return change


def one_head(values: torch.Tensor) -> torch.Tensor:
    return values + torch.tensor([0, 0.5, 0, 0])


real_rule = DeltaRule.forward
RULE, CONV = "attn.delta_rule", "attn.conv"
FAULTS: dict[str, PlantedFault] = {
    "state off by one token": module_fault(DeltaRule, older_state, f"{RULE}.state"),
    "inputs of the convolution off by one token": (
        lambda: changed_state(CausalConv, lambda state: state.roll(1, 1)), (f"{CONV}.state",), 0,
    ),
    "convolution shifted": tensor_fault(f"{LAYER}.conv.weight", lambda t: t.roll(1, 1), CONV),
    "convolution reversed": tensor_fault(f"{LAYER}.conv.weight", lambda t: t.flip(1), CONV),
    "SiLU behind the convolution forgotten": (
        lambda: reference_fault(causal_conv, "_silu_to_dtype", lambda x, dtype: x.to(dtype)),
        (CONV,), 0,
    ),
    "gate forgotten": module_fault(GatedHeadNorm, without_gate, "attn.gated_norm"),
    "gate in front of the norm": module_fault(GatedHeadNorm, gate_before_norm, "attn.gated_norm"),
    "gated norm stored less 1": tensor_fault(
        f"{LAYER}.gated_norm.weight", lambda t: t + 1, "attn.gated_norm"
    ),
    "norms not zero-centred": (norms_as_stored, ("attn_norm",), 0),
    "decay's sign": (lambda: changed_tokens(log_decay=lambda x: -0.1 * x), (RULE,), 0),
    "decay forgotten": (lambda: changed_tokens(log_decay=torch.zeros_like), (RULE,), 0),
    "decay x 1.05": (lambda: changed_tokens(log_decay=lambda x: x * 1.05), (RULE,), 0),
    "beta without sigmoid": (lambda: changed_tokens(beta=torch.logit), (RULE,), 0),
    "keys not of length 1": (
        lambda: reference_fault(gated_delta_rule, "_l2_normalize", lambda x: x), (RULE,), 0,
    ),
    "queries not divided by the root of their size": (
        lambda: changed_tokens(q=lambda x: x * 3.5), (RULE,), 0,
    ),
    "one head's A_log + 0.5": tensor_fault(f"{LAYER}.delta_rule.A_log", one_head, RULE),
    "dt_bias forgotten": tensor_fault(f"{LAYER}.delta_rule.dt_bias", torch.zeros_like, RULE),
    "rates exchanged": tensor_fault(
        f"{LAYER}.rates.weight", lambda t: t.roll(4, 0), ("attn.rates.b", "attn.rates.a")
    ),
    "v and z exchanged": tensor_fault(
        f"{LAYER}.in_proj.weight", swapped(slice(48, 80), slice(80, 112)),
        ("attn.v_proj", "attn.z_proj")
    ),
    "output gate forgotten": module_fault(OutputGate, plain_output, "attn.output_gate", 1),
    "output gate without its sigmoid": module_fault(
        OutputGate, gate_without_sigmoid, "attn.output_gate", 1
    ),
    "output gate's heads in another order": tensor_fault(
        "layers.1.attn.gate_proj.weight", lambda t: t.roll(16, 0), "attn.gate_proj", 1
    ),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)


def test_a_state_that_is_lost_between_steps_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Each module is right alone; decoded sequences are not."""
    zeros = lambda state, rows: torch.zeros_like(state[rows.slots])  # noqa: E731
    with reference_fault(gated_delta_rule, "gather_states", zeros, recurrence):
        report, written = build_and_accept(checkpoint, tmp_path / "e", "float32", "none")
    assert not written
    assert "between the modules" in report["reason"]


def test_a_fault_that_calibration_meets_first_is_named(checkpoint: Path, tmp_path: Path) -> None:
    """States grow without bound over a longer text; no engine is made that could be judged."""
    plant, modules, layer = FAULTS["keys not of length 1"]
    longer = {"calibration_samples": 4, "calibration_length": 512}
    place = re.escape(f"layer {layer}, module {modules[0]}: the calibration data makes NaN")
    with plant(), pytest.raises(UsageError, match=place):
        build_and_accept(checkpoint, tmp_path / "e", "float32", "fp8", **longer)
