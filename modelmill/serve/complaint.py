"""Why a request's body was refused, in one line: which field, and what it takes.

pydantic tells one error for each shape that a field may have; who reads it wants one for the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from modelmill.core.find import nearest

Error = Mapping[str, Any]
KINDS = {
    "string_type": "a text",
    "list_type": "a list",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "float_type": "a number",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
BOUNDS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "too_short": "must hold at least {min_length}",
    "too_long": "must hold at most {max_length}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "missing": "field required",
    "extra_forbidden": "unknown field",
    "value_error": "{error}",
    "string_unicode": "holds half of a surrogate pair, which is no character",
}


ELSEWHERE = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""Fields of older clients and other servers, and what says it here."""


def complaint(errors: Sequence[Error], shape: type[BaseModel] | None = None) -> tuple[str | None, str]:
    """(field, line) of what pydantic found wrong. shape: the body's, whose descriptions say what a field takes."""
    places = [tuple(part for part in error["loc"] if part != "body") for error in errors]
    if not places[0]:
        wrong = {"missing": "is empty; send an object", "string_unicode": _said(errors[0])}
        return None, f"the request's body {wrong.get(errors[0]['type'], 'must be an object')}"
    name = places[0][0]
    group = [(place, error) for place, error in zip(places, errors) if place[0] == name]
    param = name[:100] if isinstance(name, str) else None
    deepest = max(len(place) for place, _ in group)
    branches: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], Error]]] = {}
    for place, error in group:
        branches.setdefault(_tags(place), []).append((place, error))
    meant = [found for found in branches.values() if max(len(place) for place, _ in found) == deepest]
    # of several kinds of objects, one whose type fits
    meant = [found for found in meant if not any(map(_of_another_type, found))] or meant
    if len(branches) == 1 or len(meant) == 1:
        place, error = next(filter(_of_another_type, meant[0]), meant[0][0])
        hint = _meant(place, error, shape)
        return param, f"{_path(place, error)}: {_said(error)}{hint}"[:400]
    taken = None if shape is None or name not in shape.model_fields else shape.model_fields[name].description
    kinds = dict.fromkeys(_kind(error) or "of another kind" for _, error in group)
    shared = _shared([place for place, _ in group])
    return param, f"{_path(shared, {})}: must be {taken if taken and len(shared) == 1 else ' or '.join(kinds)}"[:400]


def _meant(place: Sequence[Any], error: Error, shape: type[BaseModel] | None) -> str:
    """What an unknown field of the body may be meant to be."""
    if error["type"] != "extra_forbidden" or len(place) != 1 or shape is None:
        return ""
    name = str(place[0])[:64]
    known = ELSEWHERE.get(name, "")
    found = known if known.partition(".")[0] in shape.model_fields else nearest(name, list(shape.model_fields))
    return f"; did you mean {found}?" if found else ""


def _tags(place: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(part for part in place if _is_tag(part))


def _is_tag(part: Any) -> bool:
    """Whether pydantic named one of several shapes with it: str, list[int], Choice; fields are in lower case."""
    named = isinstance(part, str) and part != ""
    return named and (part in ("str", "int", "float", "bool") or part[0].isupper() or "[" in part or "-" in part)


def _of_another_type(found: tuple[tuple[Any, ...], Error]) -> bool:
    return found[1]["type"] == "literal_error" and found[0][-1] == "type"


def _shared(places: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """What all begin with."""
    size = 0
    while all(len(place) > size and place[size] == places[0][size] for place in places):
        size += 1
    return places[0][: max(size, 1)]


def _path(place: Sequence[Any], error: Error) -> str:
    """As it would be written: tools[0].function.name."""
    text = ""
    for index, part in enumerate(place):
        last = index == len(place) - 1 and error.get("type") == "extra_forbidden"
        if isinstance(part, int):
            text += f"[{part}]"
        elif index == 0 or last or not _is_tag(part):
            text += f".{part}" if text else str(part)
    return text[:100]


def _kind(error: Error) -> str | None:
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    return KINDS.get(error["type"])


def _said(error: Error) -> str:
    kind = _kind(error)
    if kind is not None:
        return f"must be {kind}"
    told = BOUNDS.get(error["type"])
    if told is not None:
        return told.format(**error.get("ctx", {}))
    message = str(error["msg"])
    return message[:1].lower() + message[1:]
