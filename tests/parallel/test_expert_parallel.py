"""Expert parallelism: each rank has whole experts, and the ranks' sum is the whole mixture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.weight_formats import mxfp4_weight
from modelmill.artifact.store import open_artifact
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import CorruptArtifact, UsageError
from modelmill.llm import build_engine
from modelmill.loader.capacity import weight_bytes
from modelmill.loader.model_loader import build_model, fill_weights, load_model
from modelmill.nn.linear import Linear
from modelmill.nn.moe import MoE, RemoteExpertPlaceholder
from modelmill.nn.partition import ExpertPartition
from modelmill.nn.shard_model import shard_model
from modelmill.parallel.shard import Range, partition
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.weights import base
from tests.models.all_families import CASES
from tests.parallel.test_shard_model import logits
from tests.parallel.thread_tp_group import run_on_ranks
from tests.runtime import tiny

BFLOAT16_ERROR = {"int8": 0.02, "int4": 0.02, "mxfp4": 0.02, "w8a8": 0.04, "fp8": 0.08}
"""Of logits; twice what splitting the channels of each expert gives."""
FORMATS = ("dense", "int8", "int4", "w8a8", "fp8", "mxfp4")


def packed(weight_format: str, matrix: torch.Tensor, dtype: torch.dtype) -> base.WeightFormat:
    """A matrix in a format; MXFP4 is read from checkpoints only."""
    if weight_format == "mxfp4":
        return mxfp4_weight(matrix)
    return base.pack_as_format(weight_format, matrix, dtype)


class Rank:
    """A rank's part of a family's seeded model, and which tensors it read."""

    def __init__(
        self,
        name: str,
        tp_group: TPGroup,
        weight_format: str = "dense",
        dtype: torch.dtype = torch.float32,
        *,
        expert_parallel: bool = True,
        missing: str = "",
    ) -> None:
        raw = CASES[name].raw(**SIZES.get(name, {}))
        whole = build_model(name, raw)
        self.tensors = tiny.random_tensors(whole)
        self.tensors = {n: self._values(n, t).to(dtype) for n, t in self.tensors.items()}
        self.weight_formats: dict[str, str] = {}
        for path in [n for n, m in whole.named_modules() if isinstance(m, Linear)]:
            if ".experts." in path:
                matrix = self.tensors.pop(f"{path}.weight").float()
                weight = packed(weight_format, matrix, dtype)
                self.tensors |= {f"{path}.{s}": t for s, t in weight.tensors().items()}
                self.weight_formats[path] = weight_format
        self.tensors.pop(missing, None)
        self.read: set[str] = set()
        self.dtype, self.tp_group = dtype, tp_group
        self.model: nn.Module = build_model(name, raw)
        shard_model(self.model, tp_group, lambda _: 1, expert_parallel)
        fill_weights(self.model, self._read, self.tensors, self.weight_formats, {}, "cpu")

    @staticmethod
    def _values(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Routers choose clearly: near a tie rounding in bfloat16 decides, on any device."""
        return tensor * 4 if name.endswith("router.weight") else tensor

    def _read(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return self.tensors[name]

    def logits(self) -> torch.Tensor:
        """A prompt, then a prompt beside a decoding sequence."""
        return logits(self.model, self.tp_group, self.dtype)


FURTHER_FAMILIES = (
    "afmoe", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "gemma4_text",
    "glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3",
    "kimi_k2", "lfm2_moe", "mellum", "minimax_m2", "mistral4", "nemotron_h", "olmoe", "phimoe",
    "qwen3_5_moe_text",
    "qwen3_next", "sarvam_mla", "sarvam_moe", "solar_open",
)  # fmt: skip
# whole blocks of MXFP4 in both products
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "qwen2_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "hidden_size": 64, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "intermediate_size": 72, "n_shared_experts": 2,
    },
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96},
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", [*SIZES, *FURTHER_FAMILIES])
def test_families_over_ranks_equal_the_whole(name: str, size: int) -> None:
    """Prefill, and decode beside prefill; attention and shared experts are split as ever."""
    expected = Rank(name, SINGLE_RANK).logits()
    for output in run_on_ranks(size, lambda group: Rank(name, group).logits()):
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=CASES[name].split_tolerance)
        assert torch.equal(output.argmax(-1), expected.argmax(-1))


def test_no_family_with_experts_is_left_out() -> None:
    with_experts = {
        name
        for name, case in CASES.items()
        if any(isinstance(each, MoE) for each in build_model(name, case.raw()).modules())
    }
    assert with_experts == {*SIZES, *FURTHER_FAMILIES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", FORMATS[1:])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_weight_formats_over_ranks_equal_the_whole(
    name: str, weight_format: str, dtype: torch.dtype
) -> None:
    expected = Rank(name, SINGLE_RANK, weight_format, dtype).logits().float()
    outputs = run_on_ranks(2, lambda group: Rank(name, group, weight_format, dtype).logits())
    for output in outputs:
        error = (output.float() - expected).norm() / expected.norm()
        assert error < (1e-4 if dtype == torch.float32 else BFLOAT16_ERROR[weight_format])
        assert torch.equal(output, outputs[0])


RECIPES: dict[str, dict[str, Any]] = {
    "int4": {"group_size": 32, "method": "awq+gptq"},
    "smoothquant": {},
    "rptq": {},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_calibrated_engines_over_ranks_equal_the_whole(
    name: str, recipe: str, tmp_path: Path
) -> None:
    """Scales folded into experts, and ranges of each expert's own, go with the expert."""
    pytest.importorskip("transformers")
    head = "v_head_dim" if name == "deepseek_v3" else "head_dim"
    CASES[name].save(tmp_path / "hf", **SIZES[name], num_attention_heads=4, **{head: 16})
    config = BuildConfig(
        dtype="float32", target="cpu", quantization=recipe,
        calibration_samples=8, calibration_length=32, **RECIPES[recipe],
    )  # fmt: skip
    build_engine(tmp_path / "hf", tmp_path / "e", config, check=False, tune=False)
    artifact = open_artifact(tmp_path / "e")
    expected = logits(load_model(artifact, "cpu"), SINGLE_RANK)
    outputs = run_on_ranks(
        2, lambda group: logits(load_model(artifact, "cpu", group, expert_parallel=True), group)
    )
    for output in outputs:
        error = (output - expected).norm() / expected.norm()
        # a rank quantizes its part of an attention's output by itself
        assert error < (1e-4 if recipe == "int4" else 0.04)


def test_gemma4_experts_beside_an_mlp_over_ranks() -> None:
    raw = CASES["gemma4_text"].raw(
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=16
    )
    case = dataclasses.replace(CASES["gemma4_text"], base=raw)
    with mock.patch.dict(CASES, gemma4_text=case):
        expected = Rank("gemma4_text", SINGLE_RANK).logits()
        outputs = run_on_ranks(2, lambda group: Rank("gemma4_text", group).logits())
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=case.split_tolerance)


def test_a_rank_reads_its_experts_only() -> None:
    whole = Rank("mixtral", SINGLE_RANK)
    ranks = [Rank("mixtral", TPGroup(rank, 2)) for rank in range(2)]
    read = [{n for n in rank.read if ".experts." in n} for rank in ranks]
    assert not read[0] & read[1]
    assert read[0] | read[1] == {n for n in whole.tensors if ".experts." in n}
    assert {n.split(".experts.")[1][0] for n in read[0]} == {"0", "1", "2"}
    for rank in ranks:
        bytes_read = sum(rank.tensors[n].nbytes for n in rank.read if ".experts." in n)
        moe = [m for m in rank.model.modules() if isinstance(m, MoE)]
        assert bytes_read == sum(weight_bytes(each.experts) for each in moe)


def test_a_missing_tensor_is_named_by_the_rank_that_needs_it() -> None:
    missing = "layers.1.mlp.experts.4.down_proj.weight"
    Rank("mixtral", TPGroup(0, 2), missing=missing)
    with pytest.raises(CorruptArtifact, match=f"lacks the tensor {missing}"):
        Rank("mixtral", TPGroup(1, 2), missing=missing)


def doubled(self: ExpertPartition, rank: int, size: int) -> Range:
    """The first rank's experts on every rank."""
    del rank
    return partition(self.experts, size)[0]


def shortened(self: ExpertPartition, rank: int, size: int) -> Range:
    """Ranges with an expert between them that no rank has."""
    first, end = partition(self.experts, size)[rank]
    return (first, end - 1) if rank == 0 else (first, end)


@pytest.mark.parametrize("fault", [doubled, shortened])
def test_a_rank_with_the_wrong_range_changes_the_result(
    fault: Callable[[ExpertPartition, int, int], Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted where ranges are computed: 5 experts over 2 ranks."""
    expected = Rank("mixtral", SINGLE_RANK).logits()
    monkeypatch.setattr(ExpertPartition, "rank_expert_range", fault)
    for output in run_on_ranks(2, lambda group: Rank("mixtral", group).logits()):
        assert (output - expected).abs().max() > 1e-2


def test_other_experts_are_gone() -> None:
    model = build_model("mixtral", CASES["mixtral"].raw())
    shard_model(model, TPGroup(1, 2), lambda _: 1, expert_parallel=True)
    experts = list(model.get_submodule("layers.0.mlp.experts").children())
    assert [isinstance(each, RemoteExpertPlaceholder) for each in experts] == [True] * 3 + [
        False
    ] * 2
    for each in experts[3:]:
        linears = [m for m in each.modules() if isinstance(m, Linear)]
        assert [m.weight_shard for m in linears] == [None, None]
    assert model.get_submodule("layers.0.attn.o_proj").weight_shard is not None


def test_a_model_without_experts_refuses_the_option() -> None:
    with pytest.raises(
        UsageError,
        match=r"^--enable-expert-parallel: the model has no experts; leave the option out$",
    ):
        shard_model(build_model("llama", CASES["olmo2"].raw()), TPGroup(0, 2), lambda _: 1, True)


def test_more_ranks_than_experts_is_one_line() -> None:
    model = build_model("mixtral", CASES["mixtral"].raw(num_local_experts=3))
    with pytest.raises(
        UsageError,
        match=r"^--tp 4: the model's 3 experts split into 3 at most; use --tp 3 or less, or no "
        r"--enable-expert-parallel$",
    ):
        shard_model(model, TPGroup(0, 4), lambda _: 1, expert_parallel=True)


def test_groups_too_wide_to_cut_name_the_option() -> None:
    """Channels in groups of 128 over more ranks than groups; whole experts need no cut."""
    raw = CASES["mixtral"].raw(intermediate_size=256)

    def alignment(name: str) -> int:
        return 128 if name.endswith("down_proj") else 1

    with pytest.raises(
        UsageError,
        match=r"^--tp 3: the model's 256 inner channels split into 2 at most; use --tp 2 or less, "
        r"or --enable-expert-parallel to divide experts$",
    ):
        shard_model(build_model("mixtral", raw), TPGroup(0, 3), alignment)
    shard_model(build_model("mixtral", raw), TPGroup(0, 3), alignment, expert_parallel=True)
    few = CASES["mixtral"].raw(intermediate_size=256, num_local_experts=2)
    with pytest.raises(UsageError, match=r"use --tp 2 or less$"):
        shard_model(build_model("mixtral", few), TPGroup(0, 3), alignment)


def test_one_rank_refuses_the_option() -> None:
    with pytest.raises(UsageError, match=r"^--enable-expert-parallel divides experts over ranks"):
        RunConfig(enable_expert_parallel=True)
    assert RunConfig(enable_expert_parallel=True, tp=2).enable_expert_parallel
