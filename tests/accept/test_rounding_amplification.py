"""A model that amplifies rounding: right engines of it are accepted, wrong ones are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.reference import open_reference
from modelmill.accept.rounding_amplification import measure_rounding_amplification
from modelmill.accept.tolerances import DTYPES_WITH_BOUNDS, MAX_LOGITS_BOUND, logits_bound
from modelmill.ops import gated_delta_rule, recurrence
from tests.accept.build_and_accept import build_and_accept
from tests.accept.memory_checkpoint import memory_checkpoint
from tests.accept.planted_faults import page_lost_before_decoding
from tests.accept.seeded_checkpoint import seeded_decoder
from tests.models.family_cases import save_transformers
from tests.models.planted_fault import reference_fault

# 8 values a head: a norm over so few makes large what nearly cancels
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 72,
    "max_position_embeddings": 64, "num_experts": 3, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 12,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 2,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 2000.0},
    "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
BUILDS = [("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8")]


@pytest.fixture(scope="module")
def amplifying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("amplifying")
    save_transformers(CONFIG, folder)
    return folder


@pytest.mark.parametrize(("dtype", "recipe"), BUILDS)
def test_a_right_engine_beyond_the_published_bound_is_accepted(
    amplifying: Path, tmp_path: Path, dtype: str, recipe: str
) -> None:
    report, written = build_and_accept(amplifying, tmp_path / "e", dtype, recipe)
    assert written, report["reason"]
    logits = report["logits"]
    # the published bound alone would refuse it; rounding of weights is not part of the second
    assert logits["amplification"] > 3
    assert logits["rel_l2"] > logits_bound(dtype, num_layers=3).rel_l2 or recipe == "int8"
    assert logits["rel_l2"] <= logits["bound"] <= MAX_LOGITS_BOUND


@pytest.mark.parametrize(("dtype", "recipe"), BUILDS)
def test_a_state_lost_between_steps_is_refused_there_too(
    amplifying: Path, tmp_path: Path, dtype: str, recipe: str
) -> None:
    zeros = lambda state, rows: torch.zeros_like(state[rows.slots])  # noqa: E731
    with reference_fault(gated_delta_rule, "gather_states", zeros, recurrence):
        report, written = build_and_accept(amplifying, tmp_path / "e", dtype, recipe)
    assert not written
    assert "between the modules" in report["reason"]


@pytest.mark.parametrize(("dtype", "recipe"), BUILDS)
def test_a_page_lost_before_decoding_is_refused_where_rounding_is_amplified(
    tmp_path: Path, dtype: str, recipe: str
) -> None:
    """The bound of all rows is wide there; decoded ones stand out beside the probe's."""
    types = ["linear_attention", "full_attention", "linear_attention"]
    save_transformers({**CONFIG, "layer_types": types}, tmp_path / "hf")
    with page_lost_before_decoding():
        report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", dtype, recipe)
    assert not written
    assert "between the modules" in report["reason"]


@pytest.mark.parametrize("dtype", DTYPES_WITH_BOUNDS)
@pytest.mark.parametrize("shape", ["gauss", "heavy"])
def test_a_plain_decoder_amplifies_nothing(shape: str, dtype: str) -> None:
    """So that the published bound stays what it is for such models."""
    reference = open_reference(
        memory_checkpoint(*seeded_decoder(layers=3, hidden=128, shape=shape, seed=5))
    )
    ids = torch.randint(0, 200, (48,), generator=torch.Generator().manual_seed(9)).tolist()
    bound = logits_bound(dtype, num_layers=3)
    measured = measure_rounding_amplification(reference, [(ids, 48), (ids[:20], 10)], bound.rel_l2)
    assert measured.amplification == pytest.approx(1, abs=0.05)
    assert [len(stream) for stream in measured.streams] == [48, 20]


def test_an_amplified_bound_grows_up_to_a_limit() -> None:
    bound = logits_bound("bfloat16", num_layers=2)
    assert bound.with_amplification(1.0) == bound
    assert bound.with_amplification(2.0).rel_l2 == pytest.approx(2 * bound.rel_l2)
    assert bound.with_amplification(1e6).rel_l2 == MAX_LOGITS_BOUND
    assert bound.with_amplification(2.0).margin == pytest.approx(2 * bound.margin)
