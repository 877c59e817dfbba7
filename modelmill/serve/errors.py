"""Every way of saying no, in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import CapacityError, ModelmillError, TokenizerError, UsageError
from modelmill.core.quoting import one_line
from modelmill.serve.engine_client import EngineNotReady, QueueFull, ServerShuttingDown
from modelmill.serve.request_handle import WorkerLost

INVALID_REQUEST_ERROR = "invalid_request_error"
SERVER_ERROR = "server_error"
MAX_MESSAGE_CHARS = 500
"""Most characters of a message."""
_WORD = re.compile(r"[a-z_]+")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        error_type: str = INVALID_REQUEST_ERROR,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.error_type = status, message, error_type
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is at fault."""
    return ApiError(400, message, INVALID_REQUEST_ERROR, param, code)


def to_api_error(error: BaseException, field_names: frozenset[str] = frozenset()) -> ApiError:
    """The answer for what was raised. field_names: of the request, of which the message may name
    one.

    What is none of ours tells nothing about itself: its text may hold anything.
    """
    if isinstance(error, ApiError):
        return error
    text = str(error)
    if isinstance(error, QueueFull):
        return ApiError(
            429, text, "rate_limit_error", None, "rate_limit_exceeded", {"Retry-After": "1"}
        )
    if isinstance(error, EngineNotReady):
        code = "draining" if isinstance(error, ServerShuttingDown) else "not_ready"
        return ApiError(503, text, "service_unavailable_error", None, code, {"Retry-After": "2"})
    if isinstance(error, WorkerLost):
        return ApiError(503, text, SERVER_ERROR, None, "engine_restarted", {"Retry-After": "2"})
    if isinstance(error, CapacityError):
        return ApiError(503, text, SERVER_ERROR, None, "out_of_memory")
    if isinstance(error, (UsageError, TokenizerError)):
        return invalid_request(
            one_line(text, MAX_MESSAGE_CHARS),
            _field_in_message(text, field_names),
            _error_code(text),
        )
    if isinstance(error, ModelmillError):
        return ApiError(500, "the engine cannot do this; the server's log says why", SERVER_ERROR)
    return ApiError(500, "something went wrong in the server; its log says what", SERVER_ERROR)


def _field_in_message(text: str, field_names: frozenset[str]) -> str | None:
    """The field that a message begins with."""
    word = _WORD.match(text)
    if word is not None and word[0] in field_names:
        return word[0]
    asked = next((name for name in ("input", "messages", "prompt") if name in field_names), None)
    return asked if text.startswith(("the prompt", "the messages")) else None


def _error_code(text: str) -> str | None:
    long = text.startswith(("the prompt has ", "the messages ")) and text.endswith(
        ("; shorten it", "; shorten them")
    )
    return "context_length_exceeded" if long else None
