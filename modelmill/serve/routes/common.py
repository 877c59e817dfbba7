"""What the routes need of a request."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from modelmill.core.errors import RequestError
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.serve import errors
from modelmill.serve.engine import Engine
from modelmill.serve.service import Service
from modelmill.serve.ticket import Ticket

T = TypeVar("T")


def service_of(request: Request) -> Service:
    """The service that the app was made for."""
    found: Service = request.app.state.service
    return found


def fresh(prefix: str, between: str = "-") -> str:
    """An id that nobody can guess."""
    return f"{prefix}{between}{secrets.token_hex(16)}"


async def submitted(
    request: Request, engine: Engine, make: Callable[..., T], *args: Any, of: Callable[[T], Sequence[Dialogue]]
) -> tuple[T, Ticket]:
    """(``make(*args)``, its requests queued). Their counts are logged when the response has ended.

    make: called on a thread, where text becomes ids and ids what the worker is sent. of: the requests of what it made.
    """

    def prepared() -> tuple[T, list[bytes]]:
        made = make(*args)
        return made, engine.frames(of(made))

    made, frames = await service_of(request).aside(prepared)
    ticket = engine.submit(of(made), frames)
    request.scope["modelmill.ticket"], request.scope["modelmill.engine"] = ticket, engine.name
    return made, ticket


def check_sizes(
    language: Language,
    messages: Sequence[Mapping[str, Any]],
    longest: int,
    tools: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Raises RequestError for a conversation of more than ``longest`` tokens, whatever becomes of it: before work.

    Everything that a template may write counts: texts, calls and their arguments, tools; pictures do not.
    """
    most = longest * language.longest_token
    written = [part for message in messages for part in _written(message)]
    if _exceeds([*written, *tools], most):
        what = "the messages and tools" if tools else "the messages"
        raise RequestError(f"{what} have more than {most} characters, this engine takes {longest} tokens; shorten them")


def _written(message: Mapping[str, Any]) -> Iterator[Any]:
    """What a template may write of a message."""
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            yield from (part.get("text") for part in value if isinstance(part, Mapping) and not _shows(part))
        else:
            yield value


def _shows(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image_url", "image")


def _exceeds(values: Sequence[Any], most: int) -> bool:
    """Whether JSON data has more characters than that however it is written. It may be nested without end."""
    size, left = 0, list(values)
    while left and size <= most:
        value = left.pop()
        if isinstance(value, Mapping):
            left += value.keys()
            left += value.values()
        elif isinstance(value, list):
            left += value
        size += len(value) if isinstance(value, str) else 1
    return size > most


def finish_of(reason: str | None) -> str | None:
    """OpenAI's finish_reason. Raises ApiError for what the engine gave up."""
    if reason == "abort":
        raise errors.ApiError(503, "the engine gave the request up; try again", errors.SERVER)
    return reason
