"""Gemma 4's GGUF in the shapes of its releases, and files that contradict themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.artifact.store import open_artifact
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.errors import CheckpointError
from tests.accept.build_and_accept import build_and_accept
from tests.models.all_families import CASES
from tests.models.family_cases import GgufCase
from tests.trust.error_lines import check_one_line

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from tests.models.family_gguf import check_gguf, write_gguf

CASE = CASES["gemma4_text"]
GGUF = CASE.gguf
assert GGUF is not None
FULL, SLIDING = "full_attention", "sliding_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "E2B": {"enable_moe_block": False, "attention_k_eq_v": False, "num_global_key_value_heads": 2},
    "26B-A4B": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "31B": {
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False,
        "final_logit_softcapping": 3.0,
    },
}  # fmt: skip


def facts_without_experts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of a file; one without experts has none of theirs."""
    assert GGUF is not None
    facts = GGUF.facts(raw)
    if not raw["enable_moe_block"]:
        facts = {key: each for key, each in facts.items() if not key.startswith("expert")}
    if raw.get("final_logit_softcapping"):
        facts["final_logit_softcapping"] = raw["final_logit_softcapping"]
    return facts


def split_experts(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up of the experts as two tensors, which llama.cpp reads as well."""
    assert GGUF is not None
    assert GGUF.tensors is not None
    out = {}
    for name, each in GGUF.tensors(raw, tensors).items():
        if name.endswith("experts.gate_up_proj.weight"):
            layer = name.removeprefix("model.layers.").partition(".")[0]
            gate, up = each.chunk(2, 1)
            out[f"blk.{layer}.ffn_gate_exps.weight"] = gate.contiguous()
            out[f"blk.{layer}.ffn_up_exps.weight"] = up.contiguous()
        else:
            out[name] = each
    return out


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_in_the_shape_of_a_release(name: str, tmp_path: Path) -> None:
    assert GGUF is not None
    own = replace(GGUF, facts=facts_without_experts, changes=SHAPES[name])
    check_gguf(replace(CASE, gguf=own), tmp_path)


def test_gate_and_up_of_experts_in_two_tensors(tmp_path: Path) -> None:
    assert GGUF is not None
    check_gguf(replace(CASE, gguf=replace(GGUF, tensors=split_experts)), tmp_path)


def test_integers_of_a_file_are_kept(tmp_path: Path) -> None:
    """Also those of the halves of an expert's matrix, and of keys that are values."""
    assert GGUF is not None
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 32,
    }  # fmt: skip
    CASE.save(tmp_path / "hf", **sizes)
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path / "hf", CASE.raw(**sizes), GGUF, quantized=True)
    report, written = build_and_accept(path, tmp_path / "e", "float32", "keep")
    assert written, report["reason"]
    formats = open_artifact(tmp_path / "e").manifest.weight_formats
    quantized = {name for name, each in formats.items() if each != "dense"}
    for part in ("attn.qkv_proj", "attn.o_proj", "experts.moe.experts.3.gate_up_proj"):
        assert f"layers.1.{part}" in quantized
    assert "layers.4.attn.q_proj" in quantized
    assert "layers.0.layer_input.gate_proj" in quantized


def changed_facts(**changes: Any) -> GgufCase:
    """A file with other keys; "_" stands for a dot, None leaves a key out."""
    assert GGUF is not None
    base = GGUF.facts

    def facts(raw: dict[str, Any]) -> dict[str, Any]:
        merged = base(raw) | changes
        return {key: each for key, each in merged.items() if each is not None}

    return replace(GGUF, facts=facts)


def changed_frequencies(values: list[float]) -> GgufCase:
    assert GGUF is not None
    base = GGUF.tensors
    assert base is not None

    def tensors(raw: dict[str, Any], read: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return base(raw, read) | {"rope_freqs.weight": torch.tensor(values)}

    return replace(GGUF, tensors=tensors)


BROKEN: dict[str, tuple[GgufCase, str]] = {
    "no pattern": (
        changed_facts(**{"attention.sliding_window_pattern": None}), "sliding_window_pattern",
    ),
    "a last layer with a window": (
        changed_facts(**{"attention.sliding_window_pattern": [True] * 6}), "last layer",
    ),
    "too few KV heads": (
        changed_facts(**{"attention.head_count_kv": [2, 1]}), "attention.head_count_kv",
    ),
    "KV heads that differ": (
        changed_facts(**{"attention.head_count_kv": [2, 1, 1, 1, 2, 1]}), "KV heads",
    ),
    "MLPs that differ": (
        changed_facts(feed_forward_length=[80, 80, 80, 90, 80, 80]), "feed_forward_length",
    ),
    "values of another length": (
        changed_facts(**{"attention.value_length": 16}), "keys as long as values",
    ),
    "fewer turned channels": (
        changed_facts(**{"rope.dimension_count_swa": 8}), "turns all",
    ),
    "scaled positions": (changed_facts(**{"rope.scaling.type": "yarn"}), "scales none"),
    "other divisors": (changed_frequencies([1.0, 2.0] + [1e30] * 14), "rope_freqs.weight"),
    "too few divisors": (changed_frequencies([1.0] * 4), "rope_freqs.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_fit_is_one_line(name: str, tmp_path: Path) -> None:
    broken, part = BROKEN[name]
    CASE.save(tmp_path / "hf")
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path / "hf", CASE.raw(), broken)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert part in check_one_line(error.value)
