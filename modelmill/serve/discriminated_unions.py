"""Discriminated unions in requests: objects whose ``type`` says which model they have.

They are parsed one by one, so that an error names its place and one invalid object ends the work.
``make_converted_request`` makes the request that one of another API becomes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from modelmill.core.errors import RequestError
from modelmill.serve.strict_models import StrictModel
from modelmill.serve.validation_errors import summarize_errors

M = TypeVar("M", bound=StrictModel)


def parse_by_type_field(
    raw: Any,
    path: str,
    models: Mapping[str, type[M]],
    noun: str,
    default: str | None = None,
    resolved_types: Sequence[str] = (),
) -> M:
    """Parse an object as the model of its type.

    Args:
        raw: the object.
        path: where it is, for messages.
        models: type → model.
        noun: what such objects are, in the plural.
        default: type of an object without one.
        resolved_types: further types for the message, which were replaced before.

    Raises:
        RequestError: it is invalid; the message names the place.
    """
    if not isinstance(raw, Mapping):
        raise RequestError(f"{path} must be an object")
    object_type = raw.get("type", default)
    model = models.get(object_type) if isinstance(object_type, str) else None
    if model is None:
        raise RequestError(
            f"{path}: {noun} of type {str(object_type)[:40]!r} are not supported; there are "
            f"{', '.join((*models, *resolved_types))}"
        )
    return parse_object(raw, path, model)


def parse_object(raw: Any, path: str, model: type[M]) -> M:
    """Parse an object; as ``parse_by_type_field``, with one model."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        line = _error_line(error, model)
    body = "the request's body"  # the object as a whole is invalid
    raise RequestError(path + (line.removeprefix(body) if line.startswith(body) else f".{line}"))


def make_converted_request(model: type[M], fields: Mapping[str, Any]) -> M:
    """Make a request of this server's core from the fields of another API's.

    Both APIs have limits of their own, so that a valid request may become one that is not.

    Raises:
        RequestError: it is invalid; the message names the field.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        line = _error_line(error, model)
    raise RequestError(line)


def _error_line(error: ValidationError, model: type[BaseModel]) -> str:
    _, line = summarize_errors(error.errors(include_url=False, include_input=False), model)
    return line
