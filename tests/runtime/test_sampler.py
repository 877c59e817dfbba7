"""Penalties and filters against transformers' processors; the draw against the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.types import Request, SamplingParams
from modelmill.ops import registry
from modelmill.ops import sample as op
from modelmill.runtime.sampler import (
    Sampler,
    SamplingBatch,
    derive_seed,
    logprob_table,
    parse_logprob_row,
    splitmix64,
    uniform_random_numbers,
)
from modelmill.runtime.sequence import RopeFrequencyRule, Sequence
from tests.hypothesis_examples import examples

VOCAB = 200
OPS = registry.select_backends("cpu")


def sequence(
    prompt: list[int], answer: list[int], options: SamplingParams, eos: tuple[int, ...] = ()
) -> Sequence:
    request = Request(id="x", prompt=tuple(prompt), params=options.with_defaults({}), eos_ids=eos)
    seq = Sequence(
        request,
        0,
        0,
        RopeFrequencyRule("fixed", lambda n: 0),
        max_length=999,
        seed=(options.seed or 0) % (1 << 64),
    )
    seq.tokens += answer
    return seq


def processed(seq: Sequence, logits: torch.Tensor) -> torch.Tensor:
    """What transformers makes of one row."""
    hf = pytest.importorskip("transformers").generation.logits_process
    params = seq.request.params
    ids = torch.tensor([seq.tokens])
    steps = (
        [hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
        if params.repetition_penalty != 1
        else []
    )
    if params.min_tokens:
        steps.append(
            hf.MinNewTokensLengthLogitsProcessor(
                seq.prompt_len, params.min_tokens, list(seq.request.eos_ids), device="cpu"
            )
        )
    if not params.greedy:
        steps.append(hf.TemperatureLogitsWarper(float(params.temperature)))
        steps += [hf.TopKLogitsWarper(params.top_k)] if params.top_k else []
        steps += [hf.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        steps += [hf.MinPLogitsWarper(params.min_p)] if params.min_p else []
    for step in steps:
        logits = step(ids, logits)
    return logits


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([None, 0, 1, 5, 50, 200, 1000]),
    top_p=st.sampled_from([None, 1.0, 0.95, 0.5, 0.01, 0.0]),
    min_p=st.sampled_from([None, 0.0, 0.02, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([None, 1.0, 1.3, 0.7]),
    min_tokens=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)


@settings(deadline=None, max_examples=examples(150, 40))
@given(st.lists(params_strategy, min_size=1, max_size=5), st.integers(0, 10_000))
def test_against_transformers(params_list: list[SamplingParams], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params_list), VOCAB, generator=generator) * 3
    ids = torch.randint(0, VOCAB, (len(params_list), 12), generator=generator).tolist()
    seqs = [
        sequence(row[:7], row[7 : 7 + i % 5], sampling_inputs, (3, 9))
        for i, (row, sampling_inputs) in enumerate(zip(ids, params_list))
    ]
    sampler = Sampler(VOCAB, "cpu", OPS)
    plan = sampler.prepare_batch(seqs)
    before = logits.clone()
    changed = sampler._process_logits(logits, plan)
    sampling_inputs = brought(plan)
    left = (
        op.filtered_fixed_point_weights(
            changed, **{k: v for k, v in sampling_inputs.items() if k != "noise"}
        )
        if sampling_inputs
        else None
    )
    for i, seq in enumerate(seqs):
        want = processed(seq, logits[i : i + 1])[0]
        if seq.request.params.greedy:
            assert changed[i].argmax() == want.argmax()
            continue
        assert left is not None
        reference = want.double().softmax(-1)
        # what is less likely than 2^-40 of the likeliest token has no weight
        above = want - want.max() + 40 * math.log(2.0)
        reference[above < 0] = 0
        assert torch.equal(
            (left[i] > 0) & (above.abs() > 1e-3), (reference > 0) & (above.abs() > 1e-3)
        )
        assert torch.allclose(left[i].double() / left[i].sum(), reference, rtol=2e-5, atol=1e-11)
    first = sampler.sample(logits, plan, sampling_inputs)
    assert torch.equal(logits, before)
    for i, seq in enumerate(seqs):
        single = Sampler(VOCAB, "cpu", OPS)
        alone = single.prepare_batch([seq])
        assert single.sample(logits[i : i + 1], alone, brought(alone)).item() == first[i].item()


@pytest.mark.parametrize("top_p", [0.0, 1e-300, 1e-45])
def test_the_smallest_top_p_is_the_argmax_beside_other_rows(top_p: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[1, 150] = logits[1].max()  # of equal ones the lower id
    options = [
        SamplingParams(temperature=1.0, seed=s, top_p=top_p if s == 1 else 0.9) for s in range(3)
    ]
    plan = Sampler(VOCAB, "cpu", OPS).prepare_batch([sequence([5], [], each) for each in options])
    ids = Sampler(VOCAB, "cpu", OPS).sample(logits, plan, brought(plan))
    assert ids[1] == logits[1].argmax()


def brought(plan: SamplingBatch) -> dict[str, torch.Tensor]:
    """How the rows of a plan are drawn, as the batch would bring it."""
    return {
        name: torch.from_numpy(values) for name, values in (plan.sampling_inputs() or {}).items()
    }


def test_presence_frequency_bias_follow_the_answer_only() -> None:
    options = SamplingParams(
        temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={11: 2.0}
    )
    seq = sequence([5, 6], [7, 7, 8], options)
    sampler = Sampler(VOCAB, "cpu", OPS)
    for extra in range(3):
        want = torch.zeros(VOCAB)
        want[7], want[8], want[11] = -1.0, -0.75, 2.0 - (0.5 + 0.25 * extra) * (extra > 0)
        plan = sampler.prepare_batch([seq])
        assert torch.allclose(sampler._process_logits(torch.zeros(1, VOCAB), plan)[0], want)
        assert sampler.sample(torch.zeros(1, VOCAB), plan, {}).item() == 11
        seq.tokens.append(11)
    sampler.drop_sequence_state(seq)
    assert not sampler.token_counts._slot


def test_ties_take_the_lowest_id() -> None:
    logits = torch.zeros(2, 9)
    logits[1, [4, 6]] = 1.0
    assert registry.select_backends("cpu").argmax(logits).tolist() == [0, 4]


def test_chance_is_uniform_and_reproducible() -> None:
    seeds = np.array([0, 1, 2, 2**64 - 1] * 5000, dtype=np.uint64)
    numbers = uniform_random_numbers(seeds, np.arange(20_000))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert np.array_equal(uniform_random_numbers(seeds[10:20], np.arange(10, 20)), numbers[10:20])
    assert (
        len({derive_seed(0, i) for i in range(1000)} | {derive_seed(1, i) for i in range(1000)})
        == 2000
    )
    # the first outputs of splitmix64 from seed 0, as its authors publish them
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert splitmix64(states).tolist() == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_logprob_table() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    row = logprob_table(logits, torch.tensor([3]), 2).tolist()[0]
    by_id = parse_logprob_row(row, 2)
    want = logits.log_softmax(-1)[0]
    assert list(by_id) == [1, 2, 3]
    assert [by_id[i].rank for i in (1, 2, 3)] == [1, 2, 4]
    assert by_id[3].logprob == pytest.approx(want[3].item())
    assert list(parse_logprob_row(row, 0)) == [3]
