"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import (
    CapacityError,
    ModelmillError,
    PromptTokenCounts,
    PromptTooLong,
    TokenizerError,
    UsageError,
)
from modelmill.core.quoting import truncate_to_one_line
from modelmill.serve.access.key_limits import KeyLimitReached
from modelmill.serve.catalogue.model_loader import ModelLoadFailed
from modelmill.serve.engine_state import EngineNotReady, QueueFull, ServerShuttingDown
from modelmill.serve.request_handle import WorkerLost

INVALID_REQUEST_ERROR = "invalid_request_error"
SERVER_ERROR = "server_error"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Code of a prompt that is too long; agents shorten the conversation then."""
MAX_MESSAGE_CHARS = 500
"""Longest message in characters."""
PROMPT_FIELDS = ("input", "messages", "input_prefix", "prompt", "tokens", "content")
"""Fields that a message about the prompt, or the messages, is about."""
TEMPLATE_OPTIONS_FIELD, TEMPLATE_OPTION_SUBJECT = "chat_template_kwargs", "the template option"
"""The field with a chat template's options, and how a message about one of them begins."""
_WORD = re.compile(r"[a-z_][a-z_0-9]*")


class ApiError(Exception):
    """An error that is answered as an HTTP response."""

    def __init__(
        self,
        status: int,
        message: str,
        error_type: str = INVALID_REQUEST_ERROR,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        prompt_counts: PromptTokenCounts | None = None,
    ) -> None:
        """Make an error.

        Args:
            status: of the response.
            message: one line.
            error_type: a class of errors, in OpenAI's words.
            param: the field that is wrong.
            code: what programs look at.
            headers: of the response.
            prompt_counts: of a prompt that is too long.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.prompt_counts = prompt_counts

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error response."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Error 400: the request is invalid."""
    return ApiError(400, message, INVALID_REQUEST_ERROR, param, code)


def to_api_error(
    error: BaseException,
    field_names: frozenset[str] = frozenset(),
    fields_set: frozenset[str] = frozenset(),
) -> ApiError:
    """Convert an exception to an error response.

    The text of unexpected exceptions is not sent: it may contain anything.

    Args:
        error: to convert.
        field_names: of the request; the message may name one of them.
        fields_set: those that the request has.
    """
    if isinstance(error, ApiError):
        return error
    text = str(error)
    if isinstance(error, QueueFull):
        return ApiError(
            429, text, "rate_limit_error", None, "rate_limit_exceeded", {"Retry-After": "1"}
        )
    if isinstance(error, KeyLimitReached):
        headers = {"Retry-After": str(error.retry_after)}
        return ApiError(429, text, "rate_limit_error", None, "rate_limit_exceeded", headers)
    if isinstance(error, EngineNotReady):
        code = "draining" if isinstance(error, ServerShuttingDown) else "not_ready"
        return ApiError(503, text, "service_unavailable_error", None, code, {"Retry-After": "2"})
    if isinstance(error, WorkerLost):
        return ApiError(503, text, SERVER_ERROR, None, "engine_restarted", {"Retry-After": "2"})
    if isinstance(error, ModelLoadFailed):
        text = truncate_to_one_line(text, MAX_MESSAGE_CHARS)
        return ApiError(503, text, SERVER_ERROR, "model", "model_load_failed", {"Retry-After": "5"})
    if isinstance(error, CapacityError):
        return ApiError(503, text, SERVER_ERROR, None, "out_of_memory")
    if isinstance(error, (UsageError, TokenizerError)):
        field, line = (
            _field_in_message(text, field_names, fields_set),
            truncate_to_one_line(text, MAX_MESSAGE_CHARS),
        )
        if not isinstance(error, PromptTooLong):
            return invalid_request(line, field)
        return ApiError(
            400, line, param=field, code=CONTEXT_LENGTH_EXCEEDED, prompt_counts=error.counts
        )
    if isinstance(error, ModelmillError):
        return ApiError(500, "the engine failed; see the server's log", SERVER_ERROR)
    return ApiError(500, "internal server error; see the server's log", SERVER_ERROR)


def _field_in_message(
    text: str, field_names: frozenset[str], fields_set: frozenset[str]
) -> str | None:
    """The field that a message begins with, or of the prompt or option that it is about."""
    word = _WORD.match(text)
    if word is not None and word[0] in field_names:
        return word[0]
    if text.startswith(TEMPLATE_OPTION_SUBJECT) and TEMPLATE_OPTIONS_FIELD in fields_set:
        return TEMPLATE_OPTIONS_FIELD
    prompt_field = next((name for name in PROMPT_FIELDS if name in fields_set), None)
    return prompt_field if text.startswith(("the prompt", "the messages")) else None
