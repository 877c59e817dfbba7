"""Where a model's layers are is declared once: in weight files, recipes and acceptance alike."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch import nn

from modelmill.accept.vision_stage_check import VisionStageCheck
from modelmill.artifact.manifest import Manifest
from modelmill.loader.model_loader import build_model
from modelmill.models import minigpt4, sam
from modelmill.models._blip2_vision import Blip2VisionSpec
from modelmill.models._eva_vit import EvaSpec
from modelmill.models._qformer import QFormerSpec
from modelmill.nn.layer_spec import LinearSpec, NormSpec
from modelmill.nn.layer_stack import (
    kv_shape,
    layer_stacks,
    linear_quant_site,
    module_weight_file,
    stack_layer_specs,
    vision_encoder_linear_specs,
    vision_encoder_stacks,
)
from modelmill.nn.linear import Linear
from modelmill.nn.rotary import RopeSpec
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import select_backends
from tests.models.all_families import CASES
from tests.models.sam_seeded import SMALL

PACKAGE = Path(__file__).resolve().parent.parent.parent / "modelmill"
WALKERS = ("builder", "nn/shard_model.py", "accept", "artifact", "quant", "loader", "runtime")
NAMES = re.compile(r"visual_encoder|image_encoder|image_embedder|\bqformer\.|\bblocks\.|lin[12]\b")
# file → why it names a part of a vision encoder
REASONS = {
    "accept/unused_tensors.py": "names in checkpoints, independent of the model files",
}


def minigpt4_model() -> nn.Module:
    sizes = Blip2VisionSpec(EvaSpec(48, 3, 3, 80, 56), QFormerSpec(32, 4, 4, 56, 48), 64)
    return minigpt4.Model(
        minigpt4.MiniGpt4Config(
            64, 96, 2, 4, 4, 16, 120, 1e-6, 128, RopeSpec(16, 1e4, 128), image_embedder=sizes
        )
    )


MODELS = {
    "sam": lambda: sam.Model(sam.SamConfig(SMALL)),
    "mobile_sam": lambda: sam.Model(sam.SamConfig(sam.TinyVitSpec())),
    "minigpt4": minigpt4_model,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_a_vision_encoders_layers_is_declared(name: str) -> None:
    model = MODELS[name]()
    assert vision_encoder_stacks(model)
    declared = set()
    for stack in vision_encoder_stacks(model):
        layers = model.get_submodule(stack.path)
        for layer, spec in zip(layers.children(), stack_layer_specs(model, stack), strict=True):
            spec.check_module_tree(layer)
            assert {site.name for site in spec.sites} == {each.site for each in spec.linears}
            for norm in spec.modules_of_type(NormSpec):
                assert norm.tensors == ("weight", "bias")
    for path, _, linear in vision_encoder_linear_specs(model):
        assert isinstance(linear, LinearSpec)
        rows, _ = model.get_submodule(path).shape  # type: ignore[misc]
        assert sum(part.rows for part in linear.parts) == rows
        site = linear_quant_site(model, path)
        assert site is not None
        assert site.name == linear.site
        declared.add(path)
    embedder = "image_embedder" if name == "minigpt4" else "image_encoder"
    linears = {n for n, m in model.named_modules() if isinstance(m, Linear)}
    outside = {"image_embedder.proj"} if name == "minigpt4" else set()
    assert declared | outside == {each for each in linears if each.startswith(embedder)}


def test_a_q_former_reads_a_site_of_the_queries_and_one_of_the_image() -> None:
    looks, alone = (QFormerSpec(32, 4, 4, 56, 48).layer_spec(i) for i in (0, 1))
    assert {each.path for each in looks.site_linears("image_tokens")} == {
        "crossattention.self.key", "crossattention.self.value"
    }  # fmt: skip
    assert [each.path for each in looks.site_linears("attention.output")] == [
        "crossattention.self.query"
    ]
    assert [each.path for each in alone.site_linears("attention.output")] == [
        "intermediate_query.dense"
    ]
    assert not any("cross" in module.path for module in alone.modules)


def test_a_weight_file_holds_a_layer() -> None:
    files = {
        "sam": {"image_encoder.blocks.1.attn.qkv": "encoder-0001",
                "image_encoder.neck.0": "embedding_and_head",
                "mask_decoder.iou_token": "embedding_and_head"},
        "mobile_sam": {"image_encoder.layers.2.downsample.conv1": "encoder-0002",
                       "image_encoder.patch_embed.0": "embedding_and_head"},
        "minigpt4": {"layers.1.attn.qkv_proj": "layer-0001", "embed": "embedding_and_head",
                     "image_embedder.visual_encoder.blocks.2.norm1": "image_embedder-0002",
                     "image_embedder.visual_encoder": "image_embedder",
                     "image_embedder.qformer.layer.3.attention.self.key": "image_embedder"},
    }  # fmt: skip
    for name, expected in files.items():
        model = MODELS[name]()
        assert {module: module_weight_file(model, module) for module in expected} == expected


def test_which_option_names_a_recipe() -> None:
    stacks = layer_stacks(minigpt4_model())
    assert [stack.recipe for stack in stacks] == ["quantization", "tower", ""]
    assert [stack.recipe for stack in layer_stacks(MODELS["sam"]())] == ["quantization"]


def test_what_the_reference_compares_is_what_the_layers_declare() -> None:
    model = MODELS["sam"]()
    manifest = Manifest(
        schema=1, engine_type="segmentation", model_type="sam", packing=1, max_model_len=1,
        config={}, build={"dtype": "float32"}, weight_formats={}, aliases={}, generation={},
        source={}, versions={}, files={},
    )  # fmt: skip
    check = VisionStageCheck(model, VisionContext(select_backends("cpu")), "cpu", manifest)
    with pytest.raises(ValueError, match=r"differ in image_encoder\.blocks\.0\.attn as attn, "):
        check.check_declared_modules_compared()


def test_no_part_of_a_vision_encoder_is_named_outside_its_model_file() -> None:
    named = {}
    for entry in (PACKAGE / each for each in WALKERS):
        for path in [entry] if entry.is_file() else entry.rglob("*.py"):
            if path.parent.name == "reference":
                continue
            texts = {
                node.value
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            # docstrings have spaces
            parts = {text for text in texts if " " not in text and NAMES.search(text)}
            if parts:
                named[str(path.relative_to(PACKAGE))] = parts
    assert named.keys() == REASONS.keys(), named


def test_the_cache_of_layers_that_differ() -> None:
    """An entry for each layer with keys of its own, in its sizes; those that later layers read."""
    model = build_model("gemma4_text", CASES["gemma4_text"].raw())
    shape = kv_shape(model.get_submodule("layers").children())
    assert shape.layers == 4
    assert shape.sizes == ((2, 16), (1, 32), (2, 16), (1, 32))
    assert shape.read_later == {2, 3}
    assert shape.caches == (0, 1, 2, 3, 2, 3)
    assert shape.layer_windows == (20, None, 20, None)
    alike = build_model("gemma3_text", CASES["gemma3_text"].raw())
    shape = kv_shape(alike.get_submodule("layers").children())
    assert (shape.sizes, shape.read_later) == ((), frozenset())
