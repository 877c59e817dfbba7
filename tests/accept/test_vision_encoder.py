"""The vision encoder in acceptance: honest engines pass in every dtype, planted faults are named
where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.run import acceptance_token_ids, compare_engine
from modelmill.accept.vision_encoder import check_vision_encoder
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import Checkpoint, open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import AcceptanceError, UsageError
from modelmill.llm import build_engine
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import save_tiny
from tests.models.minigpt4_seeded import write_checkpoint

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("vision") / "files", shared)


@pytest.fixture(scope="module", params=DTYPES)
def opened_engine(request: pytest.FixtureRequest, folder: Path) -> tuple[EngineCore, Checkpoint]:
    """Built with acceptance, so an honest engine has passed it."""
    engine = folder.parent / f"{request.param}.engine"
    report = build_engine(folder, engine, BuildConfig(dtype=request.param))
    assert report["accepted"], report["reason"]
    assert report["image_embeddings"]["rel_l2"] <= report["image_embeddings"]["bound"]
    assert sum(layer["name"].startswith("image_embedder.") for layer in report["layers"]) > 40
    return EngineCore.open(
        engine, RunConfig(kv_cache_bytes=1 << 22, max_model_len=128)
    ), open_checkpoint(folder)


def image_embedder(loop: EngineCore) -> Any:
    return loop.model.image_embedder


def eps(path: str, value: float) -> Callable[[EngineCore], None]:
    return lambda loop: setattr(image_embedder(loop).get_submodule(path), "eps", value)


def scaled(path: str) -> Callable[[EngineCore], None]:
    def plant(loop: EngineCore) -> None:
        weight = image_embedder(loop).get_submodule(path).weight
        weight.weight.data = weight.weight.data * 1.05

    return plant


def other_bias(loop: EngineCore) -> None:
    """Queries and values have changed their biases."""
    layer = image_embedder(loop).visual_encoder.blocks[1].attn.qkv
    q, k, v = layer.bias.chunk(3)
    layer.bias = torch.cat((v, k, q))


def no_positions(loop: EngineCore) -> None:
    tower = image_embedder(loop).visual_encoder
    tower.pos_embed = torch.zeros_like(tower.pos_embed)


def words_branch(loop: EngineCore) -> None:
    """A layer's feed-forward is another's."""
    layers = image_embedder(loop).qformer.layer
    layers[1].intermediate_query.dense.weight = layers[2].intermediate_query.dense.weight


FAULTS: dict[str, tuple[Callable[[EngineCore], None], int | None, str]] = {
    "vision encoder eps": (eps("visual_encoder.blocks.1.norm2", 1e-5), 1, "vision_encoder.norm2"),
    "ln_vision eps": (eps("ln_vision", 1e-6), None, "ln_vision"),
    "qformer eps": (
        eps("qformer.layer.2.output_query.LayerNorm", 1e-5),
        2,
        "qformer.feed_forward.norm",
    ),
    "vision encoder weight": (scaled("visual_encoder.blocks.0.mlp.fc1"), 0, "vision_encoder.fc1"),
    "qformer weight": (
        scaled("qformer.layer.2.crossattention.self.value"),
        2,
        "qformer.crossattention.value",
    ),
    "projection": (scaled("proj"), None, "proj"),
    "biases": (other_bias, 1, "vision_encoder.qkv"),
    "words": (words_branch, 1, "qformer.up"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_named(opened_engine: tuple[EngineCore, Checkpoint], name: str) -> None:
    loop, checkpoint = opened_engine
    plant, layer, module = FAULTS[name]
    engine = loop.artifact
    assert engine is not None
    broken = EngineCore.open(engine, loop.config)
    # weights are views of the file: a planted fault must not write there
    plant(broken)
    report = check_vision_encoder(broken, checkpoint)
    assert not report["ok"]
    assert report["layer"] == layer, report["reason"]
    assert report["module"].removesuffix(".eps") == module, report["reason"]
    assert check_vision_encoder(loop, checkpoint)["ok"]


def test_what_no_module_shows(opened_engine: tuple[EngineCore, Checkpoint]) -> None:
    loop, checkpoint = opened_engine
    assert loop.artifact is not None
    broken = EngineCore.open(loop.artifact, loop.config)
    no_positions(broken)
    report = check_vision_encoder(broken, checkpoint)
    assert "between the modules of the vision encoder" in report["verdict"]


@pytest.mark.parametrize("opened_engine", ["float32"], indirect=True)
def test_the_language_model_is_judged_as_well(opened_engine: tuple[EngineCore, Checkpoint]) -> None:
    loop, checkpoint = opened_engine
    assert loop.artifact is not None
    broken = EngineCore.open(loop.artifact, loop.config)
    weight = broken.model.layers[1].mlp.down_proj.weight  # type: ignore[index, union-attr]
    weight.weight.data = weight.weight.data * 1.05
    report = compare_engine(broken, checkpoint, acceptance_token_ids(loop.artifact))
    assert not report["accepted"]
    assert (report["layer"], report["module"]) == (1, "mlp.down_proj")


def test_a_refused_engine_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelmill.models import _blip2_vision

    real_forward = _blip2_vision.Blip2ImageEmbedder.forward
    monkeypatch.setattr(
        _blip2_vision.Blip2ImageEmbedder,
        "forward",
        lambda self, x, vision: real_forward(self, x, vision) * 1.1,
    )
    with pytest.raises(AcceptanceError, match="of the vision encoder"):
        build_engine(folder, folder.parent / "refused.engine", BuildConfig(dtype="float32"))
    assert not (folder.parent / "refused.engine").exists()


@pytest.fixture(scope="module", params=[("float32", "none"), ("bfloat16", "int4")], ids=str)
def eight(request: pytest.FixtureRequest, folder: Path) -> tuple[EngineCore, Checkpoint]:
    """The tower in int8, the language model by a recipe of its own."""
    dtype, recipe = request.param
    config = BuildConfig(
        dtype=dtype, tower="int8", quantization=recipe, group_size=32, calibration_samples=4
    )
    engine = folder.parent / f"{dtype}-eight.engine"
    report = build_engine(folder, engine, config)
    assert report["accepted"], report["reason"]
    module_names = {row["module"] for row in report["layers"]}
    assert {
        "vision_encoder.qkv.weight",
        "vision_encoder.fc2.weight",
        "vision_encoder.attn",
        "qformer.layer",
        "proj",
    } <= module_names
    loop = EngineCore.open(engine, RunConfig(kv_cache_bytes=1 << 22, max_model_len=128))
    assert loop.artifact is not None
    weight_formats = loop.artifact.manifest.weight_formats
    assert {
        weight_format
        for name, weight_format in weight_formats.items()
        if "visual_encoder.blocks" in name
    } == {"w8a8"}
    assert {
        weight_format
        for name, weight_format in weight_formats.items()
        if "qformer" in name or name == "image_embedder.proj"
    } == {"dense"}
    language_format = {"none": "dense"}.get(recipe, recipe)
    assert {
        weight_format
        for name, weight_format in weight_formats.items()
        if name.startswith("layers.")
    } == {language_format}
    return loop, open_checkpoint(folder)


def louder(loop: EngineCore) -> None:
    weight = image_embedder(loop).visual_encoder.blocks[1].mlp.fc2.weight
    weight.scale.data = weight.scale.data * 1.05


def one_louder(loop: EngineCore) -> None:
    """A single row."""
    weight = image_embedder(loop).visual_encoder.blocks[1].mlp.fc1.weight
    scale = weight.scale.clone()
    scale[5] *= 1.2
    weight.scale.data = scale


def transpose_weight(loop: EngineCore) -> None:
    block = image_embedder(loop).visual_encoder.blocks[2].attn.proj
    block.weight = type(block.weight).from_tensors(
        {
            **block.weight.tensors(),
            "weight": block.weight.weight.t().contiguous(),
            "scale": block.weight.scale,
        }
    )


ROUNDED_FAULTS: dict[str, tuple[Callable[[EngineCore], None], int, str]] = {
    "scale": (louder, 1, "vision_encoder.fc2.weight"),
    "one row's scale": (one_louder, 1, "vision_encoder.fc1.weight"),
    "transposed": (transpose_weight, 2, "vision_encoder.proj.weight"),
    "eps": (eps("visual_encoder.blocks.1.norm2", 1e-5), 1, "vision_encoder.norm2.eps"),
    "biases": (other_bias, 1, "vision_encoder.qkv"),
}


@pytest.mark.parametrize("name", ROUNDED_FAULTS)
def test_faults_of_a_tower_in_8_bits_are_named(
    eight: tuple[EngineCore, Checkpoint], name: str
) -> None:
    loop, checkpoint = eight
    assert loop.artifact is not None
    plant, layer, module = ROUNDED_FAULTS[name]
    broken = EngineCore.open(loop.artifact, loop.config)
    plant(broken)
    report = check_vision_encoder(broken, checkpoint)
    assert (report["ok"], report["layer"], report["module"]) == (False, layer, module), report[
        "reason"
    ]
    assert check_vision_encoder(loop, checkpoint)["ok"]


def test_only_image_models_have_a_tower(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "hf")
    with pytest.raises(UsageError, match=r"--tower int8: .* does not read images; remove it"):
        make_build_plan(open_checkpoint(folder), BuildConfig(tower="int8"))
    with pytest.raises(UsageError, match="tower"):
        BuildConfig(tower="int4")
