"""The report tells of every matrix what rounding did to it, where nothing was calibrated, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.quantization_error import layer_matrix_quantization_errors
from modelmill.accept.quantized_reference import dequantize_engine_layer_weights
from modelmill.accept.reference import open_reference
from modelmill.artifact.store import open_artifact
from modelmill.checkpoint.open import open_checkpoint
from modelmill.loader.model_loader import load_model
from tests.accept.build_and_accept import build_and_accept, save_tiny

BITS = {"int8": 8, "int4": 4, "fp8": 8}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.mark.parametrize("recipe", BITS)
def test_every_quantized_matrix_has_its_errors_bits_and_outliers(
    recipe: str, llama: Path, tmp_path: Path
) -> None:
    method = {} if recipe == "int8" else {"method": "nearest"}
    report, written = build_and_accept(llama, tmp_path / "e", "float32", recipe, **method)
    assert written, report["reason"]
    errors = report["quantization_errors"]
    modules = ("attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert [(row["layer"], row["module"]) for row in errors] == [
        (i, name) for i in range(3) for name in modules
    ]
    for row in errors:
        assert 0 < row["before"] == row["after"] < 0.5
        assert BITS[recipe] < row["bits"] < BITS[recipe] + 3
        assert [times for _, times in row["outliers"]] == sorted(
            (t for _, t in row["outliers"]), reverse=True
        )
    assert 0 < report["logits"]["agreement"] <= 1
    assert report["logits"]["mean_kl"] > 0


def test_an_engine_as_it_is_has_nothing_to_tell(llama: Path, tmp_path: Path) -> None:
    report, _ = build_and_accept(llama, tmp_path / "e", "float32", "none")
    assert report["quantization_errors"] == []
    assert report["logits"]["agreement"] == 1.0


def test_the_error_is_that_of_the_outputs(llama: Path, tmp_path: Path) -> None:
    """Of the first matrix, by hand: what reads the norm of the embeddings."""
    build_and_accept(llama, tmp_path / "e", "float32", "int8")
    artifact = open_artifact(tmp_path / "e")
    reference, model = open_reference(open_checkpoint(llama)), load_model(artifact, "cpu")
    ids = list(range(3, 40))
    plain, stream = reference.layer_weights(0), reference.embed(torch.tensor(ids))
    trace, stored_by_name = (
        reference.run_layer(0, plain, stream, len(ids)),
        dict(dequantize_engine_layer_weights(model, 0, plain)),
    )
    row: dict[str, Any] = next(
        layer_matrix_quantization_errors(
            0, plain, stored_by_name, trace, model, artifact.manifest.weight_formats
        )
    )
    x = reference.run_norm(0, "input_norm", reference.embed(torch.tensor(ids))).double()
    weights = reference.layer_weights(0)
    expected = torch.cat([weights[name].weight for name in ("q", "k", "v")]).double()
    stored = model.layers[0].attn.qkv_proj.weight.dequantize().double()  # type: ignore[union-attr, index]
    assert row["after"] == pytest.approx(
        float((x @ (stored - expected).T).norm() / (x @ expected.T).norm()), rel=5e-3
    )
    peak = x.abs().amax(0)
    assert row["outliers"][0][0] == int(peak.argmax())
    assert row["outliers"][0][1] == pytest.approx(float(peak.max() / peak.median()), rel=5e-3)
