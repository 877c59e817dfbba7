"""Embeddings of prompts: the pooled states, however the work is cut and whatever runs beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from modelmill.core.errors import RequestError
from modelmill.core.types import (
    LAST_TOKEN_POOLING,
    MEAN_POOLING,
    FinishReason,
    Request,
    SamplingParams,
    TokenOutput,
)
from modelmill.nn.decoder import Decoder
from modelmill.nn.kv import KVCache
from modelmill.nn.step import Step
from modelmill.ops.registry import select_backends
from modelmill.runtime.engine_core import EngineCore
from tests.runtime import tiny

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def truth(model: Decoder, ids: tuple[int, ...]) -> torch.Tensor:
    """What the head reads of one sequence, [T, H]: watched in a single step without scheduler and
    packer.
    """
    n = len(ids)
    pages = -(-n // 8)
    step = Step(
        ids=torch.tensor(ids),
        positions=torch.arange(n),
        slots=torch.arange(n),
        rope_frequency_ids=torch.full((n,), model.rope_frequency_id(n)),
        block_tables=torch.arange(pages, dtype=torch.int32)[None],
        query_start=torch.tensor([0, n], dtype=torch.int32),
        context_lens=torch.tensor([n], dtype=torch.int32),
        logit_rows=None,
        max_query=n,
        max_context=n,
        kv=KVCache.allocate(model.kv, pages, 8, torch.float32, "cpu"),
        ops=select_backends(
            "cpu", dict.fromkeys(("linear", "paged_attention", "rope_cache"), "torch")
        ),
    )
    read: list[torch.Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, args: read.append(args[0].clone()))
    try:
        with torch.inference_mode():
            model(step)
    finally:
        hook.remove()
    return read[0]


def embedding_requests(prompts: list[tuple[int, ...]], pooling: str) -> list[Request]:
    params = tiny.params(max_tokens=0)
    return [
        Request(id=f"{pooling}{i}", prompt=p, params=params, pooling=pooling)
        for i, p in enumerate(prompts)
    ]


def vectors(events: list[TokenOutput]) -> dict[str, np.ndarray]:
    """By request; each comes once, with the end."""
    by_request: dict[str, np.ndarray] = {}
    for event in events:
        if event.embedding is not None:
            assert event.finish_reason is FinishReason.LENGTH
            assert event.token_id is None
            assert event.request_id not in by_request
            by_request[event.request_id] = np.frombuffer(event.embedding, dtype="<f4")
    return by_request


def run(loop: EngineCore, requests: list[Request]) -> dict[str, np.ndarray]:
    for request in requests:
        loop.add(request)
    result = vectors(tiny.drain(loop))
    tiny.assert_idle(loop)
    return result


@pytest.mark.parametrize("rope_length_source", ["fixed", "prompt", "running"])
def test_equal_however_it_is_cut(rope_length_source: str) -> None:
    model = tiny.decoder(rope_length_source)
    prompts = tiny.prompts(9, 1, 60)
    todo = [
        *embedding_requests(prompts, MEAN_POOLING),
        *embedding_requests(prompts, LAST_TOKEN_POOLING),
    ]
    expected = {}
    for i, prompt in enumerate(prompts):
        states = truth(model, prompt)
        expected |= {
            f"{MEAN_POOLING}{i}": states.mean(0).numpy(),
            f"{LAST_TOKEN_POOLING}{i}": states[-1].numpy(),
        }

    def assert_equal(actual: dict[str, np.ndarray], label: str) -> None:
        assert actual.keys() == expected.keys(), label
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, **CLOSE, err_msg=f"{label}: {name}")

    together = tiny.make_engine(model)
    assert_equal(run(together, todo), "together")
    assert_equal(run(together, todo), "prefix cache warm")
    assert together.stats().cached_tokens > 0, "the last state may come from cached pages"
    assert_equal(run(tiny.make_engine(model, max_num_batched_tokens=7), todo), "chunked")
    assert_equal(
        run(tiny.make_engine(model, max_num_batched_tokens=7, overlap=True), todo),
        "chunked, launched ahead",
    )
    small = tiny.make_engine(model, pages=12, max_num_batched_tokens=16)
    for request in tiny.requests(tiny.prompts(6, 8, 20, seed=1), tiny.params(max_tokens=40)):
        small.add(request)
    for request in todo:
        small.add(replace(request, id="small " + request.id))
    actual = vectors(tiny.drain(small))
    assert small.stats().preemptions > 0
    assert_equal(
        {name.removeprefix("small "): value for name, value in actual.items()},
        "preempted, beside answers",
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_beside_it_do_not_change(overlap: bool) -> None:
    model = tiny.decoder()
    params_list = [
        tiny.params(max_tokens=20),
        tiny.params(max_tokens=9, temperature=0.9, seed=4, n=3),
    ]
    params_list += [
        tiny.params(max_tokens=8, prompt_logprobs=1, logprobs=1),
        tiny.params(max_tokens=8, num_beams=3),
    ]
    todo = [
        Request(id=str(i), prompt=p, params=options, eos_ids=(tiny.EOS,))
        for i, (p, options) in enumerate(zip(tiny.prompts(4, 5, 50), params_list))
    ]
    expected = tiny.run(tiny.make_engine(model, max_num_batched_tokens=20, overlap=overlap), todo)
    mixed = tiny.make_engine(model, max_num_batched_tokens=20, overlap=overlap)
    for request in [*todo, *embedding_requests(tiny.prompts(5, 1, 60, seed=2), MEAN_POOLING)]:
        mixed.add(request)
    events = tiny.drain(mixed)
    actual = {
        key: ids
        for key, ids in tiny.output_ids(events).items()
        if not key[0].startswith(MEAN_POOLING)
    }
    assert actual == expected
    assert len(vectors(events)) == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_without_an_answer_is_read_to_its_end(overlap: bool) -> None:
    """A chunk that is launched ahead has not been read when the one before it is."""
    (prompt,) = tiny.prompts(1, 60, 60)
    options = tiny.params(max_tokens=0, prompt_logprobs=0)
    loop = tiny.make_engine(max_num_batched_tokens=7, overlap=overlap)
    loop.add(Request(id="x", prompt=prompt, params=options))
    computed = []
    while loop.has_work:
        # read at this event, as a server does
        computed += [
            len(event.prompt_logprobs or ())
            for event in loop.step()
            if event.finish_reason is not None
        ]
    assert computed == [60]
    tiny.assert_idle(loop)


def test_an_abort_in_the_middle_leaves_nothing() -> None:
    loop = tiny.make_engine(max_num_batched_tokens=7)
    for request in embedding_requests(tiny.prompts(3, 40, 60), MEAN_POOLING):
        loop.add(request)
    loop.step()
    loop.abort(f"{MEAN_POOLING}0")
    assert set(vectors(tiny.drain(loop))) == {f"{MEAN_POOLING}1", f"{MEAN_POOLING}2"}
    tiny.assert_idle(loop)


@pytest.mark.parametrize(
    ("params", "pooling"),
    [
        (SamplingParams(max_tokens=1), MEAN_POOLING),
        (SamplingParams(max_tokens=None), LAST_TOKEN_POOLING),
        (SamplingParams(max_tokens=0, n=2), MEAN_POOLING),
        (SamplingParams(max_tokens=0, num_beams=2), MEAN_POOLING),
        (SamplingParams(max_tokens=0), "median"),
    ],
)
def test_refusals(params: SamplingParams, pooling: str) -> None:
    with pytest.raises(RequestError):
        tiny.make_engine().add(Request(id="x", prompt=(2, 3), params=params, pooling=pooling))
