"""Helpers shared by the routes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from modelmill.core.errors import PromptTooLong, RequestError
from modelmill.request_output_state import RequestOutputState
from modelmill.serve import errors
from modelmill.serve.access.request_accounting import NO_POLICY, RequestAccounting
from modelmill.serve.catalogue.keep_alive import KeepAliveInput, parse_keep_alive
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.request_handle import HttpRequestHandle
from modelmill.serve.service import (
    ACCOUNTING_SCOPE_KEY,
    INTERNAL_SCOPE_KEY,
    LEASES_SCOPE_KEY,
    POLICY_SCOPE_KEY,
    PRIORITY_SCOPE_KEY,
    Service,
)
from modelmill.serve.stream import run_while_connected
from modelmill.serve.tool_image_placeholders import is_image_part
from modelmill.text_processor import TextProcessor

T = TypeVar("T")


def get_service(request: Request) -> Service:
    """The service that the app was made for."""
    service: Service = request.app.state.service
    return service


async def acquire_service_and_engine(
    request: Request, model: str, keep_alive: KeepAliveInput | None = None
) -> tuple[Service, EngineClient]:
    """The service, and its engine with a model's name, leased for the request.

    Raises:
        ApiError: there is no such engine.
    """
    service = get_service(request)
    return service, await begin_accounting_and_lease_engine(
        request, service.get_engine(model), keep_alive
    )


async def begin_accounting_and_lease_engine(
    request: Request, engine: EngineClient, keep_alive: KeepAliveInput | None = None
) -> EngineClient:
    """Wait until an engine of the catalogue is loaded; it stays so until the request has ended.

    Args:
        request: the HTTP request; leaving ends the wait.
        engine: one that is always loaded is returned at once.
        keep_alive: how long it stays loaded after that, as in Ollama.

    Raises:
        KeyLimitReached: a limit of the request's key is reached.
        RequestError: ``keep_alive`` is no duration, or the key may not send this priority.
        ModelmillError: the engine cannot be loaded now.
        ClientDisconnect: the client has disconnected.
    """
    seconds = None if keep_alive is None else parse_keep_alive(keep_alive)
    if ACCOUNTING_SCOPE_KEY not in request.scope:
        request.scope[ACCOUNTING_SCOPE_KEY] = get_service(request).begin_accounting(
            request.scope.get(POLICY_SCOPE_KEY, NO_POLICY), request.scope.get(PRIORITY_SCOPE_KEY)
        )
    catalogue = get_service(request).catalogue
    model = None if catalogue is None else catalogue.find_model_by_client(engine)
    if catalogue is None or model is None or INTERNAL_SCOPE_KEY in request.scope:
        return engine

    async def take() -> EngineClient:
        lease = await catalogue.acquire_lease(model, seconds)
        request.scope.setdefault(LEASES_SCOPE_KEY, []).append(lease)
        return lease.engine

    return await run_while_connected(request.receive, take())


def random_id(prefix: str, separator: str = "-") -> str:
    """An id that cannot be guessed."""
    return f"{prefix}{separator}{secrets.token_hex(16)}"


async def prepare_and_submit_requests(
    request: Request,
    engine: EngineClient,
    make: Callable[..., T],
    *args: Any,
    get_states: Callable[[T], Sequence[RequestOutputState]],
) -> tuple[T, HttpRequestHandle]:
    """Prepare requests on a thread and queue them; their token counts are logged with the response.

    Args:
        request: the HTTP request.
        engine: to queue at.
        make: called on a thread with the engine's text processor and ``args``; tokenizes and
            validates.
        *args: of ``make``.
        get_states: the requests in the result of ``make``.

    Returns:
        The result of ``make`` and the handle of its requests.
    """

    def prepare() -> tuple[T, list[bytes]]:
        result = make(engine.text_processor, *args)
        states = get_states(result)
        use: RequestAccounting = request.scope[ACCOUNTING_SCOPE_KEY]
        use.set_queue_order(engine.fair_queue, states)
        return result, engine.encode_requests(states)

    result, frames = await get_service(request).run_in_thread(prepare)
    handle = engine.submit(get_states(result), frames)
    request.scope["modelmill.request_handle"], request.scope["modelmill.engine"] = (
        handle,
        engine.name,
    )
    return result, handle


def check_message_sizes(
    text_processor: TextProcessor,
    messages: Sequence[Mapping[str, Any]],
    max_model_len: int,
    tools: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Reject a conversation that has more than ``max_model_len`` tokens however it is tokenized.

    Everything that a template may insert counts: texts, calls and their arguments, tools. Images do
    not count.

    Raises:
        PromptTooLong: the messages are too long.
    """
    max_chars = max_model_len * text_processor.max_token_bytes
    parts = [part for message in messages for part in _iter_template_values(message)]
    if _exceeds_total_chars([*parts, *tools], max_chars):
        subject = "the messages and tools" if tools else "the messages"
        raise PromptTooLong(
            f"{subject} have more than {max_chars} characters, this engine takes {max_model_len} "
            "tokens; shorten them"
        )


def _iter_template_values(message: Mapping[str, Any]) -> Iterator[Any]:
    """What a template may write of a message."""
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            yield from (
                part.get("text")
                for part in value
                if isinstance(part, Mapping) and not is_image_part(part)
            )
        else:
            yield value


def message_has_images(message: Mapping[str, Any]) -> bool:
    """Whether a message of a conversation contains pictures."""
    content = message.get("content")
    return isinstance(content, list) and any(map(is_image_part, content))


@contextmanager
def prefixing_errors_with_prompt_name(name: str | None) -> Iterator[None]:
    """Put the name of one of several prompts before an error about it; None: there is one."""
    try:
        yield
    except RequestError as error:
        if name is None or not str(error).startswith("the prompt"):
            raise
        raise error.reworded(f"{name}: {error}") from None


def _exceeds_total_chars(values: Sequence[Any], max_chars: int) -> bool:
    """Whether JSON data has more than ``max_chars`` characters in any serialization.

    Works without recursion, for any depth of nesting.
    """
    size, remaining = 0, list(values)
    while remaining and size <= max_chars:
        value = remaining.pop()
        if isinstance(value, Mapping):
            remaining += value.keys()
            remaining += value.values()
        elif isinstance(value, list):
            remaining += value
        size += len(value) if isinstance(value, str) else 1
    return size > max_chars


def openai_finish_reason(reason: str | None) -> str | None:
    """Return OpenAI's finish_reason.

    Raises:
        ApiError: the engine aborted the request.
    """
    if reason == "abort":
        raise errors.ApiError(503, "the engine aborted the request; try again", errors.SERVER_ERROR)
    return reason
