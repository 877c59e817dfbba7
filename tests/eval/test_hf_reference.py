"""transformers' model of any checkpoint: the same logits however its tensors came."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.errors import TensorMismatch, UnknownArchitecture
from modelmill.eval.hf_reference import HfReference, load_reference

IDS = [1, 403, 407, 261, 378, 432, 383]


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return shared / "data/models/stories260K"


@pytest.fixture(scope="module")
def reference(folder: Path) -> HfReference:
    return load_reference(open_checkpoint(folder))


def test_copied_and_loaded_models_are_the_same(folder: Path, reference: HfReference) -> None:
    # a single file goes through the copying way, as a GGUF does
    copied = load_reference(open_checkpoint(folder / "model.safetensors"))
    assert torch.equal(copied.logits(IDS), reference.logits(IDS))


def test_scores_are_the_logits_log_softmax(reference: HfReference) -> None:
    logits = reference.logits(IDS)
    assert logits.shape == (len(IDS), 512)
    chances = logits.log_softmax(-1)
    expected = [float(chances[i, token]) for i, token in enumerate(IDS[1:])]
    assert next(iter(reference.score([IDS]))) == pytest.approx(expected, abs=1e-5)


def test_generation_is_greedy_padded_and_timed(reference: HfReference) -> None:
    alone, times = reference.generate([IDS], 8)
    assert len(alone[0]) == len(times) == 8
    ids = list(IDS)
    for token in alone[0]:
        assert token == int(reference.logits(ids)[-1].argmax())
        ids.append(token)
    batch, _ = reference.generate([IDS, IDS[:3]], 8)
    assert batch[0] == alone[0]
    assert times == sorted(times)


def test_an_answer_holds_the_token_that_ended_it(reference: HfReference) -> None:
    free, _ = reference.generate([IDS], 8)
    stop = free[0][3]
    ended, _ = reference.generate([IDS], 8, [stop])
    assert ended[0] == free[0][: free[0].index(stop) + 1]


def test_what_transformers_cannot_compute_is_reported(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UnknownArchitecture, match="'qwen'"):
        load_reference(replace(checkpoint, config={**checkpoint.config, "model_type": "qwen"}))


def test_missing_tensors_are_named(folder: Path) -> None:
    checkpoint = open_checkpoint(folder / "model.safetensors")
    wider = replace(checkpoint, config={**checkpoint.config, "num_hidden_layers": 6})
    with pytest.raises(TensorMismatch, match=r"layers\.5"):
        load_reference(wider)
    other = replace(checkpoint, config={**checkpoint.config, "intermediate_size": 96})
    with pytest.raises(TensorMismatch, match="shape"):
        load_reference(other)
