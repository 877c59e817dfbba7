"""What a generation_config comes to: the table of docs/serving.md, and what becomes of every field
of transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelmill.core.errors import RequestError
from modelmill.core.generation_defaults import (
    MODELMILL_DEFAULTS,
    OPENAI_DEFAULTS,
    GenerationDefaults,
    parse_generation_config,
)
from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import SamplingParams

SAMPLES = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.1,
}
IDS = {"bos_token_id": 1, "eos_token_id": 2}


def resolve(defaults: GenerationDefaults, prompt: int = 5, **request_fields: Any) -> SamplingParams:
    return defaults.resolve(SamplingParams(**request_fields), prompt)


@pytest.mark.parametrize("openai", [False, True])
@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_what_the_checkpoint_says_is_taken_at_every_door(container: str, openai: bool) -> None:
    defaults = parse_generation_config(SAMPLES, container, openai=openai)
    assert defaults.source == "checkpoint"
    options = resolve(defaults)
    assert (options.temperature, options.top_p, options.top_k, options.repetition_penalty) == (
        0.7,
        0.8,
        20,
        1.1,
    )
    assert resolve(defaults, temperature=0.0, top_k=3).top_k == 3


@pytest.mark.parametrize("openai", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"do_sample": False}, {"temperature": 0.7, "top_p": 0.5}], ids=str
)
def test_without_do_sample_the_likeliest_token_is_taken(more: dict[str, Any], openai: bool) -> None:
    defaults = parse_generation_config(
        {**IDS, "transformers_version": "4.40.0", **more}, "safetensors", openai=openai
    )
    assert defaults.greedy
    assert resolve(defaults).greedy
    assert defaults.values["temperature"] == 0.0


def test_a_request_that_asks_for_a_draw_gets_one_from_a_greedy_engine() -> None:
    defaults = parse_generation_config({**IDS, "do_sample": False, "top_p": 0.5}, "safetensors")
    for request_fields in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"n": 3}):
        assert resolve(defaults, **request_fields).temperature == 1.0
    for other in (
        {"top_p": 1.0},
        {"top_p": 0.0},
        {"top_k": 0},
        {"top_k": -1},
        {"min_p": 0.0},
        {"seed": 3},
        {"n": 2, "num_beams": 2},
    ):
        assert resolve(defaults, **other).temperature == 0.0
    assert resolve(defaults, temperature=0.3).top_p == 0.5
    assert resolve(parse_generation_config({**IDS, "temperature": 0.4}), n=2).temperature == 0.4


@pytest.mark.parametrize(
    ("raw", "container"), [({}, "safetensors"), (IDS, "gguf"), ({}, "gguf")], ids=str
)
def test_where_it_says_nothing_people_and_clients_differ(
    raw: dict[str, Any], container: str
) -> None:
    own, client = (
        parse_generation_config(raw, container),
        parse_generation_config(raw, container, openai=True),
    )
    for defaults, values in ((own, MODELMILL_DEFAULTS), (client, OPENAI_DEFAULTS)):
        options = resolve(defaults)
        assert {name: getattr(options, name) for name in values} == values
    assert (own.source, client.source) == ("modelmill", "openai")
    assert resolve(client).top_k == 0
    assert resolve(client).min_p == 0.0
    assert (
        resolve(own, seed=1, repetition_penalty=1.2, max_tokens=3).temperature
        == MODELMILL_DEFAULTS["temperature"]
    )
    for request_fields in ({"temperature": 1.3}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.0}):
        # who says how to draw gets just that
        assert resolve(own, **request_fields) == SamplingParams(**request_fields).with_defaults({})
    # the vision encoder of a MiniGPT-4 brings a generation_config of their own
    assert parse_generation_config({**IDS, "do_sample": True}, "joined/gguf").source == "checkpoint"


def test_lengths_are_those_of_transformers() -> None:
    assert (
        resolve(parse_generation_config({"max_new_tokens": 9, "max_length": 7}), 5).max_tokens == 9
    )
    assert resolve(parse_generation_config({"max_length": 7}), 5).max_tokens == 2
    assert resolve(parse_generation_config({"max_length": 7}), 50, max_tokens=3).max_tokens == 3
    assert resolve(parse_generation_config({"max_length": 7}), 7).max_tokens is None
    assert (
        resolve(parse_generation_config({"min_new_tokens": 4, "min_length": 90}), 5).min_tokens == 4
    )
    assert resolve(parse_generation_config({"min_length": 9}), 5).min_tokens == 4
    assert resolve(parse_generation_config({"min_length": 9}), 50).min_tokens == 0
    assert resolve(parse_generation_config({"min_new_tokens": 40}), 5, max_tokens=3).min_tokens == 3
    assert (
        resolve(parse_generation_config({"min_new_tokens": 40, "max_new_tokens": 8}), 5).min_tokens
        == 8
    )
    assert (
        resolve(parse_generation_config({"min_length": 40, "max_length": 20}), 5).min_tokens == 15
    )
    assert resolve(parse_generation_config({"min_new_tokens": 4}), 5, min_tokens=0).min_tokens == 0
    assert resolve(parse_generation_config({"max_length": 10**12}), 5).max_tokens == 2**31 - 1 - 5


def test_stop_strings_end_an_answer_unless_others_are_asked_for() -> None:
    defaults = parse_generation_config({"stop_strings": ["###", "\n\n"]})
    assert resolve(defaults).stop == ("###", "\n\n")
    assert resolve(defaults, stop=("a",)).stop == ("a",)
    assert resolve(parse_generation_config({"stop_strings": "###"})).stop == ("###",)


NAMED = {
    "num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0, "early_stopping": True,
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "top_h": 0.4, "penalty_alpha": 0.6,
    "dola_layers": "low",
    "num_beam_groups": 2, "diversity_penalty": 1.0, "constraints": [1], "force_words_ids": [[3]],
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.5}, "token_healing": True, "max_time": 3.0,
}  # fmt: skip
READ = {
    "do_sample": True, "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.1,
    "repetition_penalty": 1.2,
    "max_length": 30, "max_new_tokens": 12, "min_length": 20, "min_new_tokens": 2,
    "stop_strings": ["x"],
    "encoder_repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[3], [4, 5]], "renormalize_logits": True, "forced_bos_token_id": 5,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": [3, 1.2], "suppress_tokens": [3],
    "begin_suppress_tokens": [4],
    "sequence_bias": [[[3], 2.0]], "eos_token_id": 2,
}  # fmt: skip


def test_every_field_of_transformers_is_read_or_named_or_changes_no_answer() -> None:
    """A field that a later transformers brings fails here until it is looked at."""
    config = pytest.importorskip("transformers").GenerationConfig()
    assert parse_generation_config(READ).unused == {}
    for name, value in READ.items():
        raw = {"do_sample": True, name: value}
        if name not in ("do_sample", "eos_token_id"):
            assert parse_generation_config(raw) != parse_generation_config({"do_sample": True}), (
                f"{name} has no effect"
            )
    for name, value in NAMED.items():
        defaults = parse_generation_config({"do_sample": True, name: value})
        assert list(defaults.unused) == [name]
        assert name in (defaults.unused_warning() or "")
    values = vars(config).items()
    rest = [
        name
        for name, value in values
        if name not in READ and name not in NAMED and not name.startswith("_orig")
    ]
    unknown = parse_generation_config({"do_sample": True} | dict.fromkeys(rest, "set")).unused
    assert unknown == {}, f"neither read nor named nor known to be harmless: {list(unknown)}"


def test_neutral_values_and_null_say_nothing() -> None:
    neutral = {
        "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "guidance_scale": 1,
        "diversity_penalty": 0.0,
        "temperature": 1.0, "top_k": 50, "top_p": 1.0, "bad_words_ids": None, "suppress_tokens": [],
        "max_time": None,
        "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "penalty_alpha": None,
        "early_stopping": False,
    }  # fmt: skip
    defaults = parse_generation_config(neutral)
    assert defaults.unused_warning() is None
    assert not defaults.processors
    assert "logits_processors" not in defaults.values


def test_an_unknown_key_and_a_draw_that_never_happens_are_named() -> None:
    warning = parse_generation_config({"temperature": 0.6, "odd\nkey": 3}).unused_warning() or ""
    assert "temperature applies only if a request samples" in warning
    assert "is not known" in warning
    assert "\n" not in warning
    many = (
        parse_generation_config(
            {"do_sample": True} | {f"key{i}" * 100: 3 for i in range(10_000)}
        ).unused_warning()
        or ""
    )
    assert many.endswith("and 9980 more")
    assert len(many) < 3000


BAD = [
    {"bad_words_ids": [3]}, {"bad_words_ids": [[]]}, {"bad_words_ids": [["a"]]},
    {"suppress_tokens": [-1]},
    {"suppress_tokens": [True]}, {"forced_eos_token_id": 7, "suppress_tokens": [7, 3]},
    {"forced_bos_token_id": 7, "suppress_tokens": [7, 3]}, {"no_repeat_ngram_size": 1.5},
    {"no_repeat_ngram_size": -1},
    {"sequence_bias": [[3, 1.0]]}, {"sequence_bias": {"3": 1.0}}, {"sequence_bias": [[[3], "x"]]},
    {"sequence_bias": [[[3], float("nan")]]}, {"encoder_repetition_penalty": 0},
    {"forced_eos_token_id": "x"},
    {"exponential_decay_length_penalty": [1]}, {"exponential_decay_length_penalty": [1, -2.0]},
    {"renormalize_logits": 1}, {"max_new_tokens": "9"}, {"max_length": -1}, {"min_length": 1.5},
    {"stop_strings": [3]},
    {"stop_strings": ""}, {"temperature": "x"}, {"suppress_tokens": [0] * 70000},
    {"bad_words_ids": [[0] * 70000]},
]  # fmt: skip


@pytest.mark.parametrize("raw", BAD, ids=lambda raw: str(raw)[:60])
def test_what_makes_no_sense_is_one_line_that_names_the_key(raw: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(raw))) as error:
        parse_generation_config(raw)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted({*READ, *NAMED, "odd"})), anything, max_size=6))
def test_any_json_is_read_or_refused(raw: dict[str, Any]) -> None:
    try:
        defaults = parse_generation_config(raw)
    except RequestError:
        return
    assert "\n" not in defaults.summary_line()
    assert (
        LogitsProcessors.from_generation_config(defaults.processors.non_default())
        == defaults.processors
    )
