"""Summarizes validation errors in one line: the field, and what is allowed.

pydantic reports an error for each type that a field may have; clients get one per field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from modelmill.core.module_lookup import most_similar_name
from modelmill.serve.compatibility_fields import (
    IGNORED_DESCRIPTION_PREFIX,
    OFF_ONLY_DESCRIPTION_PREFIX,
)
from modelmill.serve.strict_models import accepted_field_names

PydanticError = Mapping[str, Any]
MIN_HINT_SIMILARITY = 0.65
"""How similar a field's name must be to be hinted at: below, words alone are alike."""
EXPECTED_TYPE_PHRASES = {
    "string_type": "a string",
    "list_type": "a list",
    "int_type": "an integer",
    "bool_type": "true or false",
    "float_type": "a number",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
ERROR_TEXTS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "missing": "field required",
    "extra_forbidden": "unknown field",
    "value_error": "{error}",
    "string_unicode": "has an unpaired surrogate",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}",
    "union_tag_not_found": "{discriminator} is missing",
}


FIELD_SUGGESTIONS = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "thinking": "chat_template_kwargs.enable_thinking",
    "functions": "tools",
    "function_call": "tool_choice",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""Fields of older clients and other servers, and the field to use here."""


def summarize_errors(
    errors: Sequence[PydanticError], model: type[BaseModel] | None = None
) -> tuple[str | None, str]:
    """Summarize pydantic's errors.

    Args:
        errors: of pydantic.
        model: of the body; its field descriptions are used.

    Returns:
        The field and one line.
    """
    places = [tuple(part for part in error["loc"] if part != "body") for error in errors]
    if not places[0]:
        wrong = {"missing": "is empty; send an object", "string_unicode": _error_text(errors[0])}
        return None, f"the request's body {wrong.get(errors[0]['type'], 'must be an object')}"
    name = places[0][0]
    group = [(place, error) for place, error in zip(places, errors) if place[0] == name]
    param = name[:100] if isinstance(name, str) else None
    deepest = max(len(place) for place, _ in group)
    branches: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], PydanticError]]] = {}
    for place, error in group:
        branches.setdefault(_union_tags(place), []).append((place, error))
    candidates = [
        branch for branch in branches.values() if max(len(place) for place, _ in branch) == deepest
    ]
    # of several object types, those whose ``type`` matches
    candidates = [
        branch for branch in candidates if not any(map(_is_discriminator_mismatch, branch))
    ] or candidates
    if len(branches) == 1 or len(candidates) == 1:
        place, error = next(filter(_is_discriminator_mismatch, candidates[0]), candidates[0][0])
        hint = _suggest_field(place, error, model)
        return param, f"{_field_path(place, error)}: {_error_text(error)}{hint}"[:400]
    malformed = next((each for each in group if each[1]["type"] == "string_unicode"), None)
    if malformed is not None:  # it is a string, of the types that the field may have
        return param, f"{_field_path(*malformed)}: {_error_text(malformed[1])}"[:400]
    description = None if model is None else _field_description(model, str(name))
    if description is not None and description.startswith(
        (IGNORED_DESCRIPTION_PREFIX, OFF_ONLY_DESCRIPTION_PREFIX)
    ):
        description = None  # it says what becomes of the value, not what it must be
    expected = dict.fromkeys(_expected_type(error) or "of another type" for _, error in group)
    shared = _common_prefix([place for place, _ in group])
    return (
        param,
        f"{_field_path(shared, {})}: must be "
        f"{description if description and len(shared) == 1 else ' or '.join(expected)}"[:400],
    )


def _field_description(model: type[BaseModel], name: str) -> str | None:
    """The description of the field that requests call ``name``."""
    fields = model.model_fields.items()
    return next((field.description for own, field in fields if (field.alias or own) == name), None)


def _suggest_field(
    location: Sequence[Any], error: PydanticError, model: type[BaseModel] | None
) -> str:
    """A hint for an unknown field of the body."""
    if error["type"] != "extra_forbidden" or len(location) != 1 or model is None:
        return ""
    name = str(location[0])[:64]
    known = FIELD_SUGGESTIONS.get(name, "")
    suggestion = (
        known
        if known.partition(".")[0] in model.model_fields
        else most_similar_name(name, sorted(accepted_field_names(model)), MIN_HINT_SIMILARITY)
    )
    return f"; did you mean {suggestion}?" if suggestion else ""


def _union_tags(location: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(part for part in location if _is_union_tag(part))


def _is_union_tag(part: Any) -> bool:
    """Whether pydantic inserted the part for one of several types: str, list[int], Choice."""
    named = isinstance(part, str) and part != ""
    return named and (
        part in ("str", "int", "float", "bool") or part[0].isupper() or "[" in part or "-" in part
    )


def _is_discriminator_mismatch(located_error: tuple[tuple[Any, ...], PydanticError]) -> bool:
    return located_error[1]["type"] == "literal_error" and located_error[0][-1] == "type"


def _common_prefix(locations: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The longest common beginning."""
    size = 0
    while all(len(place) > size and place[size] == locations[0][size] for place in locations):
        size += 1
    return locations[0][: max(size, 1)]


def _field_path(location: Sequence[Any], error: PydanticError) -> str:
    """The path in source notation: tools[0].function.name."""
    text = ""
    for index, part in enumerate(location):
        last = index == len(location) - 1 and error.get("type") == "extra_forbidden"
        if isinstance(part, int):
            text += f"[{part}]"
        elif index == 0 or last or not _is_union_tag(part):
            text += f".{part}" if text else str(part)
    return text[:100]


def _expected_type(error: PydanticError) -> str | None:
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    return EXPECTED_TYPE_PHRASES.get(error["type"])


def _error_text(error: PydanticError) -> str:
    expected = _expected_type(error)
    if expected is not None:
        return f"must be {expected}"
    template = ERROR_TEXTS.get(error["type"])
    if template is not None:
        return template.format(**error.get("ctx", {}))
    message = str(error["msg"])
    return message[:1].lower() + message[1:]
