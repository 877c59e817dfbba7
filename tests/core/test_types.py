"""SamplingParams: strict ranges, and what is set explicitly wins."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelmill.core.errors import RequestError
from modelmill.core.types import SamplingParams, sampling_param_range


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0}, {"n": 10**6}, {"n": True}, {"n": 1.5}, {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf}, {"temperature": "1"}, {"top_p": -0.1}, {"top_p": 1.1},
        {"top_k": -2}, {"min_p": 2},
        {"max_tokens": -1}, {"logprobs": 10**9}, {"repetition_penalty": 0}, {"presence_penalty": 3},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: 1e400}},
        {"logit_bias": dict.fromkeys(range(5000), 0.0)},
        {"stop": [""]}, {"stop": ["a"] * 1000}, {"stop": ["x" * 10**5]}, {"stop": [3]},
        {"stop_token_ids": [-1]},
        {"num_beams": 2, "n": 3}, {"min_tokens": 5, "max_tokens": 2}, {"seed": 1.0},
        {"seed": 2**80},
    ],
    ids=str,
)  # fmt: skip
def test_out_of_range_is_one_clear_line(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**bad)
    assert "\n" not in str(error.value)


def test_unset_fields_take_the_defaults_and_set_ones_win() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.8, "unknown": 3}
    assert SamplingParams().with_defaults(defaults).temperature == 0.7
    params = SamplingParams(temperature=0.0).with_defaults(defaults)
    assert params.temperature == 0.0
    assert params.greedy
    assert params.top_p == 0.8
    assert SamplingParams().with_defaults({}).temperature == 1.0


@pytest.mark.parametrize("zero", [0, 0.0, -0.0], ids=str)
def test_top_p_0_is_greedy(zero: float) -> None:
    assert SamplingParams(temperature=1.3, top_p=zero).with_defaults({"top_k": 40}).greedy
    assert not SamplingParams(temperature=1.3, top_p=1e-300).with_defaults({}).greedy


@given(st.floats(0, 2), st.floats(0.01, 1), st.integers(-1, 1000))
def test_resolving_twice_changes_nothing(temperature: float, top_p: float, top_k: int) -> None:
    once = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k).with_defaults({})
    assert once.with_defaults({"temperature": 0.123}) == once


def test_every_parameter_has_its_help_and_every_number_its_range() -> None:
    """The command line, the HTTP schema and Triton's tensors are made from these."""
    for each in fields(SamplingParams):
        if each.metadata.get("python_only"):
            continue
        assert each.metadata["help"], each.name
        is_number = str(each.type).startswith(("int", "float"))
        assert (each.metadata["range"] is not None) == is_number, each.name
        if is_number:
            limits = sampling_param_range(each.name)
            assert limits.low < limits.high
            assert isinstance(limits.low, int) == str(each.type).startswith("int")
