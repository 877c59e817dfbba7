"""Tensors that a drop rule leaves out: buffers are compared with what is computed, anything else is
an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.accept import unused_tensors
from modelmill.accept.reference import open_reference
from modelmill.accept.reference.minigpt4_vision import MiniGpt4VisionReference
from modelmill.accept.run import run_engine_acceptance
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import AcceptanceError
from modelmill.llm import build_engine
from modelmill.models import llama
from tests.accept.qwen_v1_plain import seeded_qwen
from tests.checkpoint.checkpoint_factory import (
    LLAMA_CONFIG,
    llama_state,
    write_folder,
    write_llama_gguf,
)
from tests.models.minigpt4_seeded import write_checkpoint
from tests.models.sam_seeded import small_state
from tests.models.test_families import QWEN
from tests.models.tiny_models import save_hf

FLOAT = BuildConfig(dtype="float32", target="cpu")
FREQUENCIES = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


def build_and_accept(path: Path, out: Path) -> dict[str, Any]:
    """The report of a build with acceptance."""
    # ids alone: a tokenizer is another matter
    made = make_build_plan(replace(open_checkpoint(path), side_files={}), FLOAT)
    return build(made, out, lambda staged, plan: run_engine_acceptance(staged, plan.checkpoint))


def llama_with(folder: Path, **more: torch.Tensor) -> Path:
    """A LLaMA whose rotation has the base 10000, and tensors beside it."""
    return write_folder(folder, {**llama_state(), **more}, LLAMA_CONFIG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_computed_frequencies_are_fine_in_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    report = build_and_accept(
        llama_with(tmp_path / "hf", **{INV_FREQ: FREQUENCIES.to(dtype)}), tmp_path / "e"
    )
    assert report["accepted"]
    [row] = report["unused_tensors"]
    assert row == {
        "what": "rotary frequencies, computed",
        "count": 1,
        "names": [INV_FREQ],
        "ok": True,
    }


def test_frequencies_of_another_base_are_refused(tmp_path: Path) -> None:
    """Stored frequencies were computed with: config.json has lost its rope_theta."""
    other = 1.0 / 1e6 ** (torch.arange(0, 8, 2) / 8)
    with pytest.raises(
        AcceptanceError,
        match=r"may matter: .*inv_freq \(rotary frequencies, computed, but with other",
    ):
        build_and_accept(llama_with(tmp_path / "hf", **{INV_FREQ: other}), tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_a_rule_that_drops_too_much_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a pattern that matches tensors of another meaning."""
    folder = llama_with(tmp_path / "hf", **{"model.layers.1.self_attn.sinks": torch.ones(4)})
    monkeypatch.setattr(llama, "ignored_tensors", lambda _: (r".*\.self_attn\.s.*",), raising=False)
    with pytest.raises(
        AcceptanceError, match=r"may matter: model\.layers\.1\.self_attn\.sinks \(unused\)"
    ):
        build_and_accept(folder, tmp_path / "e")


def mask(count: int) -> torch.Tensor:
    return torch.ones(count, count).tril().view(1, 1, count, count)


MASKS: dict[str, tuple[torch.Tensor, bool]] = {
    "attn.bias": (mask(16), True),
    "attn.bias of booleans": (mask(16).bool(), True),
    "attn.bias of bytes": (mask(16).byte(), True),
    "attn.bias of a window": (mask(16).triu(-3), False),
    "attn.bias of all": (torch.ones(1, 1, 16, 16), False),
    "attn.bias of a row": (torch.ones(16), False),
    "attn.masked_bias": (torch.tensor(-1e4), True),
    "attn.masked_bias of zero": (torch.tensor(0.0), False),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_are_the_causal_one(case: str, tmp_path: Path) -> None:
    tensor, fine = MASKS[case]
    save_hf("gpt2", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    name = f"transformer.h.1.{case.split()[0]}"
    save_file({**tensors, name: tensor.contiguous()}, tmp_path / "hf" / "model.safetensors")
    if fine:
        assert build_and_accept(tmp_path / "hf", tmp_path / "e")["unused_tensors"][0]["names"] == [
            name
        ]
        return
    with pytest.raises(AcceptanceError, match=f"may matter: {name}"):
        build_and_accept(tmp_path / "hf", tmp_path / "e")


@pytest.mark.parametrize("length", [32, 48])
def test_qwens_logn_factors(length: int, tmp_path: Path) -> None:
    place = torch.arange(1, 100, dtype=torch.float64)
    factors = torch.where(
        place > length, place.log() / torch.tensor(float(length)).log(), 1.0
    ).float()
    tensors = {**seeded_qwen(QWEN, 1), "transformer.logn_tensor": factors.view(1, -1, 1, 1)}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(QWEN))
    if length == QWEN["seq_length"]:
        assert build_and_accept(tmp_path / "hf", tmp_path / "e")["accepted"]
        return
    with pytest.raises(AcceptanceError, match="logn_tensor"):
        build_and_accept(tmp_path / "hf", tmp_path / "e")


def test_nothing_of_a_plain_checkpoint_is_dropped(tmp_path: Path) -> None:
    for path in (llama_with(tmp_path / "hf"), write_llama_gguf(tmp_path / "m.gguf", llama_state())):
        report = build_and_accept(path, tmp_path / "e")
        assert report["accepted"]
        assert report["unused_tensors"] == []


def test_a_reference_that_reads_nothing_finds_everything(tmp_path: Path) -> None:
    reference = open_reference(open_checkpoint(llama_with(tmp_path / "hf")))
    [row] = unused_tensors.explain_unused_language_tensors(reference)
    assert (row["count"], row["ok"]) == (len(llama_state()), False)


CHECKS: list[tuple[Callable[[torch.Tensor], bool], torch.Tensor, bool]] = [
    (unused_tensors._is_arange, torch.arange(5)[None], True),
    (unused_tensors._is_arange, torch.tensor([0, 2, 1]), False),
    (
        unused_tensors._is_window_distance_table,
        torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]),
        True,
    ),
    (unused_tensors._is_window_distance_table, torch.zeros(4, 4), False),
]


@pytest.mark.parametrize(("check", "tensor", "fine"), CHECKS)
def test_what_the_vision_encoder_and_sam_save_is_compared(
    check: Callable, tensor: torch.Tensor, fine: bool
) -> None:
    assert check(tensor) is fine


SAMS: dict[str, tuple[torch.Tensor, bool]] = {
    "pixel_mean": (torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1), True),
    "pixel_std": (torch.ones(3, 1, 1), False),
    "image_encoder.norm_head.weight": (torch.ones(4), True),
}


@pytest.mark.parametrize("name", SAMS)
def test_what_a_sam_saves_beside_its_weights(name: str, tmp_path: Path) -> None:
    tensor, fine = SAMS[name]
    save_file({**small_state(), name: tensor.contiguous()}, tmp_path / "sam.safetensors")
    if fine:
        report = build_engine(tmp_path / "sam.safetensors", tmp_path / "e", FLOAT)
        assert [row["names"] for row in report["unused_tensors"]] == [[name]]
        return
    with pytest.raises(AcceptanceError, match=f"may matter: {name}"):
        build_engine(tmp_path / "sam.safetensors", tmp_path / "e", FLOAT)


def test_what_the_vision_encoder_leaves_unused_is_named(tmp_path: Path, shared: Path) -> None:
    """The published files hold halves that this model does without; each is named, and nothing else
    is left.
    """
    folder = write_checkpoint(tmp_path / "files", shared)
    reference = MiniGpt4VisionReference(open_checkpoint(folder))
    picture = torch.zeros(reference.image_size, reference.image_size, 3, dtype=torch.uint8)
    for _ in reference.encoder_stages(reference.normalize_image(picture)):
        pass
    rows = unused_tensors.explain_unused_vision_tensors(reference)
    assert rows
    assert all(row["ok"] for row in rows)
    reference.source._names |= {"visual_encoder.blocks.0.attn.unheard_of"}
    bad = [row for row in unused_tensors.explain_unused_vision_tensors(reference) if not row["ok"]]
    assert [row["names"] for row in bad] == [["visual_encoder.blocks.0.attn.unheard_of"]]
