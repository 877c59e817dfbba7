"""Guided sequences: only allowed tokens on every path, and no effect on other sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from modelmill.core.errors import RequestError
from modelmill.core.types import FinishReason, Grammar, Request
from modelmill.runtime import logits_processors
from tests.runtime import tiny

GRAMMAR = Grammar("regex", "anything")


class Alternating:
    """Even tokens, then odd ones, in turn; after six, the end.

    lost: as a grammar that could not be followed.
    """

    def __init__(self, lost: bool = False) -> None:
        self.tokens: list[int] = []
        self.failed = lost

    def mask(self) -> np.ndarray:
        fine = np.zeros(8 * -(-tiny.VOCAB // 8), dtype=np.uint8)
        if len(self.tokens) < 6:
            fine[2 + len(self.tokens) % 2 : tiny.VOCAB : 2] = 1
        else:
            fine[tiny.EOS] = 1
        return np.packbits(fine, bitorder="little")

    def accept(self, token: int) -> None:
        self.tokens.append(token)


def guided(prompts: list[tuple[int, ...]], **params: object) -> list[Request]:
    return [
        replace(request, grammar=GRAMMAR)
        for request in tiny.requests(prompts, tiny.params(**params))
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0, "seed": 3}, {"n": 3, "temperature": 1.0, "min_tokens": 9}],
    ids=str,
)
@pytest.mark.parametrize("overlap", [False, True])
def test_only_what_is_allowed_and_others_are_as_ever(
    options: dict[str, object], overlap: bool
) -> None:
    prompts = tiny.prompts(12)
    plain = tiny.run(tiny.make_engine(), tiny.requests(prompts[1::2], tiny.params(max_tokens=20)))
    engine = tiny.make_engine(overlap=overlap, pages=24)
    mixed = [
        *guided(prompts[::2], max_tokens=20, **options),
        *tiny.requests(prompts[1::2], tiny.params(max_tokens=20)),
    ]
    for place, request in enumerate(mixed):
        engine.add(replace(request, id=str(place)), lambda _: Alternating())
    outputs = tiny.output_ids(tiny.drain(engine))
    tiny.assert_idle(engine)
    for (id, _), ids in outputs.items():
        if int(id) < 6:
            assert [token % 2 for token in ids] == [0, 1] * 3, ids
    assert {key: outputs[str(int(key[0]) + 6), key[1]] for key in plain} == plain
    assert engine.output_processor.num_guided == 0


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_whose_grammar_was_lost_does_not_end_as_if_it_were_whole(
    overlap: bool, lost: bool
) -> None:
    engine = tiny.make_engine(overlap=overlap)
    engine.add(guided([(2, 3)], max_tokens=20)[0], lambda _: Alternating(lost))
    last = tiny.drain(engine)[-1]
    assert last.finish_reason is (FinishReason.ERROR if lost else FinishReason.STOP)
    tiny.assert_idle(engine)


def test_without_a_maker_or_with_beams_it_is_refused() -> None:
    engine = tiny.make_engine()
    with pytest.raises(RequestError, match="structured output"):
        engine.add(guided([(2, 3)])[0])
    with pytest.raises(RequestError, match="beams"):
        engine.add(guided([(2, 3)], num_beams=2)[0], lambda _: Alternating())
    tiny.assert_idle(engine)


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 97])
def test_bits(vocab: int) -> None:
    fine = torch.rand(3, vocab) < 0.5
    packed = np.packbits(fine.numpy(), axis=1, bitorder="little")
    logits = torch.randn(3, vocab)
    masked = logits_processors.apply_token_mask(logits, torch.from_numpy(packed))
    assert torch.equal(masked, logits.masked_fill(~fine, float("-inf")))
