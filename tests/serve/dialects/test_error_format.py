"""Errors as each dialect writes them; the counts of a long prompt are fields, not words."""

from __future__ import annotations

import pytest

from modelmill.core.errors import PromptTokenCounts, PromptTooLong, RequestError
from modelmill.serve.dialects.error_format import anthropic_error
from modelmill.serve.errors import CONTEXT_LENGTH_EXCEEDED, to_api_error


def anthropic_message(error: RequestError) -> str:
    return str(anthropic_error(to_api_error(error))["error"]["message"])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (PromptTokenCounts(700, 511), "prompt is too long: 700 tokens > 511 maximum"),
        (
            PromptTokenCounts(700, 511, counts_all=False),
            "prompt is too long: more than 700 tokens > 511 maximum",
        ),
        (None, "prompt is too long: any words"),
    ],
)
def test_the_numbers_are_told_whatever_the_words(
    counts: PromptTokenCounts | None, message: str
) -> None:
    error = PromptTooLong("any words", counts)
    assert to_api_error(error).code == CONTEXT_LENGTH_EXCEEDED
    assert anthropic_message(error) == message
    assert anthropic_message(error.reworded("other words")).replace("other", "any") == message


def test_words_alone_make_no_long_prompt() -> None:
    error = RequestError("the prompt has 700 tokens, this engine takes 511; shorten it")
    assert to_api_error(error).code is None
    assert anthropic_message(error) == str(error)
