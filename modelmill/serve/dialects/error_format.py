"""Errors as the dialect of a path writes them; OpenAI's form is ``ApiError.body``."""

from __future__ import annotations

from typing import Any

from modelmill.serve.errors import CONTEXT_LENGTH_EXCEEDED, ApiError

ANTHROPIC_PREFIX = "/v1/messages"
OLLAMA_PREFIX = "/api/"
LLAMA_CPP_PATHS = frozenset(
    ("/completion", "/infill", "/tokenize", "/detokenize", "/apply-template", "/props")
)
"""llama.cpp's own paths; vLLM has some of them, with errors of the same form."""
_ANTHROPIC_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_LLAMA_CPP_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}
_LLAMA_CPP_TOO_LONG = "exceed_context_size_error"
_ANTHROPIC_TOO_LONG = "prompt is too long"
"""Words of Anthropic's API, which has no code for it: Claude Code compacts where it reads them."""


def error_body(
    path: str, error: ApiError, request_id: str | None = None, *, for_anthropic: bool = False
) -> dict[str, Any]:
    """Return the JSON body of an error of a path.

    Args:
        path: of the request.
        error: to tell.
        request_id: for Anthropic's form.
        for_anthropic: whether a client of Anthropic's asked, on a path that OpenAI's clients share.
    """
    if for_anthropic or path.startswith(ANTHROPIC_PREFIX):
        return anthropic_error(error, request_id)
    if path in LLAMA_CPP_PATHS:
        return llama_cpp_error(error)
    return {"error": error.message} if path.startswith(OLLAMA_PREFIX) else error.body()


def anthropic_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """An error as Anthropic's API writes it; a request id only where it is known."""
    error_type = _ANTHROPIC_ERROR_TYPES.get(error.status, "invalid_request_error")
    message = error.message
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        counts = error.prompt_counts
        if counts is not None:
            # as Anthropic writes it: agents cut as much as both numbers say
            more = "" if counts.counts_all else "more than "
            message = f"{more}{counts.prompt} tokens > {counts.limit} maximum"
        message = f"{_ANTHROPIC_TOO_LONG}: {message}"
    body: dict[str, Any] = {"type": "error", "error": {"type": error_type, "message": message}}
    return body if request_id is None else {**body, "request_id": request_id}


def llama_cpp_error(error: ApiError) -> dict[str, Any]:
    """An error as llama.cpp's server writes it: the code is the status; the field is added."""
    detail: dict[str, Any] = {
        "code": error.status,
        "message": error.message,
        "type": _LLAMA_CPP_ERROR_TYPES.get(error.status, error.error_type),
        "param": error.param,
    }
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        detail["type"] = _LLAMA_CPP_TOO_LONG
        if error.prompt_counts is not None:
            detail["n_prompt_tokens"] = error.prompt_counts.prompt
            detail["n_ctx"] = error.prompt_counts.limit
    return {"error": detail}


def responses_error_event(error: ApiError) -> dict[str, Any]:
    """The event of an error in a stream of /v1/responses."""
    body = error.body()["error"]
    return {**body, "type": "error", "error": body}
