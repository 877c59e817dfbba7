"""From checkpoint to engine: bit-identical, resumable, atomic, and refusing what it must refuse."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.artifact.store import is_engine_folder, open_artifact
from modelmill.artifact.verify import verify_file_hashes
from modelmill.builder import build_engine
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import (
    AcceptanceError,
    ArtifactError,
    CheckpointError,
    CorruptArtifact,
    CorruptCheckpoint,
    TensorMismatch,
    UnknownArchitecture,
    UsageError,
)
from tests.models.tiny_models import edit, save_hf, save_raw


def plan(folder: Path, **options: Any) -> Any:
    return make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu", **options))


def make(folder: Path, out: Path, **options: Any) -> Path:
    build_engine.build(plan(folder, **options), out, None)
    return out


def digest(engine: Path) -> dict[str, str]:
    files = sorted(p for p in engine.rglob("*") if p.is_file())
    return {str(p.relative_to(engine)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_hf("llama", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("options", [{}, {"quantization": "int8", "dtype": "bfloat16"}], ids=str)
def test_two_builds_are_bit_identical(llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    assert digest(make(llama, tmp_path / "a", **options)) == digest(
        make(llama, tmp_path / "b", **options)
    )


def test_parents_are_created_and_nothing_else_is_left(llama: Path, tmp_path: Path) -> None:
    out = make(llama, tmp_path / "deep" / "er" / "x.engine")
    assert [p.name for p in out.parent.iterdir()] == ["x.engine"]


def test_an_interrupted_build_is_not_loadable_and_resumes(
    llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    written: list[str] = []
    real = build_engine._pack_and_write_tensor

    def interrupted(plan: Any, piece: Any, *rest: Any) -> None:
        if piece.module == "layers.1.attn.o_proj":
            raise KeyboardInterrupt
        real(plan, piece, *rest)

    monkeypatch.setattr(build_engine, "_pack_and_write_tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(llama, tmp_path / "e")
    assert not (tmp_path / "e").exists()
    with pytest.raises(ArtifactError):
        open_artifact(tmp_path / ".e.staging")

    def count_calls(plan: Any, piece: Any, *rest: Any) -> None:
        written.append(piece.module)
        real(plan, piece, *rest)

    monkeypatch.setattr(build_engine, "_pack_and_write_tensor", count_calls)
    make(llama, tmp_path / "e")
    assert not any(m.startswith("layers.0.") or m == "embed" for m in written), (
        "finished files are not written again"
    )
    monkeypatch.undo()
    assert digest(tmp_path / "e") == digest(make(llama, tmp_path / "fresh"))


def test_another_config_does_not_resume_the_old_one(
    llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_engine, "_make_manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        make(llama, tmp_path / "e", dtype="float32")
    monkeypatch.undo()
    make(llama, tmp_path / "e", dtype="bfloat16")
    assert open_artifact(tmp_path / "e").tensor("norm.weight").dtype == torch.bfloat16


def test_a_refused_engine_is_not_written(llama: Path, tmp_path: Path) -> None:
    def refuse(staged: Path, plan: Any) -> dict[str, Any]:
        assert is_engine_folder(staged)
        return {"accepted": False, "reason": "bug at layer 1, module attn.o_proj"}

    with pytest.raises(AcceptanceError, match=r"layer 1, module attn\.o_proj"):
        build_engine.build(plan(llama), tmp_path / "e", refuse)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_two_builders_on_one_folder(llama: Path, tmp_path: Path) -> None:
    def inner(staged: Path, _: Any) -> dict[str, Any]:
        with pytest.raises(ArtifactError, match="another build"):
            make(llama, tmp_path / "e")
        return {"accepted": True, "reason": ""}

    build_engine.build(plan(llama), tmp_path / "e", inner)
    assert is_engine_folder(tmp_path / "e")


def test_an_engine_is_replaced_and_anything_else_is_not(llama: Path, tmp_path: Path) -> None:
    make(llama, tmp_path / "e", dtype="float32")
    make(llama, tmp_path / "e", dtype="float16")
    assert open_artifact(tmp_path / "e").manifest.build["dtype"] == "float16"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="not an engine"):
        make(llama, tmp_path / "mine")


def test_a_full_disk_is_one_line_and_leaves_no_engine(
    llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="No space left"):
        make(llama, tmp_path / "e")
    monkeypatch.undo()
    assert not (tmp_path / "e").exists()
    make(llama, tmp_path / "e")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_weights_are_named(llama: Path, tmp_path: Path, value: float) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"layers\.1\.mlp\.up_proj"):
        make(llama, tmp_path / "e")


def test_float16_overflow_says_what_to_do(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e6
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match="bfloat16"):
        make(llama, tmp_path / "e", dtype="float16")


def test_scales_that_overflow_are_not_blamed_on_the_dtype(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 4e6
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"scales of int4 overflow in float16.*-q int8"):
        make(llama, tmp_path / "e", dtype="float32", quantization="int4", method="nearest")
    make(llama, tmp_path / "e", dtype="float32", quantization="int8")


def test_left_over_and_missing_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.self_attn.mystery"] = torch.zeros(2)
    del tensors["model.layers.2.mlp.gate_proj.weight"]
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(TensorMismatch) as error:
        plan(llama)
    assert "mystery" in str(error.value)
    assert "layers.2.mlp.gate_proj.weight" in str(error.value)


def test_wrong_shapes_are_named(llama: Path) -> None:
    edit(llama, lambda raw: raw.update(intermediate_size=81))
    with pytest.raises(TensorMismatch, match="162"):
        plan(llama)


def test_integer_weights_are_refused(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int64)
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(TensorMismatch, match="int64"):
        plan(llama)


def test_an_unknown_architecture_names_the_nearest(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    folder = save_raw(tmp_path / "hf", {"a": torch.zeros(2)}, config)
    with pytest.raises(UnknownArchitecture) as error:
        plan(folder)
    assert "qwen2_vl" in str(error.value)
    assert re.search(
        r"nearest known family is qwen2; docs/families\.md lists the known ones$", str(error.value)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "48"}, {"hidden_size": -1}, {"num_hidden_layers": 0},
        {"num_key_value_heads": 3},
        {"hidden_act": "quick_gelu"}, {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
        {"rope_scaling": 3},
        {"rms_norm_eps": "x"}, {"vocab_size": True}, {"head_dim": 7},
        {"num_attention_heads": 2**40},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
    ids=str,
)  # fmt: skip
def test_bad_configs_are_one_line(llama: Path, change: dict[str, Any]) -> None:
    def apply(raw: dict[str, Any]) -> None:
        raw.pop("rope_parameters", None)
        raw.update(change)

    edit(llama, apply)
    with pytest.raises(CheckpointError) as error:
        plan(llama)
    assert "\n" not in str(error.value)


def test_a_damaged_checkpoint_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(CorruptCheckpoint):
        make(llama, tmp_path / "out" / "x.engine")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_unknown_recipe_is_named(llama: Path) -> None:
    with pytest.raises(UsageError, match=r"'int3' is not one of none, .*int8"):
        plan(llama, quantization="int3")


def test_too_long_is_refused(llama: Path) -> None:
    with pytest.raises(UsageError, match="256"):
        plan(llama, max_model_len=257)


def test_the_plan_tells_sizes_that_come_true(llama: Path, tmp_path: Path) -> None:
    made = plan(llama, quantization="int8")
    output = json.loads(json.dumps(made.describe()))
    build_engine.build(made, tmp_path / "e", None)
    on_disk = sum(p.stat().st_size for p in (tmp_path / "e" / "weights").iterdir())
    # headers and padding come on top of the tensors
    assert output["memory"]["weights"] <= on_disk <= output["memory"]["weights"] + 40_000
    assert output["memory"]["kv_per_token"] == 2 * 3 * 2 * 12 * 4
    assert output["memory"]["kv_per_token_8bit"] == 2 * 3 * 2 * (12 + 4)
    assert output["bytes_by_format"]["int8"] > 0


def test_a_flipped_bit_is_found(llama: Path, tmp_path: Path) -> None:
    out = make(llama, tmp_path / "e")
    verify_file_hashes(open_artifact(out))
    path = next((out / "weights").iterdir())
    raw = bytearray(path.read_bytes())
    raw[-70] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptArtifact, match=path.name):
        verify_file_hashes(open_artifact(out))


def test_quantized_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    save_hf("llama-tied", tmp_path / "hf")
    plain = open_artifact(make(tmp_path / "hf", tmp_path / "a", quantization="int8"))
    head = open_artifact(
        make(tmp_path / "hf", tmp_path / "b", quantization="int8", quantize_head=True)
    )
    assert plain.manifest.aliases == {"head.weight": "embed.weight"}
    assert head.manifest.weight_formats["head"] == "int8"
    assert head.tensor("embed.weight").dtype == torch.float32
    assert head.tensor("head.weight").dtype == torch.int8
