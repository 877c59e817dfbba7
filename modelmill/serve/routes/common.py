"""What the routes need of a request."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from modelmill.core.errors import RequestError
from modelmill.request_state import RequestState
from modelmill.serve import errors
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.request_handle import RequestHandle
from modelmill.serve.service import Service
from modelmill.text_processor import TextProcessor

T = TypeVar("T")


def get_service(request: Request) -> Service:
    """The service that the app was made for."""
    found: Service = request.app.state.service
    return found


def random_id(prefix: str, separator: str = "-") -> str:
    """An id that nobody can guess."""
    return f"{prefix}{separator}{secrets.token_hex(16)}"


async def submit_requests(
    request: Request,
    engine: EngineClient,
    make: Callable[..., T],
    *args: Any,
    get_states: Callable[[T], Sequence[RequestState]],
) -> tuple[T, RequestHandle]:
    """(``make(*args)``, its requests queued). Their counts are logged when the response has ended.

    make: called on a thread, where text becomes ids and ids what the worker is sent. get_states:
    its requests.
    """

    def prepared() -> tuple[T, list[bytes]]:
        made = make(*args)
        return made, engine.encode_requests(get_states(made))

    made, frames = await get_service(request).run_in_thread(prepared)
    ticket = engine.submit(get_states(made), frames)
    request.scope["modelmill.request_handle"], request.scope["modelmill.engine"] = (
        ticket,
        engine.name,
    )
    return made, ticket


def check_message_sizes(
    text_processor: TextProcessor,
    messages: Sequence[Mapping[str, Any]],
    max_model_len: int,
    tools: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Raises RequestError for a conversation of more than ``max_model_len`` tokens, whatever
    becomes of it.

    Everything that a template may write counts: texts, calls and their arguments, tools; pictures
    do not.
    """
    most = max_model_len * text_processor.max_token_bytes
    written = [part for message in messages for part in _template_values(message)]
    if _exceeds_chars([*written, *tools], most):
        what = "the messages and tools" if tools else "the messages"
        raise RequestError(
            f"{what} have more than {most} characters, this engine takes {max_model_len} tokens; "
            "shorten them"
        )


def _template_values(message: Mapping[str, Any]) -> Iterator[Any]:
    """What a template may write of a message."""
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            yield from (
                part.get("text")
                for part in value
                if isinstance(part, Mapping) and not _is_image_part(part)
            )
        else:
            yield value


def _is_image_part(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image_url", "image")


def _exceeds_chars(values: Sequence[Any], max_chars: int) -> bool:
    """Whether JSON data has more characters than that however it is written.

    It may be nested without end.
    """
    size, left = 0, list(values)
    while left and size <= max_chars:
        value = left.pop()
        if isinstance(value, Mapping):
            left += value.keys()
            left += value.values()
        elif isinstance(value, list):
            left += value
        size += len(value) if isinstance(value, str) else 1
    return size > max_chars


def openai_finish_reason(reason: str | None) -> str | None:
    """OpenAI's finish_reason. Raises ApiError for what the engine gave up."""
    if reason == "abort":
        raise errors.ApiError(503, "the engine gave the request up; try again", errors.SERVER_ERROR)
    return reason
