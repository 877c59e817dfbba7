"""Latent attention however a prompt is cut into steps, and behind a prefix in the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelmill.nn.latent_attention import LatentAttentionCore
from modelmill.runtime.batch import PackedBatch
from tests.models.families.deepseek_v3 import CASE
from tests.models.saved_family import Saved, compare, drawn_ids
from tests.runtime import tiny

VOCAB = 96


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(CASE, tmp_path_factory.mktemp("deepseek_v3"), vocab_size=VOCAB)


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step whose prompts were expanded, once for a layer."""
    counts: list[int] = []
    attend = LatentAttentionCore.attend_expanded

    def counted(self: LatentAttentionCore, q: torch.Tensor, *args: Any) -> torch.Tensor:
        counts.append(len(q))
        return attend(self, q, *args)

    monkeypatch.setattr(LatentAttentionCore, "attend_expanded", counted)
    return counts


@pytest.mark.parametrize("tokens", [7, 80, 256])
def test_logits_are_those_of_transformers(tokens: int, saved: Saved, expanded: list[int]) -> None:
    """Prompts are expanded, later chunks where they are long beside their history."""
    compare(saved.open(max_num_batched_tokens=tokens), saved.logits, drawn_ids(VOCAB))
    assert max(expanded) <= tokens
    assert (111 in expanded) is (tokens == 256), "1 + 7 + 33 + 70 tokens in one step"
    assert (31 in expanded) is (tokens == 80), "the last of 70 tokens, behind 39"


def test_a_warm_prefix_gives_the_ids_of_a_cold_one(saved: Saved, expanded: list[int]) -> None:
    prompt = tuple(drawn_ids(VOCAB, (60,))[0])
    requests = tiny.requests([prompt, prompt[:50] + prompt[:9]], tiny.params(max_tokens=16))
    cold = [tiny.run(saved.open(), [each]) for each in requests]
    warm = saved.open()
    assert tiny.run(warm, requests[:1]) == cold[0]
    assert tiny.run(warm, requests[1:]) == cold[1]
    assert tiny.run(warm, requests[:1]) == cold[0]
    assert warm.stats().cached_tokens > 0
    assert expanded


def test_after_an_out_of_memory_error_fewer_keys_are_expanded(saved: Saved) -> None:
    """A step of half the tokens would expand as many keys of a history."""
    first = tuple(drawn_ids(VOCAB, (70,))[0])
    second = first[:32] + first[:48]
    requests = tiny.requests([first, second], tiny.params(max_tokens=3))
    engine = saved.open(max_num_batched_tokens=80)
    expected = [tiny.run(saved.open(), [each]) for each in requests]
    assert tiny.run(engine, requests[:1]) == expected[0]
    forward, failed = engine.model_runner.forward, []

    def limited(batch: PackedBatch) -> torch.Tensor:
        if batch.num_prompt_keys > 40:
            failed.append(batch.num_prompt_keys)
            raise MemoryError
        return forward(batch)

    engine.model_runner.forward = limited  # type: ignore[method-assign]
    assert tiny.run(engine, requests[1:]) == expected[1]
    assert failed == [80]
