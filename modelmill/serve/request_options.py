"""Options that completions and chat completions share, applied to the engine's request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import SamplingParams
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.generation_schema import GenerationFields
from modelmill.serve.openai_format import clamp_logprob, token_text
from modelmill.serve.prompt_fields import resolve_truncated_length
from modelmill.text.tokenizer_loader import Tokenizer
from modelmill.text_processor import PromptTruncation, TextProcessor


def sampling_params_with_bad_words(
    text_processor: TextProcessor, body: GenerationFields
) -> SamplingParams:
    """The sampling parameters of a request, with its bad words.

    Raises:
        RequestError: the engine has no tokenizer for the words, or a grammar decides instead.
    """
    params = body.sampling_params()
    if not body.bad_words:
        return params
    if text_processor.tokenizer is None:
        raise RequestError("bad_words needs a tokenizer, and this engine has none; use logit_bias")
    if body.grammar() is not None:
        raise RequestError("bad_words has no effect where a grammar decides; leave it out")
    defaults = text_processor.defaults.get("logits_processors")
    base: LogitsProcessors = params.logits_processors or defaults or LogitsProcessors()
    words = [*base.bad_words_ids, *bad_word_ids(text_processor.tokenizer, body.bad_words)]
    unique = tuple(dict.fromkeys(words))
    return replace(params, logits_processors=replace(base, bad_words_ids=unique))


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Token ids of words that must not occur: as they are, and behind a space.

    Raises:
        RequestError: a word is empty.
    """
    if not all(word.strip() for word in words):
        raise RequestError("bad_words must have words that are not empty")
    texts = dict.fromkeys(text for word in words for text in (word, f" {word.lstrip()}"))
    ids = (tuple(tokenizer.encode_pieces(["", text])) for text in texts)
    return [each for each in ids if each]


def cache_salt_or_random(body: GenerationFields) -> str:
    """The salt of a request; one that no other request has where cache_prompt is false."""
    salt = body.cache_salt or ""
    return f"{salt}\0{secrets.token_hex(16)}"[-1024:] if body.cache_prompt is False else salt


def prompt_truncation(body: GenerationFields, max_model_len: int) -> PromptTruncation | None:
    """How the prompt is cut; None: not at all.

    -1 keeps what leaves room for one token of the answer.
    """
    tokens = resolve_truncated_length(body.truncate_prompt_tokens, max_model_len, max_model_len - 1)
    return None if tokens is None else PromptTruncation(tokens, body.truncation_side or "left")


def format_prompt_logprobs(
    tokenizer: Tokenizer | None, state: RequestOutputState
) -> list[dict[str, Any] | None]:
    """Log-probabilities of the prompt's tokens, as vLLM returns them; the first has none."""
    entries = state.output.prompt_logprobs or [None] * len(state.output.prompt_token_ids)
    return [
        None
        if entry is None
        else {
            str(id): {
                "logprob": clamp_logprob(value.logprob),
                "rank": value.rank,
                "decoded_token": token_text(tokenizer, id),
            }
            for id, value in entry.items()
        }
        for entry in entries
    ]
