"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError, TokenizerError
from modelmill.language import Language
from modelmill.runtime.check import Bounds
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.engine import most_tokens
from modelmill.serve.routes.common import check_sizes, service_of
from modelmill.serve.schema import DetokenizeRequest, TokenizeRequest
from modelmill.serve.shape import Json, legacy

router = APIRouter(route_class=BodyRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Any:
    """Ids of a text, or of a conversation through the chat template."""
    service = service_of(request)
    engine = service.engine(body.model)
    bounds, language = engine.bounds, engine.language
    return await service.aside(_tokenized, language, body, bounds.longest)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Any:
    """The text of ids."""
    service = service_of(request)
    engine = service.engine(body.model)
    return await service.aside(_detokenized, engine.language, body, engine.bounds)


def _tokenized(language: Language, body: TokenizeRequest, longest: int) -> Json:
    ids = _ids(language, body, longest)
    if len(ids) > most_tokens(longest):
        raise RequestError(f"the text has {len(ids)} tokens, up to {most_tokens(longest)} are told; send it in parts")
    told: dict[str, Any] = {"count": len(ids), "max_model_len": longest, "tokens": ids}
    if body.return_token_strs:
        told["token_strs"] = [legacy(language.tokenizer, id) for id in ids]
    return Json(told)


def _detokenized(language: Language, body: DetokenizeRequest, bounds: Bounds) -> Json:
    tokenizer, most = language.tokenizer, most_tokens(bounds.longest)
    if tokenizer is None:
        raise TokenizerError("this engine has no tokenizer")
    if len(body.tokens) > most:
        raise RequestError(f"tokens holds {len(body.tokens)} ids, up to {most} are taken; send them in parts")
    # the model may know more ids than the tokenizer: padding
    vocab = max(tokenizer.vocab_size, bounds.vocab)
    if max(body.tokens, default=0) >= vocab:
        raise RequestError(f"tokens must be ids below {vocab}")
    return Json({"prompt": tokenizer.decode(body.tokens, skip_special=False)})


def _ids(language: Language, body: TokenizeRequest, longest: int) -> list[int]:
    if language.tokenizer is None:
        raise TokenizerError("this engine has no tokenizer")
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt or messages: give one of them")
    if body.prompt is not None:
        language.check_size(body.prompt, longest)
        return language.tokenizer.encode(body.prompt, bos=None if body.add_special_tokens is not False else False)
    if language.chat_format is None:
        raise RequestError("messages need a chat template, which this engine has not")
    check_sizes(language, body.messages or [], longest)
    return language.chat_format.encode(body.messages or [], body.add_generation_prompt is not False)
