"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError, TokenizerError
from modelmill.runtime.sequence import RequestLimits
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.engine_client import max_tokenize_tokens
from modelmill.serve.openai_format import Utf8JsonResponse, token_text
from modelmill.serve.routes.common import check_message_sizes, find_engine
from modelmill.serve.schema import DetokenizeRequest, TokenizeRequest
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Any:
    """Token ids of a text, or of a conversation through the chat template."""
    service, engine = find_engine(request, body.model)
    return await service.run_in_thread(
        _tokenize, engine.text_processor, body, engine.request_limits.max_len
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Any:
    """The text of token ids."""
    service, engine = find_engine(request, body.model)
    return await service.run_in_thread(
        _detokenize, engine.text_processor, body, engine.request_limits
    )


def _tokenize(
    text_processor: TextProcessor, body: TokenizeRequest, max_model_len: int
) -> Utf8JsonResponse:
    ids = _encode(text_processor, body, max_model_len)
    if len(ids) > max_tokenize_tokens(max_model_len):
        raise RequestError(
            f"the text has {len(ids)} tokens; the limit is {max_tokenize_tokens(max_model_len)}; "
            "send it in parts"
        )
    response: dict[str, Any] = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}
    if body.return_token_strs:
        response["token_strs"] = [token_text(text_processor.tokenizer, id) for id in ids]
    return Utf8JsonResponse(response)


def _detokenize(
    text_processor: TextProcessor, body: DetokenizeRequest, limits: RequestLimits
) -> Utf8JsonResponse:
    tokenizer, max_tokens = text_processor.tokenizer, max_tokenize_tokens(limits.max_len)
    if tokenizer is None:
        raise TokenizerError("this engine has no tokenizer")
    if len(body.tokens) > max_tokens:
        raise RequestError(
            f"tokens has {len(body.tokens)} ids; the limit is {max_tokens}; send them in parts"
        )
    # the model's vocabulary may be padded beyond the tokenizer's
    vocab = max(tokenizer.vocab_size, limits.vocab_size)
    if max(body.tokens, default=0) >= vocab:
        raise RequestError(f"tokens must be ids below {vocab}")
    return Utf8JsonResponse({"prompt": tokenizer.decode(body.tokens, skip_special=False)})


def _encode(text_processor: TextProcessor, body: TokenizeRequest, max_model_len: int) -> list[int]:
    if text_processor.tokenizer is None:
        raise TokenizerError("this engine has no tokenizer")
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt or messages: give one of them")
    if body.prompt is not None:
        text_processor.check_length(body.prompt, max_model_len)
        return text_processor.tokenizer.encode(
            body.prompt, bos=None if body.add_special_tokens is not False else False
        )
    if text_processor.chat_format is None:
        raise RequestError("this engine has no chat template for messages")
    check_message_sizes(text_processor, body.messages or [], max_model_len)
    return text_processor.chat_format.encode(
        body.messages or [], body.add_generation_prompt is not False
    )
