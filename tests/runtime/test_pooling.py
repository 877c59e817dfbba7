"""Embeddings of prompts: the pooled states, however the work is cut and whatever runs beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from modelmill.core.errors import RequestError
from modelmill.core.types import LAST, MEAN, Finish, Request, SamplingParams, Token
from modelmill.nn.decoder import Decoder
from modelmill.nn.kv import KVCache
from modelmill.nn.step import Step
from modelmill.ops.shelf import resolve
from modelmill.runtime.loop import Loop
from tests.runtime import tiny

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def truth(model: Decoder, ids: tuple[int, ...]) -> torch.Tensor:
    """What the head reads of one sequence, [T, H]: watched in a single step without scheduler and packer."""
    n = len(ids)
    pages = -(-n // 8)
    step = Step(
        ids=torch.tensor(ids),
        positions=torch.arange(n),
        slots=torch.arange(n),
        rope_keys=torch.full((n,), model.rope_key(n)),
        block_tables=torch.arange(pages, dtype=torch.int32)[None],
        query_start=torch.tensor([0, n], dtype=torch.int32),
        context_lens=torch.tensor([n], dtype=torch.int32),
        logit_rows=None,
        max_query=n,
        max_context=n,
        kv=KVCache.allocate(model.kv, pages, 8, torch.float32, "cpu"),
        ops=resolve("cpu", dict.fromkeys(("linear", "paged_attention", "rope_cache"), "torch")),
    )
    read: list[torch.Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, args: read.append(args[0].clone()))
    try:
        with torch.inference_mode():
            model(step)
    finally:
        hook.remove()
    return read[0]


def asked(prompts: list[tuple[int, ...]], pooling: str) -> list[Request]:
    params = tiny.params(max_tokens=0)
    return [Request(id=f"{pooling}{i}", prompt=p, params=params, pooling=pooling) for i, p in enumerate(prompts)]


def vectors(events: list[Token]) -> dict[str, np.ndarray]:
    """By request; each comes once, with the end."""
    found: dict[str, np.ndarray] = {}
    for event in events:
        if event.embedding is not None:
            assert event.finish is Finish.LENGTH
            assert event.id is None
            assert event.request not in found
            found[event.request] = np.frombuffer(event.embedding, dtype="<f4")
    return found


def run(loop: Loop, requests: list[Request]) -> dict[str, np.ndarray]:
    for request in requests:
        loop.add(request)
    found = vectors(tiny.drain(loop))
    tiny.idle(loop)
    return found


@pytest.mark.parametrize("kind", ["fixed", "prompt", "running"])
def test_equal_however_it_is_cut(kind: str) -> None:
    model = tiny.decoder(kind)
    prompts = tiny.prompts(9, 1, 60)
    todo = [*asked(prompts, MEAN), *asked(prompts, LAST)]
    expected = {}
    for i, prompt in enumerate(prompts):
        states = truth(model, prompt)
        expected |= {f"{MEAN}{i}": states.mean(0).numpy(), f"{LAST}{i}": states[-1].numpy()}

    def same(found: dict[str, np.ndarray], how: str) -> None:
        assert found.keys() == expected.keys(), how
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, **CLOSE, err_msg=f"{how}: {name}")

    together = tiny.loop(model)
    same(run(together, todo), "together")
    same(run(together, todo), "prefix cache warm")
    assert together.stats().cached_tokens > 0, "the last state may come from cached pages"
    same(run(tiny.loop(model, max_num_batched_tokens=7), todo), "chunked")
    same(run(tiny.loop(model, max_num_batched_tokens=7, overlap=True), todo), "chunked, launched ahead")
    small = tiny.loop(model, pages=12, max_num_batched_tokens=16)
    for request in tiny.requests(tiny.prompts(6, 8, 20, seed=1), tiny.params(max_tokens=40)):
        small.add(request)
    for request in todo:
        small.add(replace(request, id="small " + request.id))
    found = vectors(tiny.drain(small))
    assert small.stats().preemptions > 0
    same({name.removeprefix("small "): value for name, value in found.items()}, "preempted, beside answers")


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_beside_it_do_not_change(overlap: bool) -> None:
    model = tiny.decoder()
    hows = [tiny.params(max_tokens=20), tiny.params(max_tokens=9, temperature=0.9, seed=4, n=3)]
    hows += [tiny.params(max_tokens=8, prompt_logprobs=1, logprobs=1), tiny.params(max_tokens=8, num_beams=3)]
    todo = [
        Request(id=str(i), prompt=p, params=how, eos_ids=(tiny.EOS,))
        for i, (p, how) in enumerate(zip(tiny.prompts(4, 5, 50), hows))
    ]
    expected = tiny.run(tiny.loop(model, max_num_batched_tokens=20, overlap=overlap), todo)
    mixed = tiny.loop(model, max_num_batched_tokens=20, overlap=overlap)
    for request in [*todo, *asked(tiny.prompts(5, 1, 60, seed=2), MEAN)]:
        mixed.add(request)
    events = tiny.drain(mixed)
    found = {key: ids for key, ids in tiny.answers(events).items() if not key[0].startswith(MEAN)}
    assert found == expected
    assert len(vectors(events)) == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_without_an_answer_is_read_to_its_end(overlap: bool) -> None:
    """A chunk that is launched ahead has not been read when the one before it is."""
    (prompt,) = tiny.prompts(1, 60, 60)
    how = tiny.params(max_tokens=0, prompt_logprobs=0)
    loop = tiny.loop(max_num_batched_tokens=7, overlap=overlap)
    loop.add(Request(id="x", prompt=prompt, params=how))
    told = []
    while loop.has_work:
        # as it stands when it is told: a server sends it at once
        told += [len(event.prompt_logprobs or ()) for event in loop.step() if event.finish is not None]
    assert told == [60]
    tiny.idle(loop)


def test_an_abort_in_the_middle_leaves_nothing() -> None:
    loop = tiny.loop(max_num_batched_tokens=7)
    for request in asked(tiny.prompts(3, 40, 60), MEAN):
        loop.add(request)
    loop.step()
    loop.abort(f"{MEAN}0")
    assert set(vectors(tiny.drain(loop))) == {f"{MEAN}1", f"{MEAN}2"}
    tiny.idle(loop)


@pytest.mark.parametrize(
    ("params", "pooling"),
    [
        (SamplingParams(max_tokens=1), MEAN),
        (SamplingParams(max_tokens=None), LAST),
        (SamplingParams(max_tokens=0, n=2), MEAN),
        (SamplingParams(max_tokens=0, num_beams=2), MEAN),
        (SamplingParams(max_tokens=0), "median"),
    ],
)
def test_refusals(params: SamplingParams, pooling: str) -> None:
    with pytest.raises(RequestError):
        tiny.loop().add(Request(id="x", prompt=(2, 3), params=params, pooling=pooling))
