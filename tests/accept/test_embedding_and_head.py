"""Faults of an embedding or a quantized head that a text does not show: engines with them are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from modelmill.accept import embedding_and_head
from modelmill.accept.embedding_and_head import (
    check_embedding_tables,
    check_quantized_head,
    dequantize_row_blocks,
)
from modelmill.accept.reference import tensor_source
from modelmill.accept.run import acceptance_token_ids
from modelmill.weights import base
from tests.accept.build_and_accept import build_and_accept
from tests.accept.planted_faults import change_tensor

LENGTH = 24  # so that the text shows few of 160 ids, and few of GPT-2's 256 positions
SMALL = {
    "int4": {"method": "nearest", "group_size": 32},
    "int8": {},
    "fp8": {"method": "nearest"},
    "smoothquant": {
        "calibration_samples": 4,
        "calibration_length": 64,
        "alpha": "0.5",
        "max_layer_error": None,
    },
    "rptq": {"calibration_samples": 4, "calibration_length": 64},
}
Change = Callable[[Tensor], Tensor]


def rolled(head: Tensor) -> Tensor:
    return head.roll(1, 0)


def quiet(head: Tensor) -> Tensor:
    return head * 0.5


def rows_swapped(head: Tensor) -> Tensor:
    out = head.clone()
    out[[3, 9]] = out[[9, 3]]
    return out


@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.parametrize("change", [None, rows_swapped])
def test_a_wrong_head_is_refused(
    change: Change | None, recipe: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    with change_tensor("head.weight", change or torch.clone):
        options = SMALL[recipe] | {"quantize_head": True}
        report, written = build_and_accept(
            tiny["llama-tied"], tmp_path / "e", "float32", recipe, **options
        )
    assert written == (change is None), report["reason"]
    assert {"head.weight", "head.weight.worst_block", "embed.weight"} <= {
        row["name"] for row in report["layers"]
    }
    if change is not None:
        assert (report["layer"], report["module"]) == (None, "head"), report["reason"]
        assert "head.weight.worst_block" in {
            row["name"] for row in report["layers"] if not row["ok"]
        }


def unseen(vocab: int) -> list[int]:
    """The ids that acceptance does not read in an engine without a tokenizer."""
    manifest = SimpleNamespace(max_model_len=LENGTH, config={"vocab_size": vocab})
    made: Any = SimpleNamespace(manifest=manifest, tokenizer_files=dict)
    return sorted(set(range(vocab)) - {id for ids in acceptance_token_ids(made) for id in ids})


def all_spoiled(table: Tensor) -> Tensor:
    out, rows = table.clone(), unseen(len(table))
    out[rows] = out[rows].flip(0) * 3
    return out


def one_spoiled(table: Tensor) -> Tensor:
    out, rows = table.clone(), unseen(len(table))
    out[rows[0]] *= 1.05
    return out


def later_positions(table: Tensor) -> Tensor:
    """Those behind the length that the engine is judged at."""
    return torch.cat((table[:LENGTH], table[LENGTH:].roll(1, 0)))


@pytest.mark.parametrize(
    ("name", "dtype", "recipe", "target", "change"),
    [
        ("llama", "float32", "none", "embed.weight", all_spoiled),
        ("llama", "bfloat16", "int8", "embed.weight", all_spoiled),
        ("llama", "bfloat16", "none", "embed.weight", one_spoiled),
        ("qwen", "bfloat16", "int4", "embed.weight", one_spoiled),
        ("gpt2", "float32", "none", "embed.positions", later_positions),
        ("gpt2", "bfloat16", "int4", "embed.positions", later_positions),
    ],
)
def test_rows_that_no_text_shows_are_compared(
    name: str,
    dtype: str,
    recipe: str,
    target: str,
    change: Change,
    tiny: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    options = SMALL.get(recipe, {}) | {"max_model_len": LENGTH}
    with change_tensor(target, change):
        report, written = build_and_accept(tiny[name], tmp_path / "e", dtype, recipe, **options)
    assert not written
    assert (report["layer"], report["module"]) == (None, "embed"), report["reason"]
    wrong = {row["name"] for row in report["layers"] if not row["ok"]}
    assert f"{target}.worst_block" in wrong
    if change is not all_spoiled:
        assert wrong <= {target, f"{target}.worst_block"}, "nothing else shows it"


def test_faultless_tables_are_accepted(tiny: Mapping[str, Path], tmp_path: Path) -> None:
    report, written = build_and_accept(
        tiny["gpt2"], tmp_path / "e", "float16", "none", max_model_len=LENGTH
    )
    assert written, report["reason"]
    required_names = {
        "embed.weight",
        "embed.weight.worst_block",
        "embed.positions",
        "embed.positions.worst_block",
    }
    assert required_names <= {row["name"] for row in report["layers"]}


class Rows:
    """A reference of one matrix."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.source, self.device = matrix, self, matrix.device

    def extra_embedding_table_names(self) -> dict[str, str]:
        return {}

    def embedding_table_names(self) -> dict[str, str]:
        return {"weight": ""}

    def head_weight_name(self) -> str:
        return ""

    def shape(self, _: str) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    def row_blocks(self, _: str) -> Any:
        return self.matrix.split(tensor_source.BLOCK_ROWS)


WEIGHT_FORMATS = ("int8", "int4", "fp8", "w8a8", "rptq")


def holding(matrix: Tensor, weight_format: str) -> Any:
    head = SimpleNamespace(weight=base.pack_as_format(weight_format, matrix, torch.float32))
    return SimpleNamespace(head=head, embed=SimpleNamespace(weight=matrix))


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """[150, 48], to be walked in blocks of 64 rows."""
    monkeypatch.setattr(tensor_source, "BLOCK_ROWS", 64)
    monkeypatch.setattr(embedding_and_head, "BLOCK_ROWS", 64)
    return torch.randn(150, 48, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_a_vocabulary_is_walked_in_blocks(weight_format: str, vocabulary: Tensor) -> None:
    true: Any = Rows(vocabulary)
    model = holding(vocabulary, weight_format)
    blocks = list(dequantize_row_blocks(model.head.weight, true.device))
    assert [len(block) for block in blocks] == [64, 64, 22]
    torch.testing.assert_close(torch.cat(blocks), model.head.weight.dequantize(), rtol=0, atol=0)
    assert [
        finding.is_within_bound
        for finding in check_quantized_head(true, model, {"head": weight_format}, "float32")
    ] == [True, True]
    assert not list(check_quantized_head(true, model, {"head": "dense"}, "float32"))
    assert [
        finding.is_within_bound for finding in check_embedding_tables(true, model, "float32")
    ] == [
        True,
        True,
    ]


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("change", [rolled, quiet, rows_swapped, lambda rows: rows[:-1]])
def test_a_wrong_vocabulary_is_found(
    change: Change, weight_format: str, vocabulary: Tensor
) -> None:
    true: Any = Rows(vocabulary)
    model = holding(change(vocabulary), weight_format)
    assert not all(
        finding.is_within_bound
        for finding in check_quantized_head(true, model, {"head": weight_format}, "bfloat16")
    )
    assert not all(
        finding.is_within_bound for finding in check_embedding_tables(true, model, "bfloat16")
    )
