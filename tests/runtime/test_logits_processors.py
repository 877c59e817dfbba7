"""Every key of generation_config that is honoured, against transformers' generate on one tiny
LLaMA.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.generation_defaults import parse_generation_config
from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import ImageEmbeddingSpan, Request, SamplingParams
from modelmill.ops import registry
from modelmill.runtime.logits_processors import banned_ngram_ids
from modelmill.runtime.sampler import Sampler
from modelmill.runtime.sequence import RopeFrequencyRule, Sequence
from tests.hypothesis_examples import examples
from tests.runtime import tiny
from tests.runtime.test_beam_search import pair  # noqa: F401 -- a fixture

EOS = (7, 11)
WORDS = [[3], [14, 15], [60], [9, 40, 33], [7]]
KEYS: dict[str, list[Any]] = {
    "no_repeat_ngram_size": [1, 2, 3],
    "encoder_no_repeat_ngram_size": [1, 2],
    "encoder_repetition_penalty": [0.6, 1.6],
    "repetition_penalty": [1.4, 0.7],
    "bad_words_ids": [WORDS, [[t] for t in range(0, 60, 2)]],
    "sequence_bias": [
        [[w, 4.0] for w in WORDS],
        [[w, -5.0] for w in WORDS],
        [[[t, 5], 9.0] for t in range(61)],
    ],
    "suppress_tokens": [list(range(30)), [40]],
    "begin_suppress_tokens": [list(range(0, 60))],
    "forced_eos_token_id": [7, [11, 7], 5],
    "forced_bos_token_id": [5],
    "exponential_decay_length_penalty": [[2, 1.5], [0, 1.1]],
    "min_new_tokens": [9],
    "min_length": [20],
    "max_length": [40],
    "max_new_tokens": [5],
}
CASES = [{key: value} for key, values in KEYS.items() for value in values] + [
    {
        "no_repeat_ngram_size": 2,
        "bad_words_ids": WORDS,
        "sequence_bias": [[[9, 4], 3.0]],
        "repetition_penalty": 1.2,
    },
    {
        "forced_eos_token_id": 7,
        "suppress_tokens": [11, 3],
        "exponential_decay_length_penalty": [1, 1.3],
    },
    {"forced_bos_token_id": 5, "begin_suppress_tokens": list(range(40)), "min_new_tokens": 6},
]


def reference_ids(
    reference: Any, prompt: tuple[int, ...], raw: dict[str, Any], **more: Any
) -> list[int]:
    limits = {} if {"max_length", "max_new_tokens"} & set(raw) else {"max_new_tokens": 14}
    config = pytest.importorskip("transformers").GenerationConfig(
        **raw, **limits, **more, eos_token_id=list(EOS), pad_token_id=0
    )
    with torch.inference_mode():
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        out = reference.generate(
            torch.tensor([prompt]), attention_mask=mask, generation_config=config
        )
    answer = out[0].tolist()[len(prompt) :]
    cut = next((i for i, t in enumerate(answer) if t in EOS), None)
    return answer if cut is None else answer[:cut]


def our_ids(engine: Any, prompt: tuple[int, ...], raw: dict[str, Any], **more: Any) -> list[int]:
    limits = {} if {"max_length", "max_new_tokens"} & set(raw) else {"max_tokens": 14}
    options = parse_generation_config(raw, "safetensors").resolve(
        SamplingParams(**limits, **more), len(prompt)
    )
    engine.add(Request(id="x", prompt=prompt, params=options, eos_ids=EOS))
    events = tiny.drain(engine)
    if options.num_beams > 1:
        return list(events[0].replayed_ids or ())
    return [e.token_id for e in events if e.token_id is not None]


def prompts() -> list[tuple[int, ...]]:
    some = [tiny.prompts(1, 3, 25, seed=seed, vocab=61)[0] for seed in range(4)]
    return [*some, (9,), (4, 9, 40, 4, 9, 40, 4, 9)]


@pytest.mark.parametrize("raw", CASES, ids=lambda raw: str(raw)[:50])
def test_greedy_answers_are_those_of_transformers(pair: Any, raw: dict[str, Any]) -> None:  # noqa: F811
    model, reference = pair
    assert parse_generation_config(raw).unused_warning() is None
    engines = [tiny.make_engine(model), tiny.make_engine(model, overlap=True)]
    for prompt in prompts():
        want = reference_ids(reference, prompt, raw)
        for engine in engines:
            assert our_ids(engine, prompt, raw) == want
            tiny.assert_idle(engine)


@pytest.mark.parametrize(
    "raw",
    [*CASES, {"renormalize_logits": True, "repetition_penalty": 1.5}],
    ids=lambda r: str(r)[:50],
)
def test_beams_are_those_of_transformers(pair: Any, raw: dict[str, Any]) -> None:  # noqa: F811
    model, reference = pair
    engine = tiny.make_engine(model)
    for prompt in prompts()[1:]:
        want = reference_ids(reference, prompt, raw, num_beams=3)
        assert our_ids(engine, prompt, raw, num_beams=3) == want


def test_each_key_changes_an_answer(pair: Any) -> None:  # noqa: F811
    """Otherwise the comparison above would say nothing."""
    model, _ = pair
    engine = tiny.make_engine(model)
    plain = [our_ids(engine, prompt, {"do_sample": False}) for prompt in prompts()]
    for raw in CASES:
        assert [our_ids(engine, prompt, raw) for prompt in prompts()] != plain, raw


def test_in_one_batch_as_alone_and_switched_off_by_a_request(pair: Any) -> None:  # noqa: F811
    model, _ = pair
    prompt_ids = prompts()
    params_list = [
        parse_generation_config(raw).resolve(SamplingParams(max_tokens=12), 3) for raw in CASES[:6]
    ]
    todo = [
        Request(id=str(i), prompt=p, params=h, eos_ids=EOS)
        for i, (p, h) in enumerate(zip(prompt_ids, params_list))
    ]
    expected = tiny.run_one_by_one(tiny.make_engine(model), todo)
    assert tiny.run(tiny.make_engine(model), todo) == expected
    assert tiny.run(tiny.make_engine(model, pages=14, overlap=True), todo) == expected
    engine = tiny.make_engine(model)
    off = our_ids(
        engine,
        prompt_ids[1],
        {"suppress_tokens": list(range(30))},
        logits_processors=LogitsProcessors(),
    )
    assert off == our_ids(engine, prompt_ids[1], {"do_sample": False})


@settings(deadline=None, max_examples=examples(60, 20))
@given(st.data(), st.integers(0, 999))
def test_a_row_is_changed_as_transformers_changes_it(data: st.DataObject, seed: int) -> None:
    """Logits of a draw, too: the processors of transformers' own list, in its order."""
    transformers = pytest.importorskip("transformers")
    raw = {
        key: data.draw(st.sampled_from(KEYS[key]))
        for key in data.draw(st.sets(st.sampled_from(sorted(KEYS)[:11])))
    }
    raw = {key: value for key, value in raw.items() if key not in ("max_length", "max_new_tokens")}
    draw = torch.Generator().manual_seed(seed)
    prompt = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=8))
    answer = data.draw(st.lists(st.integers(0, 8), max_size=5))
    options = parse_generation_config({"do_sample": True, **raw}).resolve(
        SamplingParams(max_tokens=6), len(prompt)
    )
    request = Request(id="x", prompt=tuple(prompt), params=options, eos_ids=EOS)
    seq = Sequence(
        request, 0, 0, RopeFrequencyRule("fixed", lambda n: 0), max_length=len(prompt) + 6
    )
    seq.tokens += answer
    logits = torch.randn(1, 61, generator=draw) * 3
    config = transformers.GenerationConfig(
        **raw, eos_token_id=list(EOS), max_length=len(prompt) + 6
    )
    config._eos_token_tensor = torch.tensor(EOS)
    owner = type("Owner", (), {"config": transformers.LlamaConfig()})()
    merge = transformers.GenerationMixin._merge_criteria_processor_list
    owner._merge_criteria_processor_list = lambda *lists: merge(owner, *lists)
    steps = transformers.GenerationMixin._get_logits_processor(
        owner,
        config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=torch.tensor([prompt]),
        device="cpu",
    )
    want = steps(torch.tensor([seq.tokens]), logits.clone())
    sampler = Sampler(61, "cpu", registry.select_backends("cpu"))
    actual = sampler._process_logits(logits, sampler.prepare_batch([seq]))
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(0, 5),
)
def test_ngrams_as_spelled_out(of: list[int], tokens: list[int], size: int) -> None:
    grams = [tuple(of[i : i + size]) for i in range(len(of) - size + 1)] if size else []
    begun = tuple(tokens[len(tokens) - size + 1 :]) if size > 1 else ()
    possible = size > 0 and len(tokens) + 1 >= size
    want = sorted({gram[-1] for gram in grams if gram[:-1] == begun}) if possible else []
    assert (
        banned_ngram_ids(np.array(of, np.int64), np.array(tokens, np.int64), size).tolist() == want
    )


@pytest.mark.parametrize(("counts", "want"), [(True, {5, 6, 8, 9}), (False, {8, 9})])
def test_what_of_a_prompt_with_a_picture_counts(counts: bool, want: set[int]) -> None:
    """The places of a picture are no tokens; where the original gets embeddings alone, only the
    answer counts.
    """
    options = SamplingParams(temperature=0.0, repetition_penalty=2.0).with_defaults({})
    insert = ImageEmbeddingSpan(1, 3, "digest")
    request = Request(
        id="x",
        prompt=(5, 0, 0, 0, 6),
        params=options,
        embedding_spans=(insert,),
        penalize_prompt=counts,
    )
    seq = Sequence(request, 0, 0, RopeFrequencyRule("fixed", lambda n: 0), max_length=99)
    seq.tokens += [8, 9]
    sampler = Sampler(61, "cpu", registry.select_backends("cpu"))
    changed = sampler._process_logits(torch.ones(1, 61), sampler.prepare_batch([seq]))[0]
    assert set((changed != 1).nonzero().flatten().tolist()) == want
