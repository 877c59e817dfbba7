"""Leaving out the last layer's unwanted rows changes no logits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.types import Request
from modelmill.nn.fusion import fuse_model
from modelmill.nn.kv import KVCache
from modelmill.nn.step import MIN_TOKENS_PER_LOGIT_ROW_TO_PRUNE, Step
from modelmill.ops.registry import select_backends
from tests.hypothesis_examples import examples
from tests.runtime import tiny

REFERENCE = dict.fromkeys(("linear", "paged_attention", "rope_cache", "decode"), "torch")


def step_of(
    model, lengths: list[tuple[int, int]], rows: list[int], seed: int, kernels: dict[str, str]
) -> Step:
    """Sequences of (new tokens, context) each, with histories already in the cache, pages in any
    order.
    """
    draw = random.Random(seed)
    size = 8
    counts = [-(-context // size) for _, context in lengths]
    order = list(range(sum(counts)))
    draw.shuffle(order)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    positions, slots = [], []
    for b, (new, context) in enumerate(lengths):
        pages, order = order[: counts[b]], order[counts[b] :]
        tables[b, : counts[b]] = torch.tensor(pages, dtype=torch.int32)
        positions += range(context - new, context)
        slots += [pages[p // size] * size + p % size for p in range(context - new, context)]
    kv = KVCache.allocate(model.kv, sum(counts), size, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for cache in (*kv.k, *kv.v):
        cache.normal_(generator=generator)
    starts = torch.tensor([n for n, _ in lengths]).cumsum(0).tolist()
    tokens = starts[-1]
    return Step(
        ids=torch.tensor([draw.randrange(5, 60) for _ in range(tokens)]),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        rope_frequency_ids=torch.zeros(tokens, dtype=torch.int64),
        block_tables=tables,
        query_start=torch.tensor([0, *starts], dtype=torch.int32),
        context_lens=torch.tensor([c for _, c in lengths], dtype=torch.int32),
        logit_rows=torch.tensor(rows),
        max_query=max(n for n, _ in lengths),
        max_context=max(c for _, c in lengths),
        kv=kv,
        ops=select_backends("cpu", kernels),
    )


@settings(deadline=None, max_examples=examples(60, 20))
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=5),
    st.data(),
    st.sampled_from([None, 12]),
    st.sampled_from([REFERENCE, {"decode": "torch"}]),
)
def test_the_logits_are_those_of_all_rows(
    drawn: list[tuple[int, int]], data: st.DataObject, window: int | None, kernels: dict[str, str]
) -> None:
    model = tiny.decoder(window=window)
    lengths = [(new, new + history) for new, history in drawn]
    tokens = sum(new for new, _ in lengths)
    rows = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=max(1, tokens // 2)))
    step = step_of(model, lengths, rows, tokens, kernels)
    narrow = step.step_of_logit_rows()
    assert (narrow is None) == (tokens < MIN_TOKENS_PER_LOGIT_ROW_TO_PRUNE * len(rows))
    actual = fuse_model(model)(step)
    all_rows = model(step)
    assert actual.shape == all_rows.shape
    torch.testing.assert_close(actual, all_rows, rtol=1e-4, atol=1e-5)


def test_the_plain_modules_compute_all_rows() -> None:
    model = tiny.decoder()
    step = step_of(model, [(9, 20)], [8], 0, REFERENCE)
    rows: list[int] = []
    handle = model.layers[-1].mlp.register_forward_hook(lambda *args: rows.append(len(args[2])))
    model(step)
    assert rows == [9]
    handle.remove()
    assert replace(step, logit_rows=None).step_of_logit_rows() is None
    narrow = step.step_of_logit_rows()
    assert narrow is not None
    assert narrow.context_lens.tolist() == [20]
    assert narrow.max_query == 1


@pytest.mark.parametrize("chunk", [7, 64])
def test_prompts_give_the_same_answers_in_one_piece_and_in_many(chunk: int) -> None:
    prompts = tiny.prompts(4, 20, 60)
    todo = [
        Request(id=str(i), prompt=p, params=tiny.params(max_tokens=6))
        for i, p in enumerate(prompts)
    ]
    assert tiny.run(tiny.make_engine(max_num_batched_tokens=chunk), todo) == tiny.run_one_by_one(
        tiny.make_engine(), todo
    )
