"""What a caller can put into one request: refused at once with one line, or served."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, RequestError
from modelmill.core.types import SamplingParams
from tests.checkpoint.checkpoint_factory import llama_state, write_folder
from tests.runtime import tiny
from tests.trust.error_lines import check_one_line

HOSTILE: list[Any] = [
    None, "3", "", 1.5, True, -1, 0, -0.0, 2**70, 10**5000, math.nan, math.inf, [], {}, [1], [None],
    [""], ["a\n"] * 99,
    {"1": 2}, {1: "x"}, {1: None}, {None: 1}, {1: math.nan}, {-1: 1.0}, {2**40: 1.0}, object(),
    b"stop", range(10**9),
    "x" * 10**6, dict.fromkeys(range(10 ** 4), 1.0), list(range(10**4)),
]  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(SamplingParams)])
def test_any_value_in_any_field(name: str) -> None:
    """Accepted values are of the field's kind and inside its range; everything else is a
    RequestError.
    """
    flags = ("ignore_eos", "early_stopping", "skip_special_tokens", "include_stop")
    for value in HOSTILE:
        try:
            params = SamplingParams(**{name: value}).with_defaults({})
        except RequestError as error:
            check_one_line(error)
            continue
        stored_value = getattr(params, name)
        if name in flags:
            assert isinstance(stored_value, bool)
        elif isinstance(stored_value, (int, float)):
            assert math.isfinite(stored_value)
        else:
            assert stored_value is None or len(stored_value) <= 1024


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {tiny.VOCAB: 1.0}},
        {"stop_token_ids": (tiny.VOCAB,)},
        {"num_beams": 32},
    ],
    ids=str,
)
def test_what_this_engine_cannot_serve(params: dict[str, Any]) -> None:
    engine = tiny.make_engine()
    for request in tiny.requests([(2, 3)], tiny.params(**params)):
        with pytest.raises(RequestError) as raised:
            engine.add(request)
        check_one_line(raised.value)
    tiny.assert_idle(engine)


def test_negative_zero_is_greedy_and_a_tiny_temperature_does_not_overflow() -> None:
    engine = tiny.make_engine()
    prompt = tiny.prompts(1, 5, 9)
    greedy = tiny.run(engine, tiny.requests(prompt, tiny.params()))
    for temperature in (-0.0, 5e-324, 1e-30):
        assert (
            tiny.run(engine, tiny.requests(prompt, tiny.params(temperature=temperature, seed=1)))
            == greedy
        )


def test_the_default_length_gives_way_to_an_explicit_minimum() -> None:
    params = SamplingParams(min_tokens=600).with_defaults({"max_tokens": 512})
    assert (params.min_tokens, params.max_tokens) == (600, 600)
    assert SamplingParams(min_tokens=6).with_defaults({"max_tokens": 512}).max_tokens == 512


@pytest.mark.parametrize("value", [math.nan, -1, 1e400, "0.7", True, [0.7]], ids=str)
@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty"])
def test_a_checkpoints_defaults_are_refused_at_build(tmp_path: Path, name: str, value: Any) -> None:
    """Otherwise every request to the engine would be refused for what its caller never said."""
    import json

    folder = write_folder(tmp_path, llama_state())
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(CheckpointError, match=f"generation_config.json: {name}"):
        make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu"))


@pytest.mark.parametrize("key", ["suppress_tokens", "forced_eos_token_id", "bad_words_ids"])
def test_token_ids_outside_the_vocabulary_are_refused_at_build(tmp_path: Path, key: str) -> None:
    import json

    folder = write_folder(tmp_path, llama_state())
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    for id, fine in ((vocab - 1, True), (vocab, False)):
        value = [[0, id]] if key == "bad_words_ids" else [id]
        (folder / "generation_config.json").write_text(json.dumps({key: value, "typical_p": 0.5}))
        if fine:
            plan = make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu")).describe()
            assert plan["sampling"]["unused"] == {"typical_p": "is not offered"}
            continue
        with pytest.raises(CheckpointError, match=f"between 0 and {vocab - 1}, not {vocab}"):
            make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu"))


@pytest.mark.parametrize("ids", [(), (-1,), (tiny.VOCAB,), (2**70,), tuple(range(2, 80)) * 2])
def test_prompts_that_can_never_run_leave_the_engine_alive(ids: tuple[int, ...]) -> None:
    engine = tiny.make_engine()
    with pytest.raises(RequestError) as raised:
        engine.add(tiny.requests([ids])[0])
    check_one_line(raised.value)
    tiny.run(engine, tiny.requests(tiny.prompts(2)))


@pytest.mark.parametrize("num_tokens", [None, 0, 1, 5])
def test_prompts_around_the_longest(num_tokens: int | None) -> None:
    """max_len − 1 gets one token, max_len only an empty answer, max_len + 1 nothing; afterwards
    nothing is held.
    """
    engine = tiny.make_engine(max_num_batched_tokens=32)
    longest = engine.max_model_len
    for length, room in ((longest - 1, 1), (longest, 0), (longest + 1, -1)):
        prompt = tiny.prompts(1, length, length)
        request = tiny.requests(prompt, tiny.params(max_tokens=num_tokens), eos=())[0]
        if room < 0 or (room == 0 and num_tokens != 0):
            with pytest.raises(RequestError, match=str(length)):
                engine.add(request)
        else:
            expected = room if num_tokens is None else min(num_tokens, room)
            assert [len(ids) for ids in tiny.run(engine, [request]).values()] == [expected]
    tiny.assert_idle(engine)


def test_a_thousand_requests_given_up_midway_leave_nothing() -> None:
    engine = tiny.make_engine(pages=24, max_num_seqs=8)
    todo = tiny.prompts(1000, 1, 30)
    for i, prompt in enumerate(todo):
        options = tiny.params(
            n=1 + i % 3, temperature=1.0, seed=i, max_tokens=20, repetition_penalty=1.1
        )
        engine.add(tiny.requests([prompt], options)[0])
        engine.step()
        engine.abort("0")
    tiny.drain(engine)
    tiny.assert_idle(engine)
