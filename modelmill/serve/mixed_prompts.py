"""Prompts of llama.cpp's routes: texts, token ids, both in one prompt, lists of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32
from modelmill.serve.prompt_fields import MAX_PROMPTS, check_prompt_list
from modelmill.serve.special_token_prompts import encode_text
from modelmill.serve.strict_models import FAIL_FAST, Text
from modelmill.text.tokenizer_loader import Tokenizer

MixedPrompt = str | Sequence[int | str]
"""A text, or token ids and texts in one prompt."""
_TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
MixedItems = Annotated[list[Text | _TokenId], FAIL_FAST]
MixedPrompts = Annotated[list[Text | _TokenId | MixedItems], FAIL_FAST]


def split_mixed_prompts(
    value: str | Sequence[str | int | Sequence[int | str]],
) -> list[MixedPrompt]:
    """The prompts of the field: a list is one prompt if it has token ids itself.

    Raises:
        RequestError: there is none, one is empty, there are too many, or token ids stand beside
            lists.
    """
    if isinstance(value, str):
        prompts: list[MixedPrompt] = [value]
    elif any(isinstance(each, int) for each in value):
        single = [each for each in value if isinstance(each, (int, str))]
        if len(single) < len(value):
            raise RequestError("prompt has token ids beside lists; put them into a list, too")
        prompts = [single]
    else:
        prompts = [each for each in value if not isinstance(each, int)]
    check_prompt_list(prompts, "prompt", "prompts", MAX_PROMPTS)
    return prompts


def has_text(prompt: MixedPrompt) -> bool:
    """Whether a prompt needs a tokenizer."""
    return isinstance(prompt, str) or any(isinstance(part, str) for part in prompt)


def encode_mixed_prompt(
    tokenizer: Tokenizer | None,
    prompt: Sequence[int | str],
    *,
    parse_special: bool,
    add_special: bool,
) -> list[int]:
    """Ids of a prompt of texts and ids, as llama.cpp makes them: BOS comes before a text only.

    Args:
        tokenizer: of the engine.
        prompt: the parts.
        parse_special: whether control tokens in texts become their ids.
        add_special: whether BOS is put before a text that comes first.

    Raises:
        TokenizerError: the engine has no tokenizer.
    """
    ids: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, str):
            first = add_special and index == 0
            ids += encode_text(tokenizer, part, parse_special=parse_special, add_special=first)
        else:
            ids.append(part)
    return ids
