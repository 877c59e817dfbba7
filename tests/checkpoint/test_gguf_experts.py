"""Mixtures of experts in GGUF, whose experts are stacked: written by the gguf package's names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.checkpoint.gguf import GgufFile
from modelmill.checkpoint.gguf_hf import GgufAsHf
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import RunConfig
from modelmill.core.errors import TensorMismatch, UnknownArchitecture
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept
from tests.checkpoint.checkpoint_factory import permute, write_tensors
from tests.models.all_families import CASES
from tests.models.family_cases import Logits

pytest.importorskip("transformers")

# model_type → the gguf package's architecture, and config fields that GGUF cannot say otherwise
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (gguf.MODEL_ARCH.LLAMA, {}),
    "qwen2_moe": (gguf.MODEL_ARCH.QWEN2MOE, {"norm_topk_prob": False}),
    "qwen3_moe": (gguf.MODEL_ARCH.QWEN3MOE, {"norm_topk_prob": True}),
    "olmoe": (gguf.MODEL_ARCH.OLMOE, {"norm_topk_prob": False}),
}
# rows and columns in multiples of the 32 values of a block
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96, "head_dim": 16,
}  # fmt: skip
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under the names of the converter, those of all experts in one."""
    single: dict[str, dict[int, torch.Tensor]] = {}
    out = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(model\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            out[name] = tensor
            continue
        layer, expert, matrix = match.groups()
        whole = f"{layer}.mlp.experts.{MIXTRAL.get(matrix, matrix)}.weight"
        single.setdefault(whole, {})[int(expert)] = tensor
    return out | {
        name: torch.stack([experts[i] for i in range(len(experts))])
        for name, experts in single.items()
    }


def write_gguf(path: Path, model_type: str, raw: dict[str, Any], folder: Path, kind: Any) -> None:
    """Write a checkpoint's tensors the way llama.cpp's converter lays them out."""
    architecture = ARCHITECTURES[model_type][0]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(str(path), name)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_expert_count(raw.get("num_experts") or raw["num_local_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    if "moe_intermediate_size" in raw:
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if model_type == "qwen2_moe":
        shared = raw["shared_expert_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
    names = gguf.get_tensor_name_map(architecture, raw["num_hidden_layers"])
    for source, tensor in stacked(load_file(folder / "model.safetensors")).items():
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        assert target is not None, source
        if model_type == "mixtral" and re.search(r"self_attn\.[qk]_proj", source):
            heads = "num_attention_heads" if ".q_proj" in source else "num_key_value_heads"
            tensor = torch.from_numpy(permute(tensor.numpy(), raw[heads]))
        values = tensor.numpy()
        if kind is not None and tensor.dim() > 1 and "_inp" not in target:
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    write_tensors(writer)


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Logits]:
    """(model_type, GGUF file, the independent logits) of a seeded model; kind: of its blocks."""
    model_type, kind = request.param
    case = CASES[model_type]
    sizes = {key: value for key, value in SIZES.items() if key in case.base or "_inter" not in key}
    changes = {**sizes, **ARCHITECTURES[model_type][1], "rms_norm_eps": 1e-5, "rope_theta": 500.0}
    if model_type in ("olmoe", "qwen2_moe"):
        del changes["head_dim"]  # it is hidden_size / heads
    logits = case.save(tmp_path / "hf", **changes)
    raw = case.raw(**changes) | {"head_dim": 16}
    write_gguf(tmp_path / "m.gguf", model_type, raw, tmp_path / "hf", kind)
    return model_type, tmp_path / "m.gguf", logits


FLOAT = [(name, None) for name in ARCHITECTURES]
Q8 = [(name, gguf.GGMLQuantizationType.Q8_0) for name in ARCHITECTURES]


@pytest.mark.parametrize("made", FLOAT, indirect=True, ids=list(ARCHITECTURES))
def test_tensors_and_sizes_come_back(made: tuple[str, Path, Logits]) -> None:
    model_type, file, _ = made
    view = GgufAsHf(GgufFile(file))
    state = load_file(file.parent / "hf" / "model.safetensors")
    assert sorted(view.names()) == sorted(state)
    for name, tensor in state.items():
        assert torch.equal(view.get(name), tensor), name
    assert view.config["model_type"] == model_type
    assert view.unread == {}


@pytest.mark.parametrize("made", FLOAT, indirect=True, ids=list(ARCHITECTURES))
def test_an_engine_of_it_gives_the_logits(made: tuple[str, Path, Logits]) -> None:
    _, file, logits = made
    report, written = build_and_accept(file, file.parent / "e", "float32", "none")
    assert written, report.get("reason", report)
    engine = EngineCore.open(file.parent / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    ids = torch.randint(2, 100, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    (actual,) = TeacherForcedScorer(engine).compute_logits([ids], decode_from=9)
    assert (actual - logits(ids)).abs().max() < 1e-4


@pytest.mark.parametrize("made", Q8, indirect=True, ids=list(ARCHITECTURES))
def test_blocks_of_single_experts_are_kept(made: tuple[str, Path, Logits]) -> None:
    _, file, _ = made
    report, written = build_and_accept(file, file.parent / "e", "float32", "keep")
    assert written, report.get("reason", report)
    manifest = EngineCore.open(file.parent / "e", RunConfig(device="cpu")).artifact
    assert manifest is not None
    formats = manifest.manifest.weight_formats
    experts = {each for name, each in formats.items() if ".experts." in name}
    assert experts == {"int8_group"}


@pytest.mark.parametrize("made", FLOAT[:1], indirect=True, ids=["mixtral"])
@pytest.mark.parametrize("number", [-1, 5, 99])
def test_there_is_no_expert_beyond_the_stack(made: tuple[str, Path, Logits], number: int) -> None:
    with pytest.raises(TensorMismatch):
        GgufFile(made[1]).tensor_info(f"blk.0.ffn_up_exps.weight#{number}")


def test_other_architectures_with_experts_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "qwen2")
    writer.add_expert_count(4)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 32).numpy())
    write_tensors(writer)
    with pytest.raises(UnknownArchitecture, match="mixture of experts of architecture qwen2"):
        open_checkpoint(tmp_path / "m.gguf")
