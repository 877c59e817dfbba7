"""A head of its own under ``tie_word_embeddings: true``, as merged adapters leave it
(huggingface/peft#2777).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.accept.reference import open_reference
from modelmill.accept.run import run_engine_acceptance
from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.artifact.store import open_artifact
from modelmill.builder import build_engine, plan
from modelmill.builder.model_config import tensor_values_equal
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import AcceptanceError, TensorMismatch
from modelmill.runtime.engine_core import EngineCore
from tests.accept.qwen_v1_plain import plain_qwen_logits, seeded_qwen
from tests.checkpoint.checkpoint_factory import (
    LLAMA_CONFIG,
    llama_state,
    write_folder,
    write_llama_gguf,
)
from tests.models.test_families import QWEN
from tests.models.tiny_models import save_hf

IDS = [[5, 17, 2, 11, 9, 3, 14, 8]]
FLOAT = BuildConfig(dtype="float32", target="cpu")


def build_and_accept(folder: Path, out: Path) -> dict[str, Any]:
    """The report of a build with acceptance."""
    return build_engine.build(
        make_build_plan(open_checkpoint(folder), FLOAT),
        out,
        lambda staged, made: run_engine_acceptance(staged, made.checkpoint),
    )


def merged(name: str, folder: Path, head: str) -> Any:
    """A tied family's checkpoint with a head beside it: "own", "equal", or "half" (equal, in
    another dtype).
    """
    save_hf(name, folder)
    tensors = load_file(folder / "model.safetensors")
    embed = next(
        tensor
        for key, tensor in tensors.items()
        if key.endswith(("embed_tokens.weight", "wte.weight"))
    )
    if head == "half":
        embed.copy_(embed.half())
    tensors["lm_head.weight"] = {
        "own": embed.flip(0) * 1.3,
        "equal": embed.clone(),
        "half": embed.half(),
    }[head]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-tied", "gpt2"])
def test_a_head_of_its_own_is_used_and_said(name: str, tmp_path: Path) -> None:
    """transformers 5 compares the two as well and leaves them apart, so it is the judge."""
    from transformers import AutoModelForCausalLM

    tensors = merged(name, tmp_path / "hf", "own")
    report = build_and_accept(tmp_path / "hf", tmp_path / "e")
    assert report["accepted"]
    artifact = open_artifact(tmp_path / "e")
    assert artifact.manifest.aliases == {}
    assert any(
        "tie_word_embeddings=true, but lm_head.weight differs" in warning
        for warning in artifact.manifest.source["warnings"]
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager"
    ).eval()
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    loop = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 20))
    with torch.no_grad():
        expected = model(torch.tensor(IDS)).logits[0]
    assert (TeacherForcedScorer(loop).compute_logits(IDS)[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("head", ["equal", "half"])
def test_the_embedding_once_more_is_dropped_without_a_word(head: str, tmp_path: Path) -> None:
    merged("llama-tied", tmp_path / "hf", head)
    made = make_build_plan(open_checkpoint(tmp_path / "hf"), FLOAT)
    assert made.aliases == {"head.weight": "embed.weight"}
    assert made.warnings == ()
    assert build_and_accept(tmp_path / "hf", tmp_path / "e")["accepted"]


def test_one_storage_under_two_names_is_one(tmp_path: Path) -> None:
    """A PyTorch file keeps both names of a tied matrix."""
    state = llama_state()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_CONFIG, "tie_word_embeddings": True}))
    assert make_build_plan(open_checkpoint(tmp_path), FLOAT).aliases


def test_an_engine_that_ties_anyway_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the build believes the config. The reference decides by itself."""
    merged("llama-tied", tmp_path / "hf", "own")
    monkeypatch.setattr(plan, "resolve_tied_head", lambda _, __, sizes: (sizes, []))
    with pytest.raises(AcceptanceError, match="head"):
        build_and_accept(tmp_path / "hf", tmp_path / "e")


def test_a_head_of_more_rows_than_the_embedding_is_named(tmp_path: Path) -> None:
    state = llama_state()
    state["lm_head.weight"] = torch.randn(24, 32)
    write_folder(tmp_path, state, {**LLAMA_CONFIG, "tie_word_embeddings": True})
    with pytest.raises(TensorMismatch, match=r"lm_head\.weight"):
        make_build_plan(open_checkpoint(tmp_path), FLOAT)


def test_qwen_v1(tmp_path: Path) -> None:
    config = {**QWEN, "tie_word_embeddings": True}
    tensors = seeded_qwen(QWEN, 1)
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert build_and_accept(tmp_path / "hf", tmp_path / "e")["accepted"]
    loop = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 20))
    assert (
        TeacherForcedScorer(loop).compute_logits(IDS)[0]
        - plain_qwen_logits(tensors, QWEN, IDS[0], prompt=len(IDS[0]))
    ).abs().max() < 1e-4


def test_a_ggufs_output_is_used_whatever_it_holds(tmp_path: Path) -> None:
    """llama.cpp multiplies with output.weight where there is one."""
    state = llama_state()
    view = open_checkpoint(write_llama_gguf(tmp_path / "own.gguf", state))
    assert make_build_plan(view, FLOAT).aliases == {}
    assert open_reference(view).head_weight_name() == "lm_head.weight"
    del state["lm_head.weight"]
    view = open_checkpoint(write_llama_gguf(tmp_path / "tied.gguf", state))
    assert make_build_plan(view, FLOAT).aliases
    assert open_reference(view).head_weight_name() == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.ones(5000, 2), torch.ones(5000, 2), True),
        (torch.ones(5000, 2), torch.ones(5000, 2).bfloat16(), True),
        (torch.ones(3, 2), torch.ones(2, 3), False),
        (torch.full((2, 2), torch.nan), torch.full((2, 2), torch.nan), False),
        (torch.tensor(1.0), torch.tensor(1.0), True),
    ],
)
def test_equal_in_any_dtype(one: torch.Tensor, other: torch.Tensor, same: bool) -> None:
    assert tensor_values_equal(one, other) is same


def test_a_difference_in_the_last_row_is_seen() -> None:
    one = torch.zeros(5000, 2)
    other = one.clone()
    other[-1, -1] = 1e-30
    assert not tensor_values_equal(one, other)
