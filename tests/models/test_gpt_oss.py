"""gpt-oss with experts in MXFP4, kept as stored or expanded; faults in them and in the sinks."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.artifact.store import open_artifact
from modelmill.builder.config_only import checkpoint_from_config
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.gpt_oss_experts import GptOssExpertContainer
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, UsageError
from modelmill.loader.model_loader import load_model
from modelmill.models import gpt_oss
from modelmill.nn.attention import AttentionCore
from modelmill.ops.score_mods import ScoreMods
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.runtime.engine_core import EngineCore
from modelmill.weights.mxfp4 import Mxfp4Weight
from tests.accept.build_and_accept import build_and_accept
from tests.models.all_families import CASES
from tests.models.family_cases import transformers_model
from tests.models.tiny_models import save_model
from tests.parallel.test_shard_model import logits as rank_logits
from tests.parallel.thread_tp_group import run_on_ranks
from tests.trust.error_lines import check_one_line

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

SIZES = {"hidden_size": 64, "intermediate_size": 96}
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[list[int]], Any]]:
    """A checkpoint with drawn blocks and scales; transformers expands them for its own logits."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    raw = CASES["gpt_oss"].raw(**SIZES)
    model = transformers_model(raw, folder)
    draw = torch.Generator().manual_seed(1)
    stacks: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            shape = (5, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=draw).to(torch.uint8)
            scales = torch.randint(121, 125, shape, generator=draw).to(torch.uint8)
            stem = f"model.layers.{index}.mlp.experts.{name}"
            stacks |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
            expanded = mxfp4._convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(layer.mlp.experts, name).data.copy_(expanded)
    save_model(model, folder)
    others = {k: v for k, v in load_file(folder / "model.safetensors").items()
            if not k.endswith(("gate_up_proj", "down_proj"))}  # fmt: skip
    save_file(others | stacks, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": SETTINGS}))

    @torch.no_grad()
    def logits(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].float()

    return folder, logits


def test_mxfp4_is_kept(packed: Any, tmp_path: Path) -> None:
    folder, logits = packed
    report, written = build_and_accept(folder, tmp_path / "e", "float32", "keep")
    assert written, report.get("reason", report)
    engine = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    assert engine.artifact is not None
    assert "mxfp4" in engine.artifact.manifest.weight_formats.values()
    ids = torch.randint(2, 120, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    actual = TeacherForcedScorer(engine).compute_logits([ids], decode_from=30)[0]
    assert (actual - logits(ids)).abs().max() < 1e-4


def test_blocks_that_cannot_be_cut_divide_by_experts(packed: Any, tmp_path: Path) -> None:
    """Three blocks of 32 columns over four ranks, five experts over four ranks."""
    report, written = build_and_accept(packed[0], tmp_path / "e", "float32", "keep")
    assert written, report.get("reason", report)
    artifact = open_artifact(tmp_path / "e")
    with pytest.raises(UsageError, match=r"use --tp 3 or less, or --enable-expert-parallel"):
        load_model(artifact, "cpu", TPGroup(0, 4))
    expected = rank_logits(load_model(artifact, "cpu"), SINGLE_RANK)
    for output in run_on_ranks(
        4, lambda group: rank_logits(load_model(artifact, "cpu", group, True), group)
    ):
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_mxfp4_is_expanded_for_another_recipe(recipe: str, packed: Any, tmp_path: Path) -> None:
    options = {"group_size": 32} if recipe == "int4" else {}
    report, written = build_and_accept(packed[0], tmp_path / "e", "bfloat16", recipe, **options)
    assert written, report.get("reason", report)


def shifted_scale(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes, scale + 1


def exchanged_halves(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes.unflatten(1, (-1, 2)).flip(-1).flatten(1), scale


def lost_sign(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes % 8, scale


def scales_of_the_next_block(
    codes: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return codes, scale.roll(1, dims=1)


MXFP4_FAULTS = (shifted_scale, exchanged_halves, lost_sign, scales_of_the_next_block)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", MXFP4_FAULTS)
def test_wrongly_read_mxfp4_is_refused_by_name(
    change: Any, dtype: str, packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Mxfp4Weight.from_codes
    monkeypatch.setattr(Mxfp4Weight, "from_codes", staticmethod(lambda *args: real(*change(*args))))
    report, written = build_and_accept(packed[0], tmp_path / "e", dtype, "keep")
    assert not written
    assert report["layer"] == 0
    assert report["module"].startswith("mlp.experts.0.")


def without_sinks(mods: ScoreMods) -> ScoreMods:
    return mods._replace(sinks=None)


def sinks_of_other_heads(mods: ScoreMods) -> ScoreMods:
    assert mods.sinks is not None
    return mods._replace(sinks=mods.sinks.roll(1))


def a_larger_sink(mods: ScoreMods) -> ScoreMods:
    assert mods.sinks is not None
    return mods._replace(sinks=mods.sinks + 0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", [without_sinks, sinks_of_other_heads, a_larger_sink])
def test_wrong_sinks_are_refused_by_name(
    change: Any, dtype: str, packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AttentionCore._score_mods
    monkeypatch.setattr(AttentionCore, "_score_mods", lambda *args: change(real(*args)))
    report, written = build_and_accept(packed[0], tmp_path / "e", dtype, "keep")
    assert not written
    assert (report["layer"], report["module"]) == (0, "attn.core")


def test_defaults_of_the_rotation() -> None:
    """Without rope_parameters it is GptOssConfig's YaRN, whose ramp is not truncated."""
    raw = CASES["gpt_oss"].raw(rope_parameters=None)
    rope = gpt_oss.config_from_hf(raw).rope
    assert rope is not None
    assert rope.base == 150000.0
    assert rope.scaling["truncate"] is False
    assert rope.scaling["factor"] == 32.0


def test_another_quantization_is_refused(packed: Any, tmp_path: Path) -> None:
    for file in packed[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((packed[0] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    assert "awq" in check_one_line(error.value)


def test_scales_that_do_not_fit_are_refused(packed: Any) -> None:
    view = open_checkpoint(packed[0]).view
    assert isinstance(view, GptOssExpertContainer)
    stem = "model.layers.0.mlp.experts"
    raw = dict(load_file(packed[0] / "model.safetensors"))
    raw[f"{stem}.down_proj_scales"] = raw[f"{stem}.down_proj_scales"][:, :, :1]

    class Loaded:
        def __init__(self) -> None:
            self.metadata: dict[str, Any] = {}

        def names(self) -> list[str]:
            return list(raw)

        def tensor_info(self, name: str) -> Any:
            info = view._raw.tensor_info(name)
            return type(info)(name, tuple(raw[name].shape), info.dtype, 0)

        def get(self, name: str) -> torch.Tensor:
            return raw[name]

        def files(self) -> list[Path]:
            return []

    with pytest.raises(CorruptCheckpoint, match="down_proj_blocks"):
        GptOssExpertContainer(Loaded()).quant_layout(f"{stem}.0.down_proj.weight")


@pytest.mark.parametrize("recipe", ["keep", "int8"])
def test_a_scale_that_is_nan_is_refused(recipe: str, packed: Any, tmp_path: Path) -> None:
    """Code 255 of E8M0 is NaN, in kept weights as well as in expanded ones."""
    folder = tmp_path / "hf"
    shutil.copytree(packed[0], folder)
    raw = load_file(folder / "model.safetensors")
    raw["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(raw, folder / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"layers\.1\.mlp\.experts.* holds NaN") as error:
        build_and_accept(folder, tmp_path / "e", "float32", recipe)
    check_one_line(error.value)


def test_a_config_alone_says_what_is_kept(tmp_path: Path) -> None:
    """Experts in MXFP4, 4.25 bits a weight; all else in the engine's dtype."""
    raw = CASES["gpt_oss"].raw(**SIZES) | {"quantization_config": SETTINGS}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan = make_build_plan(
        checkpoint_from_config(tmp_path), BuildConfig(dtype="bfloat16", target="cpu")
    )
    packed = [each for each in plan.tensors if each.weight_format == "mxfp4"]
    assert len(packed) == 3 * 5 * 2
    stored = [info for each in packed for info in each.stored_info.items()]
    bits = sum(8 * math.prod(shape) for name, (shape, _) in stored if not name.endswith("sizes"))
    assert bits == 4.25 * sum(math.prod(each.shape) for each in packed)
