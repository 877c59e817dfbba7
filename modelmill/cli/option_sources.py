"""Collects a verb's ``Args`` from the command line, the environment and the --config file."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from modelmill.cli.options import CliParameter, collect_flags, flag_variable
from modelmill.core import env
from modelmill.core.errors import UsageError
from modelmill.core.registry import closest_name

T = TypeVar("T")
TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
}


def gather_args(
    args: type[T], command_line: Mapping[str, Any], usage: Callable[[], str] | None = None
) -> T:
    """Make an ``args`` from typer's values, the --config file and the defaults.

    Args:
        args: the verb's dataclass.
        command_line: typer's values; None: not set.
        usage: returns the usage of the verb, for an error about a missing flag.

    Raises:
        UsageError: if a value has the wrong type, a key of the file is unknown, or a flag is
            missing.
    """
    flags = collect_flags(args)
    values: dict[str, Any] = {}
    for flag in flags:
        value, where = command_line.get(flag.name), flag.label
        if flag.repeatable and value in (None, [], ()):
            value, where = _from_variable(flag)
        if value is not None and value != [] and value != ():
            values[flag.name] = _parse_value(flag, value, where)
    if values.get("config") is not None:
        values = {**_from_file(flags, values["config"]), **values}
    for flag in flags:
        if flag.required and flag.name not in values:
            more = "" if usage is None else f"; the form is: {usage()}"
            raise UsageError(f"{flag.label} is missing: {flag.help}{more}")
    return _build_dataclass(args, values)


def _build_dataclass(cls: type[T], values: Mapping[str, Any]) -> T:
    hints = typing.get_type_hints(cls)
    chosen: dict[str, Any] = {}
    for each in fields(cls):  # type: ignore[arg-type]
        hint = hints[each.name]
        if is_dataclass(hint):
            left = each.metadata["exclude"]
            chosen[each.name] = _build_dataclass(
                typing.cast(type, hint), {k: v for k, v in values.items() if k not in left}
            )
        elif each.name in values:
            chosen[each.name] = values[each.name]
    return cls(**chosen)


def _from_variable(flag: CliParameter) -> tuple[Any, str]:
    """Return the value and the name of a repeatable flag's variable.

    The variable holds one value, or several as a JSON list. Numbers and KEY=VALUE pairs, which
    contain no white space, may also be separated by white space.
    """
    for name in flag.names:
        text, where = env.option_from_env(name.replace("-", "_")), flag_variable(name)
        if not text:
            continue
        try:
            value = json.loads(text)
        except ValueError:
            value = None
            if text.lstrip().startswith('["'):
                why = "begins like a list but is not JSON"
                raise UsageError(f'{where} {why}: {text}; write it as ["one", "two"]') from None
        if isinstance(value, list):
            return value, where
        return [text] if flag.container == "many" else text.split(), where
    return None, flag.label


def _from_file(flags: list[CliParameter], path: Path) -> dict[str, Any]:
    import yaml

    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(
            f"--config {path} cannot be read: {' '.join(str(error).split())}"
        ) from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UsageError(
            f"--config {path} must hold `flag: value` lines, not a {type(raw).__name__}"
        )
    # required positional arguments must be on the command line
    known = {
        name: flag
        for flag in flags
        if not (flag.positional and flag.required)
        for name in (flag.name, *(each.replace("-", "_") for each in flag.names))
    }
    values = {}
    for key, value in raw.items():
        flag = known.get(str(key).replace("-", "_"))
        if flag is None or flag.name == "config":
            hint = closest_name(
                str(key).replace("-", "_"), [name for name in known if name != "config"]
            )
            raise UsageError(
                f"{path}: unknown option {key!r}" + (f"; did you mean {hint}?" if hint else "")
            )
        if value is not None:
            values[flag.name] = _parse_value(flag, value, f"{path}: {key}")
    return values


def _parse_value(flag: CliParameter, value: Any, source: str) -> Any:
    """Convert ``value`` (from the command line or YAML) to the type of the flag's field."""
    if isinstance(value, Enum):
        value = value.value
    if flag.container == "one":
        return _parse_scalar(flag.value_type, value, source, flag.choices)
    if flag.container == "pairs":
        return _parse_pairs(flag, value, source)
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if flag.container == "two":
        if len(items) != 2:
            raise UsageError(f"{source} takes two values, not {len(items)}")
        return tuple(str(item) for item in items)
    if flag.container == "ints":
        parts = [part for item in items for part in str(item).split(",") if part.strip()]
        return tuple(_parse_scalar(int, part.strip(), source, ()) for part in parts)
    return tuple(_parse_scalar(flag.value_type, item, source, flag.choices) for item in items)


def _parse_pairs(flag: CliParameter, value: Any, source: str) -> dict[Any, Any]:
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = []
        for text in value if isinstance(value, list) else [value]:
            name, equals, rest = str(text).partition("=")
            if not equals or not name:
                raise UsageError(f"{source} takes KEY=VALUE, not {text!r}")
            items.append((name, rest))
    return {
        _parse_scalar(flag.key_type, k, source, ()): _parse_scalar(flag.value_type, v, source, ())
        for k, v in items
    }


def _parse_scalar(value_type: type, value: Any, source: str, choices: tuple[Any, ...]) -> Any:
    result = _convert(value_type, value)
    if result is None:
        quotes = (
            "; put it into quotes"
            if value_type is str and not isinstance(value, (dict, list))
            else ""
        )
        raise UsageError(f"{source} must be {TYPE_NAMES[value_type]}, not {value!r}{quotes}")
    if choices and result not in choices:
        raise UsageError(f"{source} {value!r} is not one of {', '.join(map(str, choices))}")
    return result


def _convert(value_type: type, value: Any) -> Any:
    """Convert ``value`` to ``value_type``; None if that is impossible.

    YAML's own types are accepted, text is parsed.
    """
    if value_type is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, (bool, dict, list)) or (value_type is str and not isinstance(value, str)):
        # YAML reads an unquoted `on` as a bool and `0123` as 83; converting these to text would
        # change them silently
        return None
    try:
        if value_type is int and isinstance(value, float):
            return int(value) if value.is_integer() else None
        return value_type(value)
    except (TypeError, ValueError):
        return None
