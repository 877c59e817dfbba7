"""Makes a command line from a dataclass: field metadata are the only source of the flags.

A verb's ``Args`` holds plain fields and whole configs (BuildConfig, RunConfig, SamplingParams). The
fields of a config become flags of the verb; a name in several configs is one flag that sets all of
them. A value comes from the command line, else from MODELMILL_<FLAG>, else from ``--config
FILE.yaml``, else from the dataclass.

Field metadata: ``help``, ``choices``, ``flags`` (``-x`` adds a short name, the first ``--x``
replaces the long name, others are aliases), ``positional``, ``metavar``, ``required``, ``hidden``,
``python_only`` (no flag), ``is_bytes`` (takes 8GiB; so does every integer named ``…_bytes``),
``complete`` (a function: values for a shell's completion).
"""

from __future__ import annotations

import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from modelmill.core import env
from modelmill.core.byte_size import parse_bytes
from modelmill.core.config import option_field, path_option_field
from modelmill.core.errors import UsageError
from modelmill.core.module_lookup import most_similar_name

T = TypeVar("T")
SCALAR_TYPES: tuple[type, ...] = (bool, int, float, str, Path)
TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
}


@dataclass(frozen=True, kw_only=True)
class CommonArgs:
    """Options of every verb."""

    json: bool = option_field(False, "print JSON, and nothing else, on stdout", flags=("--json",))
    config: Path | None = path_option_field(
        "YAML file with values for flags that are not set", "FILE.yaml"
    )


@dataclass(frozen=True)
class CliParameter:
    """One parameter of a verb.

    Attributes:
        short: its other names.
        container: "one" value, "many" (repeatable), "ints" (comma-separated and repeatable),
            "pairs" (KEY=VALUE, repeatable) or "two" (two values after one flag).
        value_type: the type of a value.
        key_type: the type of a pair's key.
        negatable: whether there is a --no-FLAG.
        is_bytes: whether a value may have a unit, such as 8GiB.
        complete: returns values for a shell's completion.
    """

    name: str
    long: str
    short: tuple[str, ...]
    container: str
    value_type: type
    key_type: type
    choices: tuple[Any, ...]
    default: Any
    help: str
    positional: bool
    required: bool
    metavar: str | None
    hidden: bool
    panel: str | None
    negatable: bool
    is_bytes: bool = False
    complete: Callable[[], Sequence[str]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its long names without dashes; the main name is first."""
        return (self.long, *(name[2:] for name in self.short if name.startswith("--")))

    @property
    def repeatable(self) -> bool:
        """Whether the flag may occur more than once.

        click would split such a flag's variable at white space.
        """
        return self.container in ("many", "ints", "pairs") and not self.positional

    @property
    def label(self) -> str:
        """The flag's name in messages."""
        return self.metavar or self.name.upper() if self.positional else f"--{self.long}"


def config_field(cls: type[T], panel: str, *, exclude: tuple[str, ...] = ()) -> Any:
    """Make a field that holds a whole config.

    Args:
        cls: the config.
        panel: title of its flags on the help page.
        exclude: fields that get no flag.
    """
    return field(default_factory=cls, metadata={"panel": panel, "exclude": exclude})


def inherit_option(cls: type, name: str, **changes: Any) -> Any:
    """Make a field like ``cls``'s field of that name, with ``changes`` to its metadata."""
    for original in fields(cls):
        if original.name == name:
            settings = {**original.metadata, **changes}
            return option_field(
                settings.pop("default", original.default), settings.pop("help", ""), **settings
            )
    raise LookupError(f"{cls.__name__} has no field {name!r}")


def collect_cli_parameters(args: type) -> list[CliParameter]:
    """Return every flag of an ``Args`` dataclass, positional ones first.

    Of flags with the same name the first one is used.
    """
    flags: dict[str, CliParameter] = {}
    for flag in _iter_cli_parameters(args, None, ()):
        first = flags.setdefault(flag.name, flag)
        if first is not flag and not first.help:
            flags[flag.name] = replace(first, help=flag.help)
    return sorted(flags.values(), key=lambda flag: not flag.positional)


def _iter_cli_parameters(
    cls: type, panel: str | None, exclude: tuple[str, ...]
) -> Iterator[CliParameter]:
    hints = typing.get_type_hints(cls)
    for each in fields(cls):
        if each.name in exclude or each.metadata.get("python_only"):
            continue
        hint = hints[each.name]
        if is_dataclass(hint):
            below = each.metadata
            yield from _iter_cli_parameters(
                typing.cast(type, hint), below["panel"], below["exclude"]
            )
        else:
            yield _make_cli_parameter(each, hint, panel)


def _make_cli_parameter(each: Field[Any], hint: Any, panel: str | None) -> CliParameter:
    metadata = each.metadata
    container, value_type, key_type = _analyze_type(hint)
    flag_names = metadata.get("flags", ())
    long = [name[2:] for name in flag_names if name.startswith("--")]
    default = each.default
    if default is MISSING and each.default_factory is not MISSING:
        default = each.default_factory()
    return CliParameter(
        name=each.name,
        long=long[0] if long else each.name.replace("_", "-"),
        short=(
            *(name for name in flag_names if not name.startswith("--")),
            *(f"--{name}" for name in long[1:]),
        ),
        container=container,
        value_type=value_type,
        key_type=key_type,
        choices=tuple(metadata.get("choices", ())),
        default=None if default is MISSING else default,
        help=metadata.get("help", ""),
        positional=bool(metadata.get("positional")),
        required=default is MISSING or bool(metadata.get("required")),
        metavar=metadata.get("metavar"),
        hidden=bool(metadata.get("hidden")),
        panel=panel,
        negatable=value_type is bool and not long,
        is_bytes=value_type is int
        and (each.name.endswith("_bytes") or bool(metadata.get("is_bytes"))),
        complete=metadata.get("complete"),
    )


def _analyze_type(hint: Any) -> tuple[str, type, type]:
    """Return (container, type of a value, type of a key) of a type hint."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        return _analyze_type(rest[0])
    if hint in SCALAR_TYPES:
        return "one", hint, str
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and inner[-1] is Ellipsis:
        return ("ints", int, str) if inner[0] is int else ("many", inner[0], str)
    if origin is tuple and len(inner) == 2:
        return "two", str, str
    if origin is not None and issubclass(origin, Mapping):
        return "pairs", inner[1], inner[0]
    raise TypeError(f"the command line cannot offer a value of type {hint}")


def _make_signature(flags: list[CliParameter]) -> inspect.Signature:
    """Make the signature for typer; every parameter defaults to None, which means "not set"."""
    return inspect.Signature(
        [
            inspect.Parameter(
                flag.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_typer_parameter(flag),
                annotation=_typer_annotation(flag),
            )
            for flag in flags
        ]
    )


def _typer_annotation(flag: CliParameter) -> Any:
    if flag.container in ("many", "ints", "pairs"):
        return list[str] | None
    if flag.container == "two":
        return tuple[str, str] | None
    if flag.choices:
        # every version of typer supports an Enum
        return Enum(flag.name, {str(c): str(c) for c in flag.choices}, type=str) | None  # type: ignore[operator]
    return (str if flag.is_bytes else flag.value_type) | None


def _typer_parameter(flag: CliParameter) -> Any:
    import typer

    complete = _make_choice_completer(flag)
    if flag.positional:
        return typer.Argument(
            ... if flag.required else None, metavar=flag.metavar, autocompletion=complete
        )
    long = f"--{flag.long}/--no-{flag.long}" if flag.negatable else f"--{flag.long}"
    return typer.Option(
        None,
        long,
        *flag.short,
        help=help_with_default(flag),  # a shell's completion shows it; --help is ``help_page``'s
        envvar=None if flag.repeatable else [flag_env_variable(name) for name in flag.names],
        show_envvar=False,  # in an error, which says where the value stands by itself
        hidden=flag.hidden,
        autocompletion=complete,
    )


def _make_choice_completer(flag: CliParameter) -> Callable[[str], list[str]] | None:
    """Return the values that begin with what is typed, as typer asks for them."""
    values = flag.complete
    if values is None:
        return None

    def complete(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return complete


def flag_env_variable(name: str) -> str:
    """Return the environment variable of a flag's long name."""
    return env.VARIABLE_PREFIX + name.replace("-", "_").upper()


def help_with_default(flag: CliParameter) -> str:
    """Return a flag's help with its default."""
    if flag.default in (None, (), {}, "") or (flag.value_type is bool and not flag.negatable):
        return flag.help
    shown = flag.default
    if flag.value_type is bool:
        shown = "on" if flag.default else "off"
    elif isinstance(flag.default, tuple):
        shown = ",".join(map(str, flag.default))
    return f"{flag.help} (default: {shown})"


def make_typer_function(args: type[T], run: Callable[[T], int]) -> Callable[..., int]:
    """Make the function for typer: it collects the values into ``args`` and runs the verb."""

    def call(**command_line: Any) -> int:
        chosen = _merge_args(
            args, flags, command_line, partial(_usage_with_example, run.__module__)
        )
        try:
            return run(chosen)
        except BrokenPipeError as error:  # of a worker: typer would exit without a message
            raise RuntimeError("a pipe to another process broke") from error

    flags = collect_cli_parameters(args)
    signature = _make_signature(flags)
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return call


def _usage_with_example(module: str) -> str:
    from modelmill.cli.help_page import usage_with_example

    return usage_with_example(module.rpartition(".")[2], sys.modules[module])


def _merge_args(
    args: type[T],
    flags: list[CliParameter],
    command_line: Mapping[str, Any],
    usage: Callable[[], str],
) -> T:
    """Make an ``args`` from typer's values, the --config file and the defaults.

    Args:
        args: the verb's dataclass.
        flags: its flags.
        command_line: typer's values; None: not set.
        usage: returns the usage of the verb, for an error about a missing flag.

    Raises:
        UsageError: if a value has the wrong type, a key of the file is unknown, or a flag is
            missing.
    """
    values: dict[str, Any] = {}
    for flag in flags:
        value, where = command_line.get(flag.name), flag.label
        if flag.repeatable and value in (None, [], ()):
            value, where = _read_repeatable_flag_env(flag)
        if value is not None and value != [] and value != ():
            values[flag.name] = _parse_value(flag, value, where)
    if values.get("config") is not None:
        values = {**_read_config_file(flags, values["config"]), **values}
    for flag in flags:
        if flag.required and flag.name not in values:
            raise UsageError(f"{flag.label} is missing: {flag.help}; the form is: {usage()}")
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


def _read_repeatable_flag_env(flag: CliParameter) -> tuple[Any, str]:
    """Return the value and the name of a repeatable flag's variable.

    The variable holds one value, or several as a JSON list. Numbers and KEY=VALUE pairs, which
    contain no white space, may also be separated by white space.
    """
    for name in flag.names:
        text, where = env.option_from_env(name.replace("-", "_")), flag_env_variable(name)
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


def _read_config_file(flags: list[CliParameter], path: Path) -> dict[str, Any]:
    import yaml

    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(
            f"--config {path} is no YAML: {' '.join(str(error).split())}; write `flag: value` lines"
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
            hint = most_similar_name(
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
    if flag.is_bytes and isinstance(value, str):
        size = parse_bytes(value)
        if size is None:
            raise UsageError(f"{source} must be a size as 8GiB, 8GB or bytes, not {value!r}")
        return size
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
    result = _convert_scalar(value_type, value)
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


def _convert_scalar(value_type: type, value: Any) -> Any:
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
