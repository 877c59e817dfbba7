"""Types of request fields that hold prompts, and how a field's prompts become a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32
from modelmill.serve.strict_models import FAIL_FAST, Text

MAX_PROMPTS = 1024


TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], FAIL_FAST]
PromptTokenIds = Annotated[
    list[Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": MAX_INT32})]], FAIL_FAST
]
"""Ids whose range is checked with the engine's vocabulary, which the message then names."""
TextList = Annotated[list[Text], FAIL_FAST]
TokenIdLists = Annotated[list[PromptTokenIds], FAIL_FAST]


def list_prompts(
    prompts: str | Sequence[Any], name: str, noun: str, limit: int
) -> list[str | list[int]]:
    """The prompts of a field as a list, also if it has only one.

    Args:
        prompts: the value of the field.
        name: of the field, for messages.
        noun: what its items are, for messages.
        limit: of items.

    Raises:
        RequestError: a prompt is empty, or there are too many.
    """
    single = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    prompt_list: list[Any] = [prompts] if single else list(prompts)
    check_prompt_list(prompt_list, name, noun, limit)
    return prompt_list


def resolve_truncated_length(
    tokens: int | None, max_model_len: int, all_that_fit: int
) -> int | None:
    """How many tokens of a prompt are kept, of ``truncate_prompt_tokens``; None: all.

    Args:
        tokens: the value of the field.
        max_model_len: tokens that the engine takes.
        all_that_fit: what -1 stands for.

    Raises:
        RequestError: none would be kept, or more than the engine takes.
    """
    if tokens == 0:
        raise RequestError("truncate_prompt_tokens must be at least 1, or -1")
    check_at_most_engine_length("truncate_prompt_tokens", tokens, max_model_len)
    return all_that_fit if tokens == -1 else tokens


def check_at_most_engine_length(name: str, tokens: int | None, max_model_len: int) -> None:
    """Raise RequestError for a field with more tokens than the engine takes."""
    if tokens is not None and tokens > max_model_len:
        raise RequestError(
            f"{name} must be at most {max_model_len}, this engine's length, not {tokens}"
        )


def check_prompt_list(prompts: Sequence[Sequence[Any]], name: str, noun: str, limit: int) -> None:
    """Raise RequestError if a prompt is empty, or there are too many; see ``list_prompts``."""
    empty = next((index for index, each in enumerate(prompts) if len(each) == 0), None)
    if not prompts or empty is not None:
        item = f"{name}[{empty}]" if len(prompts) > 1 else name
        raise RequestError(f"{item} is empty; give at least one token")
    if len(prompts) > limit:
        raise RequestError(f"{name} has {len(prompts)} {noun}; the limit is {limit}")
