"""Writes a family's Hugging Face folder as a GGUF, as llama.cpp's converter does, and checks it.

Who imports it skips where the package gguf is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.artifact.store import open_artifact
from modelmill.core.config import RunConfig
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept
from tests.checkpoint.checkpoint_factory import permute
from tests.models.all_families import CASES
from tests.models.family_cases import FamilyCase, GgufCase

FUSED = "query_key_value"
GPT2_KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "intermediate_size": "n_inner",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
}  # fmt: skip
ALIKE_NAMES = {"granite_swa": "granite"}
"""Architectures that the package gguf does not know → one with the same names of tensors."""
QK = ("q_proj", "k_proj", "attention.wq.", "attention.wk.")


def ungrouped(rows: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """The converter's order of q, k and v that are stored by KV head: all q, all k, all v."""
    parts = rows.reshape(kv_heads, heads // kv_heads + 2, -1, *rows.shape[1:])
    split = parts[:, :-2], parts[:, -2], parts[:, -1]
    return torch.cat([each.reshape(-1, *rows.shape[1:]) for each in split])


def write_gguf(
    path: Path, folder: Path, raw: dict[str, Any], case: GgufCase, *, quantized: bool = False
) -> None:
    """Convert a Hugging Face folder; quantized: matrices of layers in Q8_0."""
    raw = {**{name: raw[older] for name, older in GPT2_KEYS.items() if older in raw}, **raw}
    layers = raw.get("num_hidden_layers", raw.get("num_layers"))
    names = tensor_names(case.architecture, case.facts(raw).get("block_count", layers))
    tensors = load_file(folder / "model.safetensors")
    numbers = {} if case.numbers is None else case.numbers(tensors)
    if case.tensors is not None:
        tensors = case.tensors(raw, tensors)
    heads = raw.get("num_attention_heads", 0)
    kv_heads = raw.get("num_key_value_heads", raw.get("num_kv_heads", heads))
    writer = gguf.GGUFWriter(str(path), case.architecture)
    facts = {
        "block_count": layers, "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw.get("intermediate_size", 0), "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "context_length": raw.get("max_position_embeddings"),
        "rope.freq_base": float(raw.get("rope_theta", 10000.0)), **case.facts(raw),
    }  # fmt: skip
    add_facts(writer, facts)
    for key, values in numbers.items():
        writer.add_array(key, values)
    for name, tensor in tensors.items():
        if case.permuted and any(part in name for part in QK):
            is_query = "q_proj" in name or "attention.wq." in name
            tensor = torch.from_numpy(permute(tensor.numpy(), heads if is_query else kv_heads))
        if case.grouped and FUSED in name:
            tensor = ungrouped(tensor, heads, kv_heads)
        plain = name.removeprefix("transformer.")  # as the converter does for ChatGLM
        if name.startswith(("blk.", "rope_f", "token_embd.", "output")):  # named by the case
            add_tensor(writer, name, tensor, quantized=quantized)
            continue
        target = names(name) or names(plain)
        assert target is not None, name
        add_tensor(writer, target, tensor, quantized=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_facts(writer: Any, facts: Mapping[str, Any]) -> None:
    """Add an architecture's keys; None: one that it has not."""
    for key, value in facts.items():
        if value is None:
            continue
        add: Any = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add = writer.add_bool if isinstance(value, bool) else add
        add = writer.add_string if isinstance(value, str) else add
        add = writer.add_array if isinstance(value, list) else add
        add(f"{writer.arch}.{key}", value)


def tensor_names(architecture: str, layers: int) -> Callable[[str], str | None]:
    """GGUF's name of a tensor by the package gguf, which does not know the newest architectures."""
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = ALIKE_NAMES.get(architecture, architecture)
    if architecture not in known:
        return lambda name: None
    names = gguf.get_tensor_name_map(known[architecture], layers)
    return lambda name: names.get_name(name, try_suffixes=(".weight", ".bias"))


def add_tensor(writer: Any, name: str, tensor: torch.Tensor, *, quantized: bool) -> None:
    """Add a tensor in float32, or in Q8_0 a matrix of a layer."""
    values, q8 = tensor.float().numpy(), gguf.GGMLQuantizationType.Q8_0
    floats = ("gate_inp", "exp_probs_b", "ssm_a", "ssm_d", "conv1d", "norm")
    in_float = any(part in name for part in floats)
    if quantized and name.startswith("blk.") and values.ndim > 1 and not in_float:
        writer.add_tensor(name, gguf.quants.quantize(values, q8), raw_dtype=q8)
    else:
        writer.add_tensor(name, values)


def check_gguf(case: FamilyCase, tmp_path: Path) -> None:
    """Build the GGUF of a case through acceptance, and compare the logits."""
    assert case.gguf is not None
    logits = case.save(tmp_path / "hf", **case.gguf.changes)
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path / "hf", case.raw(**case.gguf.changes), case.gguf)
    report, written = build_and_accept(path, tmp_path / "e", "float32", "none")
    assert written, report.get("reason", report)
    engine = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 28))
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(2, case.base["vocab_size"], (40,), generator=draw).tolist()
    assert (TeacherForcedScorer(engine).compute_logits([ids])[0] - logits(ids)).abs().max() < 1e-4


def check_gguf_with(case: FamilyCase, changed: dict[str, Any], tmp_path: Path) -> None:
    """Check the GGUF of a case with keys changed or added."""
    assert case.gguf is not None
    facts = case.gguf.facts
    own = replace(case.gguf, facts=lambda raw: {**facts(raw), **changed})
    check_gguf(replace(case, gguf=own), tmp_path)


def kept_integers(case: FamilyCase, sizes: dict[str, Any], folder: Path) -> set[str]:
    """Linears that an accepted engine of the case's quantized GGUF keeps as integers."""
    assert case.gguf is not None
    case.save(folder / "hf", **sizes)
    path = folder / "model.gguf"
    write_gguf(path, folder / "hf", case.raw(**sizes), case.gguf, quantized=True)
    report, written = build_and_accept(path, folder / "e", "float32", "keep")
    assert written, report.get("reason", report)
    formats = open_artifact(folder / "e").manifest.weight_formats
    return {name for name, each in formats.items() if each != "dense"}


def write_broken(name: str, facts: dict[str, Any], folder: Path) -> Path:
    """Write a family's GGUF with these keys changed or added."""
    case = CASES[name]
    assert case.gguf is not None
    own_facts, raw = case.gguf.facts, case.raw(**case.gguf.changes)
    case.save(folder / "hf", **case.gguf.changes)
    broken = replace(case.gguf, facts=lambda raw: {**own_facts(raw), **facts})
    write_gguf(folder / "model.gguf", folder / "hf", raw, broken)
    return folder / "model.gguf"


def with_changes(name: str, changes: dict[str, Any]) -> FamilyCase:
    """A family whose GGUF has another config."""
    case = CASES[name]
    assert case.gguf is not None
    changes = {**case.gguf.changes, **changes}
    return replace(case, gguf=replace(case.gguf, changes=changes))
