"""Engines of image models: from a single file, without tokens, the same bits each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelmill.artifact.store import open_artifact
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, TensorMismatch, UsageError
from tests.models.sam_seeded import small_file, small_state


def build_sam(checkpoint: Path, out: Path, dtype: str) -> Path:
    build(make_build_plan(open_checkpoint(checkpoint), BuildConfig(dtype=dtype)), out, None)
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_two_builds_are_the_same_bits(tmp_path: Path, dtype: str) -> None:
    checkpoint = small_file(tmp_path / "from")
    one, two = (
        build_sam(checkpoint, tmp_path / f"{name}.engine", dtype) for name in ("one", "two")
    )
    files = sorted(str(p.relative_to(one)) for p in one.rglob("*") if p.is_file())
    assert "weights/encoder-0001.safetensors" in files
    for name in files:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    artifact = open_artifact(one)
    assert artifact.manifest.engine_type == "segmentation"
    assert artifact.tokenizer_files() == {}
    for name in artifact.names():
        is_float = name.startswith(("prompt_encoder.", "mask_decoder."))
        assert artifact.tensor(name).dtype == (
            torch.float32 if is_float else getattr(torch, dtype)
        ), name


def test_a_pth_and_a_folder_give_the_same_weights(tmp_path: Path) -> None:
    checkpoint = small_file(tmp_path / "from")
    torch.save(small_state(), tmp_path / "sam.pth")
    first, second = (
        open_artifact(build_sam(path, tmp_path / f"{i}.engine", "float32"))
        for i, path in enumerate((checkpoint, tmp_path / "sam.pth"))
    )
    assert sorted(first.names()) == sorted(second.names())
    assert all(torch.equal(first.tensor(name), second.tensor(name)) for name in first.names())


def test_the_plan_tells_of_memory_without_a_cache(tmp_path: Path) -> None:
    plan_facts = make_build_plan(open_checkpoint(small_file(tmp_path)), BuildConfig()).describe()
    assert plan_facts["engine_type"] == "segmentation"
    assert plan_facts["memory"]["workspace"] > 0
    assert not any("kv" in name for name in plan_facts["memory"])
    assert plan_facts["memory"]["fits"].startswith("one picture needs")


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int4"},
        {"quantization": "smoothquant"},
        {"quantization": "auto"},
        {"quantization": "fp8", "activation_scales": "tensor"},
        {"max_model_len": 100},
    ],
)
def test_options_of_language_models_are_refused(tmp_path: Path, options: dict) -> None:
    with pytest.raises(UsageError, match="segments images"):
        make_build_plan(open_checkpoint(small_file(tmp_path)), BuildConfig(**options))


@pytest.mark.parametrize(
    ("options", "weight_format"),
    [
        ({"quantization": "int8"}, "w8a8"),
        ({"quantization": "int8", "activation_scales": "none"}, "int8"),
        ({"quantization": "fp8"}, "fp8"),
        ({"quantization": "fp8", "activation_scales": "none"}, "fp8"),
    ],
)
def test_the_encoders_linear_layers_are_quantized_and_nothing_else(
    tmp_path: Path, options: dict, weight_format: str
) -> None:
    checkpoint = small_file(tmp_path / "from")
    build(
        make_build_plan(open_checkpoint(checkpoint), BuildConfig(dtype="float32", **options)),
        tmp_path / "e",
        None,
    )
    artifact = open_artifact(tmp_path / "e")
    weight_formats = artifact.manifest.weight_formats
    inside = {f"image_encoder.blocks.{i}.{name}" for i in range(2) for name in _LINEARS}
    assert {name for name, fmt in weight_formats.items() if fmt == weight_format} == inside
    assert {fmt for name, fmt in weight_formats.items() if name not in inside} == {"dense"}
    scale = artifact.tensor("image_encoder.blocks.0.attn.qkv.scale")
    assert scale.dtype == torch.float32
    assert torch.equal(
        artifact.tensor("image_encoder.neck.0.weight"), small_state()["image_encoder.neck.0.weight"]
    )


_LINEARS = ("attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2")


def test_a_file_of_no_known_family_without_config(tmp_path: Path) -> None:
    save_file({"what": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json: is missing.*x\.safetensors"):
        make_build_plan(open_checkpoint(tmp_path / "x.safetensors"), BuildConfig())


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    state = small_state()
    del state["image_encoder.blocks.1.mlp.lin2.weight"]
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(TensorMismatch, match=r"blocks\.1\.mlp\.lin2\.weight"):
        make_build_plan(open_checkpoint(tmp_path / "x.safetensors"), BuildConfig())
