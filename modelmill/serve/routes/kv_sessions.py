"""POST /v1/sessions/save and /v1/sessions/restore: KV pages of a conversation on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError
from modelmill.core.types import SamplingParams
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.errors import ApiError
from modelmill.serve.kv_session_schema import RestoreSessionRequest, SaveSessionRequest
from modelmill.serve.openai_format import SurrogateSafeJsonResponse
from modelmill.serve.routes.common import (
    acquire_service_and_engine,
    get_service,
    message_has_images,
    prepare_and_submit_requests,
)
from modelmill.serve.routes.tokenize import chat_format_and_render_arguments, encode_prompt
from modelmill.serve.service import POLICY_SCOPE_KEY
from modelmill.serve.stream import run_while_connected, wait_or_disconnect
from modelmill.serve.worker_messages import KvSessionReply
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)
SESSION_SUFFIX = ".session"


@router.post("/v1/sessions/save")
async def save(body: SaveSessionRequest, request: Request) -> Any:
    """Compute a prompt and write its KV pages to a file of the session folder."""
    folder = key_session_folder(request)
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    engine.check_capacity(1)
    states, handle = await prepare_and_submit_requests(
        request,
        engine,
        _prefill_request_states,
        body,
        engine.request_limits.max_len,
        get_states=list,
    )
    await wait_or_disconnect(request, handle)
    path = folder / (body.name + SESSION_SUFFIX)
    left = await service.run_in_thread(
        _make_folder_and_remaining_quota,
        service.limits.session_dir,
        path,
        service.limits.session_bytes,
    )
    reply = await run_while_connected(
        request.receive, engine.session_client.save(path, states[0].request, left)
    )
    return _session_response(body.name, engine, reply)


@router.post("/v1/sessions/restore")
async def restore(body: RestoreSessionRequest, request: Request) -> Any:
    """Put the KV pages of a saved session into the prefix cache."""
    path = key_session_folder(request) / (body.name + SESSION_SUFFIX)
    if not await get_service(request).run_in_thread(path.is_file):
        raise missing_session_error(body.name)
    _, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    assert engine.request_limits is not None  # raises for an engine that segments
    reply = await run_while_connected(
        request.receive, engine.session_client.restore(path, body.cache_salt or "")
    )
    return _session_response(body.name, engine, reply)


def missing_session_error(name: str) -> ApiError:
    """The error for a name without a file."""
    return ApiError(404, f"there is no session {name!r}", param="name", code="session_not_found")


def key_session_folder(request: Request) -> Path:
    """The folder of the request's key, whose sessions other keys cannot restore.

    Raises:
        ApiError: 404, the server has no session folder.
    """
    root = get_service(request).limits.session_dir
    if root is None:
        raise ApiError(
            404, "this server saves no sessions; start it with --session-dir", code="no_sessions"
        )
    policy = request.scope.get(POLICY_SCOPE_KEY)
    if policy is None:
        return root
    owner = hashlib.sha256(b"modelmill session owner\0" + policy.key.encode()).hexdigest()
    return root / owner[:32]


def _make_folder_and_remaining_quota(root: Path, path: Path, max_bytes: int) -> int:
    """Make the folder of a file, and return the bytes that it may take."""
    path.parent.mkdir(parents=True, exist_ok=True)
    others = (each for each in root.rglob("*") if each.is_file() and each != path)
    return max_bytes - sum(each.stat().st_size for each in others)


def _prefill_request_states(
    text_processor: TextProcessor, body: SaveSessionRequest, max_model_len: int
) -> list[RequestOutputState]:
    """A request that computes the prompt and generates nothing.

    Raises:
        RequestError: there is no prompt, or more than one.
    """
    prompts = (body.prompt, body.content, body.messages)
    if body.tokens is not None and any(each is not None for each in prompts):
        raise RequestError("prompt, messages or tokens: give one of them")
    params = SamplingParams(max_tokens=0)
    if any(message_has_images(each) for each in body.messages or ()):
        if body.prompt is not None or body.content is not None:
            raise RequestError("prompt or messages: give one of them")
        _, messages, template = chat_format_and_render_arguments(
            text_processor, body, max_model_len
        )
        begins = body.add_generation_prompt is not False
        salt = body.cache_salt or ""
        return [
            text_processor.chat_request(
                messages,
                params,
                cache_salt=salt,
                add_generation_prompt=begins,
                continues=bool(body.continue_final_message),
                **template,
            )
        ]
    ids = encode_prompt(text_processor, body, max_model_len) if body.tokens is None else body.tokens
    if not ids:
        raise RequestError("the session has no tokens; give at least one")
    prompt = {"prompt_token_ids": ids, "cache_salt": body.cache_salt}
    return [text_processor.request(prompt, params)]


def _session_response(
    name: str, engine: EngineClient, reply: KvSessionReply
) -> SurrogateSafeJsonResponse:
    return SurrogateSafeJsonResponse(
        {"name": name, "model": engine.name, "tokens": reply.tokens, "bytes": reply.nbytes}
    )
