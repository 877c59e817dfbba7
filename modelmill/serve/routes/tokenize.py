"""POST /tokenize, /detokenize and /apply-template; the number of a conversation's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError, TokenizerError
from modelmill.runtime.sequence import RequestLimits
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.engine_client import max_tokenize_tokens
from modelmill.serve.openai_format import SurrogateSafeJsonResponse, token_bytes, token_text
from modelmill.serve.response_body_models import LLAMA_CPP_ERRORS
from modelmill.serve.routes.chat import chat_request_state
from modelmill.serve.routes.common import acquire_service_and_engine, check_message_sizes
from modelmill.serve.special_token_prompts import encode_text
from modelmill.serve.tokenize_schema import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from modelmill.serve.tool_image_placeholders import replace_tool_images_with_text
from modelmill.serve.tool_schema import check_parameter_schemas_are_json
from modelmill.text import tool_prompts
from modelmill.text.begun_answer import parse_assistant_prefill
from modelmill.text.chat_format_loader import ChatFormat
from modelmill.text.tokenizer_loader import Tokenizer
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)


@router.post("/tokenize", responses=LLAMA_CPP_ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> Any:
    """Token ids of a text, or of a conversation through the chat template."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    return await service.run_in_thread(
        _tokenize_response, engine.text_processor, body, engine.request_limits.max_len
    )


@router.post("/apply-template", responses=LLAMA_CPP_ERRORS)
async def apply_template(body: ApplyTemplateRequest, request: Request) -> Any:
    """The prompt of a conversation as text, without running it."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    return await service.run_in_thread(
        _rendered_template_response, engine.text_processor, body, engine.request_limits.max_len
    )


@router.post("/v1/chat/completions/input_tokens")
async def count_chat_tokens(body: ChatRequest, request: Request) -> Any:
    """The number of prompt tokens of a conversation, without answering it, as llama.cpp."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    body.check()
    limit = max_tokenize_tokens(engine.request_limits.max_len)
    state = await service.run_in_thread(chat_request_state, engine.text_processor, body, limit)
    count = len(state.request.prompt)
    return SurrogateSafeJsonResponse({"object": "response.input_tokens", "input_tokens": count})


@router.post("/detokenize", responses=LLAMA_CPP_ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> Any:
    """The text of token ids."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    return await service.run_in_thread(
        _detokenize_response, engine.text_processor, body, engine.request_limits
    )


def _tokenize_response(
    text_processor: TextProcessor, body: TokenizeRequest, max_model_len: int
) -> SurrogateSafeJsonResponse:
    ids = encode_prompt(text_processor, body, max_model_len)
    if len(ids) > max_tokenize_tokens(max_model_len):
        raise RequestError(
            f"the text has {len(ids)} tokens; the limit is {max_tokenize_tokens(max_model_len)}; "
            "send it in parts"
        )
    response: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.with_pieces:
        response["tokens"] = [
            {"id": id, "piece": _token_piece(text_processor.tokenizer, id)} for id in ids
        ]
    if body.return_token_strs:
        response["token_strs"] = [token_text(text_processor.tokenizer, id) for id in ids]
    return SurrogateSafeJsonResponse(response)


def _detokenize_response(
    text_processor: TextProcessor, body: DetokenizeRequest, limits: RequestLimits
) -> SurrogateSafeJsonResponse:
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
    text = tokenizer.decode(body.tokens, skip_special=False)
    return SurrogateSafeJsonResponse({"prompt": text, "content": text})


def encode_prompt(
    text_processor: TextProcessor, body: TokenizeRequest, max_model_len: int
) -> list[int]:
    """Token ids of a text, or of a conversation through the chat template.

    Raises:
        TokenizerError: the engine has no tokenizer.
        RequestError: not exactly one of them was sent, or it is too long.
    """
    if text_processor.tokenizer is None:
        raise TokenizerError("this engine has no tokenizer")
    sources = [each for each in (body.prompt, body.content, body.messages) if each is not None]
    if len(sources) != 1:
        raise RequestError("prompt or messages: give one of them")
    if body.text is not None:
        text_processor.check_prompt_length(body.text, max_model_len)
        return encode_text(
            text_processor.tokenizer,
            body.text,
            parse_special=text_processor.parse_special
            if body.parse_special is None
            else body.parse_special,
            add_special=body.adds_special_tokens,
        )
    chat_format, messages, template = chat_format_and_render_arguments(
        text_processor, body, max_model_len
    )
    if body.continue_final_message:
        return chat_format.encode_with_prefill(messages, **template)
    return chat_format.encode(messages, body.add_generation_prompt is not False, **template)


def chat_format_and_render_arguments(
    text_processor: TextProcessor, body: ApplyTemplateRequest, max_model_len: int
) -> tuple[ChatFormat, Sequence[Mapping[str, Any]], dict[str, Any]]:
    """What the chat format renders: the conversation with its tools.

    Raises:
        RequestError: the engine has no chat template, or the messages are too long.
    """
    if text_processor.chat_format is None:
        raise RequestError("this engine has no chat template for messages")
    template_kwargs = dict(body.chat_template_kwargs or {})
    chat_format = text_processor.variant_for_template_kwargs(template_kwargs).chat_format
    assert chat_format is not None, "a variable changes the format, and removes none"
    messages: Sequence[Mapping[str, Any]] = body.messages or []
    tools = body.tools or ()
    if not text_processor.supports_images:
        messages, _ = replace_tool_images_with_text(messages)
    body.check_continue_final_message()
    if body.continue_final_message:
        parse_assistant_prefill(messages, chat_format.thinking)
    check_parameter_schemas_are_json(tool.function for tool in tools)
    check_message_sizes(text_processor, messages, max_model_len, body.offered_tools)
    prepared, template = tool_prompts.prepare_tool_conversation(
        chat_format.format_name, messages, body.offered_tools, writes_calls=chat_format.writes_calls
    )
    if template_kwargs:
        template = {**template, "options": template_kwargs}
    return chat_format, prepared, template


def _rendered_template_response(
    text_processor: TextProcessor, body: ApplyTemplateRequest, max_model_len: int
) -> SurrogateSafeJsonResponse:
    if body.messages is None:
        raise RequestError("messages: field required")
    chat_format, messages, template = chat_format_and_render_arguments(
        text_processor, body, max_model_len
    )
    if body.continue_final_message:
        text = chat_format.render_with_prefill(messages, **template)
    else:
        text = chat_format.render(messages, body.add_generation_prompt is not False, **template)
    return SurrogateSafeJsonResponse({"prompt": text})


def _token_piece(tokenizer: Tokenizer | None, id: int) -> str | list[int]:
    data = token_bytes(tokenizer, id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
