"""Tags behind whose name a checkpoint writes a suffix, as <tool_call:6124c78e> (Hunyuan).

A format's description has the tags without it; the suffix comes from the chat template, and is part
of the format's name: hy_v4:6124c78e.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
MAX_CONSTANT_CHARS = 200
_CONSTANT = rf"(['\"])([^'\"\n]{{0,{MAX_CONSTANT_CHARS}}})"
_SET_CONSTANT = re.compile(rf"\bset\s+(\w+)\s*=\s*{_CONSTANT}\2")
_FORMAT_CALL = re.compile(rf"{_CONSTANT}\1\.format\(\s*(\w+)\s*\)")


def expand_format_calls(template: str) -> str:
    """Return a template with the constants that it fills into others by Python's ``format``.

    Hunyuan's templates write each tag so: {% set X = ':6124c78e' %} … '<tool_call{}>'.format(X).
    """
    values: dict[str, str] = {name: value for name, _, value in _SET_CONSTANT.findall(template)}

    def expand(match: re.Match[str]) -> str:
        quote, text, name = match.groups()
        return quote + text.replace("{}", values[name]) + quote if name in values else match[0]

    return _FORMAT_CALL.sub(expand, template)


def find_tag_suffix(tags: Sequence[str], text: str) -> str:
    """Return the suffix of the first tag in a text that has one, with its colon; "" if none has."""
    found = _tag_pattern(tuple(tags)).finditer(text) if tags else ()
    return next((match["suffix"] for match in found if match["suffix"]), "")


def remove_tag_suffixes(tags: Sequence[str], text: str) -> str:
    """Return a text with the tags as a format describes them."""
    return _tag_pattern(tuple(tags)).sub(r"\g<tag>>", text) if tags else text


def add_tag_suffix(description: T, tags: Sequence[str], suffix: str) -> T:
    """Return a description whose texts have the tags with a suffix."""
    pattern = _tag_pattern(tuple(tags))

    def add(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: f"{match['tag']}{suffix}>", value)
        if isinstance(value, tuple):
            return tuple(map(add, value))
        if is_dataclass(value) and not isinstance(value, type):
            changes = {each.name: add(getattr(value, each.name)) for each in fields(value)}
            return replace(value, **changes)
        return value

    changed: T = add(description)
    return changed


@cache
def _tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, tags))
    return re.compile(rf"(?P<tag></?(?:{names}))(?P<suffix>:[^\s<>{{}}'\"]+)?>")
