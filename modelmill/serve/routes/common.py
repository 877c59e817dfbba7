"""What the routes need of a request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from starlette.requests import Request

from modelmill.dialogue import Dialogue
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


def finish_of(reason: str | None) -> str | None:
    """OpenAI's finish_reason. Raises ApiError for what the engine gave up."""
    if reason == "abort":
        raise errors.ApiError(503, "the engine gave the request up; try again", errors.SERVER)
    return reason
