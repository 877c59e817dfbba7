"""The planned memory of a rank is what the loaded rank has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelmill.artifact.store import open_artifact
from modelmill.builder.build_engine import build
from modelmill.builder.memory_plan import largest_rank_memory_report
from modelmill.builder.plan import BuildPlan, make_build_plan
from modelmill.builder.rank_memory import largest_rank_memory
from modelmill.checkpoint.open import open_checkpoint
from modelmill.cli.main import run_command_line
from modelmill.core.config import BuildConfig
from modelmill.loader.model_loader import load_model
from modelmill.nn.kv import ModelKVCacheSpec
from modelmill.nn.latent_attention import LatentAttentionCore
from modelmill.nn.layer_stack import model_state_shape
from modelmill.nn.linear import Linear
from modelmill.parallel.tp_group import TPGroup
from tests.models.all_families import CASES

pytest.importorskip("transformers")

# a family, its recipe, and ranks that divide its heads evenly or not
CASES_OF_RANKS = {
    "dense": ("granite", "none", 2, False, {}),
    "more ranks than KV heads": ("granite", "none", 3, False, {"num_attention_heads": 8}),
    "channel scales": ("qwen3_moe", "int8", 2, False, {}),
    "groups": ("qwen3_moe", "int4", 2, False, {"head_dim": 32, "moe_intermediate_size": 64}),
    "whole experts": ("qwen3_moe", "int8", 3, True, {"num_experts": 8}),
    "recurrent state": ("qwen3_next", "none", 2, False, {}),
    "latent attention": ("deepseek_v3", "fp8", 2, False, {}),
    "a tied head, biases": ("gpt_bigcode", "none", 4, False, {}),
}  # fmt: skip


def plan_of(name: str, recipe: str, folder: Path, changes: dict[str, int]) -> BuildPlan:
    CASES[name].save(folder, **changes)
    config = BuildConfig(dtype="float32", target="cpu", quantization=recipe, group_size=32)
    return make_build_plan(open_checkpoint(folder), config)


def loaded_bytes(model: nn.Module, stored: set[str]) -> int:
    """Bytes of what a rank has loaded, without what its modules compute."""
    tensors = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and any(each.startswith(f"{name}.") for each in stored):
            tensors |= {f"{name}.{key}": each for key, each in module.weight.tensors().items()}
    return sum(each.numel() * each.element_size() for each in tensors.values())


@pytest.mark.parametrize("case", CASES_OF_RANKS)
def test_the_plan_of_a_rank_is_what_it_loads(case: str, tmp_path: Path) -> None:
    name, recipe, ranks, experts, changes = CASES_OF_RANKS[case]
    plan = plan_of(name, recipe, tmp_path / "hf", changes)
    build(plan, tmp_path / "e", None)
    artifact = open_artifact(tmp_path / "e")
    stored = set(artifact.names())
    models = [load_model(artifact, "cpu", TPGroup(rank, ranks), experts) for rank in range(ranks)]
    largest = max(models, key=lambda model: loaded_bytes(model, stored))
    planned = largest_rank_memory(plan, ranks, experts)
    assert planned.weight_bytes == pytest.approx(loaded_bytes(largest, stored), rel=0.005)
    assert planned.weight_bytes < plan.weight_bytes
    assert isinstance(largest.kv, ModelKVCacheSpec)
    assert planned.kv.layer_kv_sizes == largest.kv.layer_kv_sizes
    assert planned.state.slot_bytes(torch.float32) == model_state_shape(largest).slot_bytes(
        torch.float32
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_up_projections_are_counted(ranks: int, tmp_path: Path) -> None:
    """A CPU copies those of latent attention that have 16 bits, each rank its heads'."""
    CASES["deepseek_v3"].save(tmp_path / "hf")
    plan = make_build_plan(
        open_checkpoint(tmp_path / "hf"), BuildConfig(dtype="bfloat16", target="cpu")
    )
    build(plan, tmp_path / "e", None)
    model = load_model(open_artifact(tmp_path / "e"), "cpu", TPGroup(0, ranks))
    cores = [each for each in model.modules() if isinstance(each, LatentAttentionCore)]
    copies = [copy for core in cores for copy in core.packed_up_projections()]
    whole = {each.data_ptr() for core in cores for each in core.up_projections()}
    assert whole.isdisjoint(copy.data_ptr() for copy in copies)
    assert largest_rank_memory_report(plan, ranks)["expanded"] == sum(
        copy.nbytes for copy in copies
    )


def facts(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run_command_line(["build", *map(str, words), "--dry-run", "--json"]) == 0
    memory: dict[str, Any] = json.loads(capsys.readouterr().out)["memory"]
    return memory


def test_the_command_line_tells_a_ranks_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CASES["granite"].save(tmp_path / "hf")
    whole = facts(capsys, tmp_path / "hf", "--target", "cpu")
    half = facts(capsys, tmp_path / "hf", "--target", "cpu", "--tp", 2)
    assert (whole["ranks"], half["ranks"]) == (1, 2)
    assert half["kv_per_token"] * 2 == whole["kv_per_token"]
    assert half["weights"] < whole["weights"]
    assert run_command_line(["build", str(tmp_path / "hf"), "--dry-run", "--tp", "2"]) == 0
    assert "the largest of 2 ranks (--tp 2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tp", "2", "-o", "e"), "--tp splits an engine when it starts"),
        (("--tp", "0", "--dry-run"), "--tp must be at least 1, not 0"),
        (("-ep", "--dry-run"), "--enable-expert-parallel divides experts over ranks"),
        (("--tp", "2", "-ep", "--dry-run"), "the model has no experts"),
        (("--tp", "5", "--dry-run"), "--tp 5: the model has 4 attention heads"),
    ],
)
def test_ranks_that_make_no_sense_are_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CASES["granite"].save(tmp_path / "hf")
    assert run_command_line(["build", str(tmp_path / "hf"), *words]) != 0
    assert message in capsys.readouterr().err
