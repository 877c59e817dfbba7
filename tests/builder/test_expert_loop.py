"""Experts that a GPU computes one after another: named by the plan, as the loader has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.builder.build_engine import build
from modelmill.builder.plan import BuildPlan, make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.cli import doctor
from modelmill.cli.plan_tables import show_plan
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.nn.expert_stack import stack_experts
from modelmill.nn.fused_moe import compute_all_experts, compute_chosen_experts
from modelmill.nn.moe import MoE
from modelmill.runtime.engine_core import EngineCore
from tests.models.all_families import CASES
from tests.models.planted_fault import CALIBRATION
from tests.nn.test_moe import STEP

pytest.importorskip("transformers")

STATIC = {**CALIBRATION, "activation_scales": "tensor"}
LOOPS: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"quantization": "rptq", **CALIBRATION}, "rptq"),
    ("mixtral", {"quantization": "smoothquant", **STATIC}, "w8a8 with static scales"),
    ("mixtral", {"quantization": "fp8", **STATIC}, "fp8 with static scales"),
    ("nemotron_h", {"quantization": "int4", "group_size": 32}, "int4 experts without a gate"),
]
GROUPED: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("mixtral", {"quantization": "int8"}),
    ("mixtral", {"quantization": "int4", "group_size": 32}),
    ("mixtral", {"quantization": "smoothquant", **CALIBRATION}),
    ("mixtral", {"quantization": "fp8"}),
    ("nemotron_h", {"quantization": "int8"}),
    ("deepseek_v3", {"quantization": "int8"}),
    ("xverse", {"quantization": "rptq", **CALIBRATION}),  # has no experts
]


def plan(family: str, folder: Path, options: dict[str, Any], target: str = "cuda") -> BuildPlan:
    """The plan of a family's seeded checkpoint, whose experts' columns fill groups."""
    wide = {"moe_intermediate_size": 64} if family == "nemotron_h" else {"intermediate_size": 64}
    CASES[family].save(folder, hidden_size=64, **wide)
    config = BuildConfig(dtype="float32", target=target, **options)
    return make_build_plan(open_checkpoint(folder), config)


@pytest.mark.parametrize(("family", "options", "reason"), LOOPS)
def test_the_plan_names_which_experts_are_not_grouped(
    family: str,
    options: dict[str, Any],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = plan(family, tmp_path, options)
    assert made.expert_loop == (
        f"one after another: no fused MoE op has {reason}; a CUDA graph reads all of them for each "
        "token"
    )
    show_plan(made.describe())
    lines = [line for line in capsys.readouterr().out.splitlines() if "experts " in line]
    assert len(lines) == 1
    assert made.expert_loop in lines[0]


@pytest.mark.parametrize(("family", "options"), GROUPED)
def test_nothing_is_said_of_experts_that_are_grouped(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    made = plan(family, tmp_path, options)
    assert made.expert_loop is made.describe()["experts"] is None


def test_nothing_is_said_of_a_cpu(tmp_path: Path) -> None:
    family, options, _ = LOOPS[0]
    assert plan(family, tmp_path, options, "cpu").expert_loop is None


def test_int8_in_groups_of_a_gguf(tmp_path: Path) -> None:
    """Kept as the file has them, as of Q8_0."""
    pytest.importorskip("gguf")
    from tests.models.family_gguf import write_gguf

    case = CASES["granitemoe"]
    assert case.gguf is not None
    sizes = {**case.gguf.changes, "hidden_size": 64, "intermediate_size": 64}
    case.save(tmp_path / "hf", **sizes)
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path / "hf", case.raw(**sizes), case.gguf, quantized=True)
    config = BuildConfig(dtype="float32", target="cuda", quantization="keep")
    remark = make_build_plan(open_checkpoint(path), config).expert_loop
    assert remark is not None
    assert "no fused MoE op has int8_group;" in remark


@pytest.mark.parametrize(
    ("family", "options"), [*((family, each) for family, each, _ in LOOPS[:3]), *GROUPED[:5]]
)
def test_the_loader_and_doctor_agree(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The remark says what the experts' weights are when they are loaded."""
    made = plan(family, tmp_path / "hf", options)
    build(made, tmp_path / "e", None)
    assert doctor.engine_facts(tmp_path / "e")["experts"] == made.expert_loop
    core = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    mixtures = [each for each in core.model.modules() if isinstance(each, MoE)]
    assert mixtures
    for each in mixtures:
        assert (stack_experts(each) is None) == (made.expert_loop is not None)


@pytest.mark.parametrize(("family", "options", "reason"), LOOPS)
def test_both_loops_compute_the_mixture(
    family: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The experts that some tokens have, and in a CUDA graph all of them for all tokens."""
    del reason
    build(plan(family, tmp_path / "hf", options), tmp_path / "e", None)
    core = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    for moe in (each for each in core.model.modules() if isinstance(each, MoE)):
        routing = moe.routing(moe.router(x, STEP), STEP)
        few = compute_chosen_experts(moe, x, routing, STEP)
        every = compute_all_experts(moe, x, routing, STEP)
        whole = moe(x, STEP) - sum(moe.shared_output(x, STEP))
        torch.testing.assert_close(few, every, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(few, whole, rtol=1e-4, atol=1e-4)
