"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError, TokenizerError
from modelmill.language import Language
from modelmill.serve.routes.common import service_of
from modelmill.serve.schema import DetokenizeRequest, TokenizeRequest
from modelmill.serve.shape import legacy

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Ids of a text, or of a conversation through the chat template."""
    service = service_of(request)
    engine = service.engine(body.model)
    bounds, language = engine.bounds, engine.language
    ids = await service.aside(_ids, language, body, bounds.longest)
    told: dict[str, Any] = {"count": len(ids), "max_model_len": bounds.longest, "tokens": ids}
    if body.return_token_strs:
        told["token_strs"] = [legacy(language.tokenizer, id) for id in ids]
    return told


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """The text of ids."""
    service = service_of(request)
    language = service.engine(body.model).language
    if language.tokenizer is None:
        raise TokenizerError("this engine has no tokenizer")
    return {"prompt": await service.aside(lambda: language.tokenizer.decode(body.tokens, skip_special=False))}  # type: ignore[union-attr]


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
    return language.chat_format.encode(body.messages or [], body.add_generation_prompt is not False)
