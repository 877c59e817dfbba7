"""The acceptance driver: what it reports, that it repeats itself, and what it judges with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept import run
from modelmill.accept.run import NUM_SEQUENCES, acceptance_token_ids, compare_engine
from modelmill.artifact.store import open_artifact
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import RunConfig
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept, save_tiny
from tests.accept.planted_faults import page_lost_before_decoding

ROW = {"name", "max_abs", "mean_abs", "median_abs", "max_rel", "cosine", "tolerance"}


@pytest.fixture(scope="module")
def built_engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("built")
    checkpoint = save_tiny("llama", root / "hf")
    report, _ = build_and_accept(checkpoint, root / "e", "float32", "none")
    return checkpoint, root / "e", report


def test_the_report_has_what_scripts_rely_on(
    built_engine: tuple[Path, Path, dict[str, Any]],
) -> None:
    _, engine, report = built_engine
    assert report["accepted"] is True
    assert (report["verdict"], report["layer"], report["module"]) == (
        "rounding differences only",
        None,
        None,
    )
    assert all(set(row) >= ROW for row in report["layers"])
    assert report["logits"]["decoded"] > 0
    # stored in the engine, and JSON through and through
    assert open_artifact(engine).acceptance_report() == json.loads(json.dumps(report))


def test_every_module_of_every_layer_is_judged(
    built_engine: tuple[Path, Path, dict[str, Any]],
) -> None:
    judged_modules = {row["name"] for row in built_engine[2]["layers"]}
    for layer in range(3):
        inner = ("attn_norm", "attn_norm.eps", "attn.q_proj", "attn.k_proj", "attn.v_proj",
            "attn.rope_cache.q",
                 "attn.rope_cache.k", "attn.rope_cache.v", "attn.core", "attn.o_proj",
                 "attn.residual", "mlp_norm",
                 "mlp_norm.eps", "mlp.gate_proj", "mlp.up_proj", "mlp.act", "mlp.down_proj",
                 "output")  # fmt: skip
        assert {f"layers.{layer}.{name}" for name in inner} <= judged_modules
        assert f"layers.{layer}" in judged_modules, "the layer as a whole"
    assert {"embed", "norm", "norm.eps", "head"} <= judged_modules


def test_two_judgements_are_equal(built_engine: tuple[Path, Path, dict[str, Any]]) -> None:
    checkpoint, engine, report = built_engine
    again = EngineCore.open(engine, RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    assert again.artifact is not None
    second = compare_engine(
        again, open_checkpoint(checkpoint), acceptance_token_ids(again.artifact)
    )
    assert second == report


def test_progress_is_reported(built_engine: tuple[Path, Path, dict[str, Any]]) -> None:
    checkpoint, engine, _ = built_engine
    updates: list[tuple[str, int, int]] = []
    loop = EngineCore.open(engine, RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    assert loop.artifact is not None
    compare_engine(
        loop,
        open_checkpoint(checkpoint),
        [list(range(20))],
        on_progress=lambda *a: updates.append(a),
    )
    assert list(dict.fromkeys(stage.removeprefix("acceptance: ") for stage, _, _ in updates)) == [
        "modules of layers", "wiring", "norms", "sequences", "done",
    ]  # fmt: skip
    depth = len(loop.model_runner.model.layers)  # type: ignore[arg-type]
    assert [each[1:] for each in updates if "modules" in each[0]] == [
        (layer, depth) for layer in range(depth)
    ]


def test_ids_without_a_tokenizer_are_seeded(
    built_engine: tuple[Path, Path, dict[str, Any]],
) -> None:
    artifact = open_artifact(built_engine[1])
    ids = acceptance_token_ids(artifact)
    assert ids == acceptance_token_ids(artifact)
    assert [len(one) for one in ids] == [run.SEQUENCE_LENGTH] * NUM_SEQUENCES
    assert all(0 <= id < 160 for one in ids for id in one)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_contexts_are_judged_too(
    built_engine: tuple[Path, Path, dict[str, Any]], tmp_path: Path, length: int
) -> None:
    report, written = build_and_accept(
        built_engine[0], tmp_path / "e", "float32", "none", max_model_len=length
    )
    assert written, report.get("refusal")


def compare_again(built_engine: tuple[Path, Path, dict[str, Any]]) -> dict[str, Any]:
    """The report of an engine that is opened anew."""
    loop = EngineCore.open(built_engine[1], RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    assert loop.artifact is not None
    return compare_engine(
        loop, open_checkpoint(built_engine[0]), acceptance_token_ids(loop.artifact)
    )


def test_what_connects_the_modules_is_judged(
    built_engine: tuple[Path, Path, dict[str, Any]], monkeypatch: Any
) -> None:
    """Every module is right alone, but a layer reads its branch twice: the layer is named."""
    from modelmill.nn.pre_norm import PreNormLayer

    real_forward = PreNormLayer.forward

    def doubled(self: Any, x: Any, residual: Any, rope: Any, step: Any) -> Any:
        branch, residual = real_forward(self, x, residual, rope, step)
        return (
            branch * 2 if step.kv.k[2] is step.kv.k[self.attn.core.cache_index] else branch
        ), residual

    monkeypatch.setattr(PreNormLayer, "forward", doubled)
    report = compare_again(built_engine)
    assert not report["accepted"]
    assert (report["layer"], report["module"]) == (2, "layer")


def test_a_fault_of_the_fused_layers_alone_is_found(
    built_engine: tuple[Path, Path, dict[str, Any]], monkeypatch: Any
) -> None:
    """Hooks see the plain modules; what only the fused ones do wrong shows in the sequences."""
    from modelmill.nn.fusion import FusedDecoderLayer

    forward = FusedDecoderLayer.forward

    def doubled(self: Any, x: Any, residual: Any, *args: Any) -> Any:
        branch, residual = forward(self, x, residual, *args)
        return branch if branch is None else branch * 2, residual

    monkeypatch.setattr(FusedDecoderLayer, "forward", doubled)
    report = compare_again(built_engine)
    assert not report["accepted"]


def test_a_fault_of_decode_alone_is_found(built_engine: tuple[Path, Path, dict[str, Any]]) -> None:
    """Modules see prefill only; what goes wrong with one token at a time shows in the sequences."""
    with page_lost_before_decoding():
        loop = EngineCore.open(built_engine[1], RunConfig(device="cpu", kv_cache_bytes=1 << 22))
        assert loop.artifact is not None
        report = compare_engine(
            loop, open_checkpoint(built_engine[0]), acceptance_token_ids(loop.artifact)
        )
    assert not report["accepted"]
    assert report["module"] is None
    assert "between the modules" in report["verdict"]


def test_nan_in_the_engine_is_refused(
    built_engine: tuple[Path, Path, dict[str, Any]], monkeypatch: Any
) -> None:
    loop = EngineCore.open(built_engine[1], RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    assert loop.artifact is not None
    norm = loop.model.get_submodule("layers.1.mlp_norm")
    norm.weight = torch.full_like(norm.weight, float("nan"))
    report = compare_engine(
        loop, open_checkpoint(built_engine[0]), acceptance_token_ids(loop.artifact)
    )
    assert (report["layer"], report["module"]) == (1, "mlp_norm")
    json.dumps(report, allow_nan=False)


def test_accept_takes_the_kernels_of_the_build(tmp_path: Path) -> None:
    checkpoint = save_tiny("llama", tmp_path / "hf")
    report, written = build_and_accept(
        checkpoint, tmp_path / "e", "float32", "none", kernels={"linear": "torch"}
    )
    assert written
    assert report["kernels"]["linear"] == "torch"


@pytest.mark.parametrize(("dtype", "recipe"), [("float32", "none"), ("bfloat16", "int8")])
def test_the_eps_of_a_head_norm_is_judged(
    tmp_path: Path, monkeypatch: Any, dtype: str, recipe: str
) -> None:
    """Qwen3 norms each head inside the rotation: an eps that is lost on the way there is named."""
    from modelmill.nn.decoder import DecoderConfig

    checkpoint = save_tiny("qwen3", tmp_path / "hf")
    real_spec = DecoderConfig.attention_spec
    monkeypatch.setattr(
        DecoderConfig,
        "attention_spec",
        lambda self, i: replace(real_spec(self, i), eps=self.eps * 10),
    )
    report, written = build_and_accept(checkpoint, tmp_path / "e", dtype, recipe)
    assert not written
    assert (report["layer"], report["module"]) in {
        (0, "attn.rope_cache.eps"),
        (0, "attn.rope_cache.q"),
    }
