"""The eyes under the measuring rod: honest engines pass in every dtype, planted faults are named where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.pictures import judge_eyes
from modelmill.accept.run import compare_engine, sample_ids
from modelmill.build.plan import make_plan
from modelmill.checkpoint.open import Checkpoint, open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import AcceptanceError, UsageError
from modelmill.llm import build_engine
from modelmill.runtime.loop import Loop
from tests.accept.judged import save_tiny
from tests.models.minigpt4_seeded import published

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    return published(tmp_path_factory.mktemp("eyes") / "files", shared)


@pytest.fixture(scope="module", params=DTYPES)
def opened(request: pytest.FixtureRequest, folder: Path) -> tuple[Loop, Checkpoint]:
    """Built with acceptance, so an honest engine has passed it."""
    engine = folder.parent / f"{request.param}.engine"
    report = build_engine(folder, engine, BuildConfig(dtype=request.param))
    assert report["accepted"], report["reason"]
    assert report["pictures"]["rel_l2"] <= report["pictures"]["bound"]
    assert sum(layer["name"].startswith("reader.") for layer in report["layers"]) > 40
    return Loop.open(engine, RunConfig(kv_cache_bytes=1 << 22, max_model_len=128)), open_checkpoint(folder)


def reader(loop: Loop) -> Any:
    return loop.model.reader


def eps(path: str, value: float) -> Callable[[Loop], None]:
    return lambda loop: setattr(reader(loop).get_submodule(path), "eps", value)


def scaled(path: str) -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        held = reader(loop).get_submodule(path).held
        held.weight.data = held.weight.data * 1.05

    return plant


def other_bias(loop: Loop) -> None:
    """Queries and values have changed their biases."""
    layer = reader(loop).visual_encoder.blocks[1].attn.qkv
    q, k, v = layer.bias.chunk(3)
    layer.bias = torch.cat((v, k, q))


def no_positions(loop: Loop) -> None:
    tower = reader(loop).visual_encoder
    tower.pos_embed = torch.zeros_like(tower.pos_embed)


def words_branch(loop: Loop) -> None:
    """A layer's feed-forward is another's."""
    layers = reader(loop).qformer.layer
    layers[1].intermediate_query.dense.held = layers[2].intermediate_query.dense.held


FAULTS: dict[str, tuple[Callable[[Loop], None], int | None, str]] = {
    "tower eps": (eps("visual_encoder.blocks.1.norm2", 1e-5), 1, "tower.norm2"),
    "ln_vision eps": (eps("ln_vision", 1e-6), None, "ln_vision"),
    "qformer eps": (eps("qformer.layer.2.output_query.LayerNorm", 1e-5), 2, "qformer.feed_forward.norm"),
    "tower weight": (scaled("visual_encoder.blocks.0.mlp.fc1"), 0, "tower.fc1"),
    "qformer weight": (scaled("qformer.layer.2.crossattention.self.value"), 2, "qformer.crossattention.value"),
    "projection": (scaled("proj"), None, "proj"),
    "biases": (other_bias, 1, "tower.qkv"),
    "words": (words_branch, 1, "qformer.up"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_named(opened: tuple[Loop, Checkpoint], name: str) -> None:
    loop, checkpoint = opened
    plant, layer, module = FAULTS[name]
    engine = loop.artifact
    assert engine is not None
    broken = Loop.open(engine, loop.config)
    # weights are views of the file: a planted fault must not write there
    plant(broken)
    told = judge_eyes(broken, checkpoint)
    assert not told["ok"]
    assert told["layer"] == layer, told["reason"]
    assert told["module"].removesuffix(".eps") == module, told["reason"]
    assert judge_eyes(loop, checkpoint)["ok"]


def test_what_no_module_shows(opened: tuple[Loop, Checkpoint]) -> None:
    loop, checkpoint = opened
    assert loop.artifact is not None
    broken = Loop.open(loop.artifact, loop.config)
    no_positions(broken)
    told = judge_eyes(broken, checkpoint)
    assert "between the modules of the eyes" in told["verdict"]


@pytest.mark.parametrize("opened", ["float32"], indirect=True)
def test_the_language_model_is_judged_as_well(opened: tuple[Loop, Checkpoint]) -> None:
    loop, checkpoint = opened
    assert loop.artifact is not None
    broken = Loop.open(loop.artifact, loop.config)
    held = broken.model.layers[1].mlp.down_proj.held  # type: ignore[index, union-attr]
    held.weight.data = held.weight.data * 1.05
    report = compare_engine(broken, checkpoint, sample_ids(loop.artifact))
    assert not report["accepted"]
    assert (report["layer"], report["module"]) == (1, "mlp.down_proj")


def test_a_refused_engine_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelmill.models import _reader

    honest = _reader.Reader.forward
    monkeypatch.setattr(_reader.Reader, "forward", lambda self, x, still: honest(self, x, still) * 1.1)
    with pytest.raises(AcceptanceError, match="of the eyes"):
        build_engine(folder, folder.parent / "refused.engine", BuildConfig(dtype="float32"))
    assert not (folder.parent / "refused.engine").exists()


@pytest.fixture(scope="module", params=[("float32", "none"), ("bfloat16", "int4")], ids=str)
def eight(request: pytest.FixtureRequest, folder: Path) -> tuple[Loop, Checkpoint]:
    """The tower in int8, the language model by a recipe of its own."""
    dtype, recipe = request.param
    config = BuildConfig(dtype=dtype, tower="int8", quantization=recipe, group_size=32, calibration_samples=4)
    engine = folder.parent / f"{dtype}-eight.engine"
    report = build_engine(folder, engine, config)
    assert report["accepted"], report["reason"]
    kinds = {row["module"] for row in report["layers"]}
    assert {"tower.qkv.weight", "tower.fc2.weight", "tower.attn", "qformer.layer", "proj"} <= kinds
    loop = Loop.open(engine, RunConfig(kv_cache_bytes=1 << 22, max_model_len=128))
    assert loop.artifact is not None
    held = loop.artifact.manifest.weights
    assert {kind for name, kind in held.items() if "visual_encoder.blocks" in name} == {"w8a8"}
    assert {kind for name, kind in held.items() if "qformer" in name or name == "reader.proj"} == {"dense"}
    wanted = {"none": "dense"}.get(recipe, recipe)
    assert {kind for name, kind in held.items() if name.startswith("layers.")} == {wanted}
    return loop, open_checkpoint(folder)


def louder(loop: Loop) -> None:
    held = reader(loop).visual_encoder.blocks[1].mlp.fc2.held
    held.scale.data = held.scale.data * 1.05


def one_louder(loop: Loop) -> None:
    """A single row."""
    held = reader(loop).visual_encoder.blocks[1].mlp.fc1.held
    scale = held.scale.clone()
    scale[5] *= 1.2
    held.scale.data = scale


def turned(loop: Loop) -> None:
    block = reader(loop).visual_encoder.blocks[2].attn.proj
    block.held = type(block.held).from_tensors(
        {**block.held.tensors(), "weight": block.held.weight.t().contiguous(), "scale": block.held.scale}
    )


ROUNDED_FAULTS: dict[str, tuple[Callable[[Loop], None], int, str]] = {
    "scale": (louder, 1, "tower.fc2.weight"),
    "one row's scale": (one_louder, 1, "tower.fc1.weight"),
    "transposed": (turned, 2, "tower.proj.weight"),
    "eps": (eps("visual_encoder.blocks.1.norm2", 1e-5), 1, "tower.norm2.eps"),
    "biases": (other_bias, 1, "tower.qkv"),
}


@pytest.mark.parametrize("name", ROUNDED_FAULTS)
def test_faults_of_a_tower_in_8_bits_are_named(eight: tuple[Loop, Checkpoint], name: str) -> None:
    loop, checkpoint = eight
    assert loop.artifact is not None
    plant, layer, module = ROUNDED_FAULTS[name]
    broken = Loop.open(loop.artifact, loop.config)
    plant(broken)
    told = judge_eyes(broken, checkpoint)
    assert (told["ok"], told["layer"], told["module"]) == (False, layer, module), told["reason"]
    assert judge_eyes(loop, checkpoint)["ok"]


def test_only_eyes_have_a_tower(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "hf")
    with pytest.raises(UsageError, match=r"--tower int8: .* reads no pictures; leave it out"):
        make_plan(open_checkpoint(folder), BuildConfig(tower="int8"))
    with pytest.raises(UsageError, match="tower"):
        BuildConfig(tower="int4")
