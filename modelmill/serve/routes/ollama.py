"""Ollama's API: /api/chat, generate, embed, and the list of models."""

from __future__ import annotations

import json
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from modelmill import __version__
from modelmill.request_output_state import RequestOutputState
from modelmill.runtime.sequence import RequestLimits
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.catalogue.keep_alive import parse_keep_alive
from modelmill.serve.chat_answer import ChatAnswerSplitter, streamed_or_whole_response
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.dialects.ollama_answer import (
    NANOSECONDS_PER_SECOND,
    OllamaAnswerBuilder,
    PlainTextSplitter,
    load_or_unload_response,
)
from modelmill.serve.dialects.ollama_models import (
    NEVER_EXPIRES_SECONDS,
    OLLAMA_ERRORS,
    model_entry,
    running_entry,
    show_model,
)
from modelmill.serve.dialects.ollama_schema import (
    DEFAULT_TAG,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGenerationFields,
    OllamaModelFields,
    OllamaShowRequest,
)
from modelmill.serve.dialects.thinking import with_thinking
from modelmill.serve.embeddings_schema import EmbeddingRequest, normalize_and_encode_embedding
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineState
from modelmill.serve.errors import invalid_request
from modelmill.serve.openai_format import ChatLogprobsFormatter, SurrogateSafeJsonResponse
from modelmill.serve.routes.chat import converted_chat_request_state, submit_converted_chat
from modelmill.serve.routes.common import (
    begin_accounting_and_lease_engine,
    get_service,
    prepare_and_submit_requests,
)
from modelmill.serve.routes.completions import submit_converted_completion
from modelmill.serve.routes.embeddings import embedding_request_states
from modelmill.serve.segmentation_messages import SEGMENTATION_ENGINE_TYPE
from modelmill.serve.service import Service
from modelmill.serve.stream import wait_or_disconnect
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute, responses=OLLAMA_ERRORS)
bodyless_router = APIRouter(responses=OLLAMA_ERRORS)
"""Routes without a body."""
OLLAMA_VERSION = "0.12.11"
"""Of the newest part of its API that is here: log-probabilities."""


@router.post("/api/chat")
async def chat(body: OllamaChatRequest, request: Request) -> Any:
    """Answer a conversation: the same text as /v1/chat/completions returns for it."""
    if not body.messages:
        return await _load_or_unload_model(request, body, is_chat=True)
    _, engine = await acquire_service_and_named_engine(request, body)
    return await _answer_chat(body, request, engine, is_chat=True)


@router.post("/api/generate")
async def generate(body: OllamaGenerateRequest, request: Request) -> Any:
    """Answer a prompt through the chat template, or continue it with ``raw``."""
    if not (body.prompt or body.images or body.suffix):
        return await _load_or_unload_model(request, body, is_chat=False)
    service, engine = await acquire_service_and_named_engine(request, body)
    if not body.skips_chat_template and await service.run_in_thread(_has_chat_format, engine):
        return await _answer_chat(body, request, engine, is_chat=False)
    engine.check_capacity(1)
    completion, handle = await submit_converted_completion(request, engine, body)
    formatter = ChatLogprobsFormatter(engine.text_processor.tokenizer, body.top_logprobs or 0)
    answer = OllamaAnswerBuilder(
        body.model,
        PlainTextSplitter(),
        handle,
        formatter,
        is_chat=False,
        warnings=completion.warnings,
    )
    return await streamed_or_whole_response(request, handle, answer, streams=body.streams)


@router.post("/api/embed")
async def embed(body: OllamaEmbedRequest, request: Request) -> Any:
    """Texts as vectors, as /v1/embeddings."""
    _, engine = await acquire_service_and_named_engine(request, body)
    states = await _run_embedding_requests(request, engine, body, truncate=body.truncate)
    vectors = [_embedding_vector(state, body.dimensions) for state in states]
    seconds = max((state.output.seconds or 0.0 for state in states), default=0.0)
    return Response(
        json.dumps(
            {
                "model": body.model,
                "embeddings": vectors,
                "total_duration": int(seconds * NANOSECONDS_PER_SECOND),
                "load_duration": 0,
                "prompt_eval_count": sum(len(each.output.prompt_token_ids) for each in states),
            }
        ),
        media_type="application/json",
    )


@router.post("/api/embeddings")
async def embeddings(body: OllamaEmbeddingsRequest, request: Request) -> Any:
    """One text as a vector: the older form of /api/embed."""
    _, engine = await acquire_service_and_named_engine(request, body)
    many = OllamaEmbedRequest.model_validate(
        {"model": body.model, "input": body.prompt, "cache_salt": body.cache_salt}
    )
    states = await _run_embedding_requests(request, engine, many, truncate=None)
    vectors = [_embedding_vector(state, None) for state in states]
    return SurrogateSafeJsonResponse({"embedding": vectors[0] if vectors else []})


@router.post("/api/show")
async def show(body: OllamaShowRequest, request: Request) -> Any:
    """Describe an engine."""
    name = body.model or body.name
    if name is None:
        raise invalid_request("model: field required", "model")
    service, engine = find_service_and_engine(request, name)
    await service.run_in_thread(engine.preload_text_processor)
    return SurrogateSafeJsonResponse(await service.run_in_thread(show_model, engine))


@bodyless_router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """List the engines that generate text."""
    service = get_service(request)
    entries = await service.run_in_thread(
        lambda: [model_entry(name, engine) for name, engine in _named_text_engines(service)]
    )
    return {"models": entries}


@bodyless_router.get("/api/ps")
async def running_models(request: Request) -> dict[str, Any]:
    """List the engines that are loaded."""
    service = get_service(request)
    entries = await service.run_in_thread(
        lambda: [
            running_entry(name, engine, _expires_at_unix_seconds(service, engine))
            for name, engine in _named_text_engines(service)
            if engine.state is EngineState.READY
        ]
    )
    return {"models": entries}


@bodyless_router.get("/api/version")
async def version() -> dict[str, str]:
    """The version of Ollama whose API this is, and that of modelmill.

    Clients refuse older ones: GitHub Copilot those before 0.6.4.
    """
    return {"version": OLLAMA_VERSION, "modelmill": __version__}


def find_service_and_engine(request: Request, name: str) -> tuple[Service, EngineClient]:
    """An engine by name; the tag that Ollama's clients add to names without one is dropped.

    Raises:
        ApiError: there is no such engine.
    """
    service = get_service(request)
    if name not in service.engines:
        name = name.removesuffix(DEFAULT_TAG)
    return service, service.get_engine(name)


async def acquire_service_and_named_engine(
    request: Request, body: OllamaModelFields
) -> tuple[Service, EngineClient]:
    """As ``acquire_service_and_engine``, with Ollama's names."""
    service, engine = find_service_and_engine(request, body.model)
    return service, await begin_accounting_and_lease_engine(request, engine, body.keep_alive)


def _expires_at_unix_seconds(service: Service, engine: EngineClient) -> float:
    """When a loaded engine is unloaded if nothing uses it, in seconds since 1970."""
    model = None if service.catalogue is None else service.catalogue.find_model_by_client(engine)
    if service.catalogue is None or model is None:
        return NEVER_EXPIRES_SECONDS
    return min(time.time() + service.catalogue.seconds_to_expiry(model), NEVER_EXPIRES_SECONDS)


def _named_text_engines(service: Service) -> list[tuple[str, EngineClient]]:
    return [
        (name, engine)
        for name, engine in service.engines.items()
        if engine.engine_type != SEGMENTATION_ENGINE_TYPE
    ]


async def _load_or_unload_model(
    request: Request, body: OllamaGenerationFields, *, is_chat: bool
) -> Response:
    """Load the model, or unload it with ``keep_alive`` 0."""
    service, engine = find_service_and_engine(request, body.model)
    unloads = body.keep_alive is not None and parse_keep_alive(body.keep_alive) == 0
    model = None if service.catalogue is None else service.catalogue.find_model_by_client(engine)
    warnings = []
    if not unloads:
        await begin_accounting_and_lease_engine(request, engine, body.keep_alive)
    elif service.catalogue is not None and model is not None and not model.pinned:
        await service.catalogue.unload(model)
    else:
        cause = "it is pinned" if model is not None else "it is not of a catalogue"
        warnings.append(f"keep_alive: {engine.name} stays loaded: {cause}")
    reason = "unload" if unloads else "load"
    line = json.dumps(load_or_unload_response(body.model, is_chat, reason, warnings)) + "\n"
    kind = OllamaAnswerBuilder.media_type if body.streams else "application/json"
    return Response(line, media_type=kind)


def _has_chat_format(engine: EngineClient) -> bool:
    return engine.text_processor.chat_format is not None


async def _answer_chat(
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: Request,
    engine: EngineClient,
    *,
    is_chat: bool,
) -> Any:
    engine.check_capacity(1)
    chat_body, handle = await submit_converted_chat(request, engine, _prepare_chat, body)
    processor = engine.text_processor
    formatter = ChatLogprobsFormatter(processor.tokenizer, chat_body.top_logprobs or 0)
    source = ChatAnswerSplitter(chat_body, processor, handle.request_states[0])
    answer = OllamaAnswerBuilder(
        body.model, source, handle, formatter, is_chat=is_chat, warnings=chat_body.warnings
    )
    return await streamed_or_whole_response(request, handle, answer, streams=body.streams)


def _prepare_chat(
    text_processor: TextProcessor,
    body: OllamaChatRequest | OllamaGenerateRequest,
    max_model_len: int,
) -> tuple[ChatRequest, RequestOutputState]:
    chat_body = with_thinking(
        body.to_chat_request(), text_processor, body.thinks, effort=body.effort
    )
    return chat_body, converted_chat_request_state(
        text_processor,
        chat_body,
        max_model_len,
        body.rename_error_fields,
        body.image_field_paths,
    )


async def _run_embedding_requests(
    request: Request, engine: EngineClient, body: OllamaEmbedRequest, *, truncate: bool | None
) -> list[RequestOutputState]:
    """Run the inputs; by default those that are too long are cut at their end, as in Ollama.

    Without inputs the model is loaded, and nothing else happens.
    """
    inputs = body.inputs()
    engine.check_capacity(max(len(inputs), 1))
    if not inputs:
        return []
    states, handle = await prepare_and_submit_requests(
        request,
        engine,
        _embedding_request_states,
        body,
        truncate is not False,
        engine.request_limits,
        get_states=list,
    )
    await wait_or_disconnect(request, handle)
    return states


def _embedding_request_states(
    text_processor: TextProcessor, body: OllamaEmbedRequest, truncate: bool, limits: RequestLimits
) -> list[RequestOutputState]:
    inputs: list[Any] = list(body.inputs())
    tokenizer, most = text_processor.tokenizer, min(limits.max_len, limits.kv_tokens)
    # a text of fewer bytes has fewer tokens
    if truncate and tokenizer is not None and any(4 * len(text) > most for text in inputs):
        most_chars = most * text_processor.max_token_bytes
        inputs = [tokenizer.encode(text[:most_chars])[:most] for text in inputs]
    made = EmbeddingRequest.model_validate(
        {"model": body.model, "input": inputs, "cache_salt": body.cache_salt}
    )
    return embedding_request_states(text_processor, made, limits)


def _embedding_vector(state: RequestOutputState, dimensions: int | None) -> list[float]:
    assert state.output.embedding is not None, "the request has an embedding"
    vector = normalize_and_encode_embedding(state.output.embedding, dimensions, as_base64=False)
    assert isinstance(vector, list)
    return vector
