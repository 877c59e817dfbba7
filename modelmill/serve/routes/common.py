"""What the routes need of a request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from modelmill.core.errors import RequestError
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.serve import errors
from modelmill.serve.engine import Engine
from modelmill.serve.service import Service
from modelmill.serve.ticket import Ticket


def service_of(request: Request) -> Service:
    """The service that the app was made for."""
    found: Service = request.app.state.service
    return found


def fresh(prefix: str, between: str = "-") -> str:
    """An id that nobody can guess."""
    return f"{prefix}{between}{secrets.token_hex(16)}"


def submitted(request: Request, engine: Engine, dialogues: Sequence[Dialogue]) -> Ticket:
    """The requests, queued; their counts are logged when the response has ended."""
    ticket = engine.submit(dialogues)
    request.scope["modelmill.ticket"], request.scope["modelmill.engine"] = ticket, engine.name
    return ticket


def check_sizes(language: Language, messages: Sequence[Mapping[str, Any]], longest: int) -> None:
    """Raises RequestError for a conversation of more than ``longest`` tokens, whatever becomes of it: before work."""
    sizes = []
    for message in messages:
        for text in _texts(message.get("content")):
            language.check_size(text, longest)
            sizes.append(len(text))
    if sum(sizes) > longest * language.longest_token:
        raise RequestError(
            f"the messages have {sum(sizes)} characters, this engine takes {longest} tokens; shorten them"
        )


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def finish_of(reason: str | None) -> str | None:
    """OpenAI's finish_reason. Raises ApiError for what the engine gave up."""
    if reason == "abort":
        raise errors.ApiError(503, "the engine gave the request up; try again", errors.SERVER)
    return reason
