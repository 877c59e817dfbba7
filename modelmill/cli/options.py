"""Makes a command line from a dataclass: field metadata are the only source of the flags.

A verb's ``Args`` holds plain fields and whole configs (BuildConfig, RunConfig, SamplingParams). The
fields of a config become flags of the verb; a name in several configs is one flag that sets all of
them. A value comes from the command line, else from MODELMILL_<FLAG>, else from ``--config
FILE.yaml``, else from the dataclass.

Field metadata: ``help``, ``choices``, ``flags`` (``-x`` adds a short name, the first ``--x``
replaces the long name, others are aliases), ``positional``, ``metavar``, ``required``, ``hidden``,
``python_only`` (no flag).
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from modelmill.core.config import option

T = TypeVar("T")
SCALARS: tuple[type, ...] = (bool, int, float, str, Path)


@dataclass(frozen=True, kw_only=True)
class CommonArgs:
    """Options of every verb."""

    json: bool = option(False, "print JSON, and nothing else, on stdout", flags=("--json",))
    config: Path | None = option(
        None, "YAML file with values for flags that are not set", metavar="FILE.yaml"
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


def config(
    cls: type[T],
    panel: str,
    *,
    helps: Mapping[str, str] | None = None,
    exclude: tuple[str, ...] = (),
) -> Any:
    """Make a field that holds a whole config.

    Args:
        cls: the config.
        panel: title of its flags on the help page.
        helps: help texts for fields without one.
        exclude: fields that get no flag.
    """
    metadata = {"panel": panel, "helps": dict(helps or {}), "exclude": exclude}
    return field(default_factory=cls, metadata=metadata)


def inherit_option(cls: type, name: str, **changes: Any) -> Any:
    """Make a field like ``cls``'s field of that name, with ``changes`` to its metadata."""
    for original in fields(cls):
        if original.name == name:
            settings = {**original.metadata, **changes}
            return option(
                settings.pop("default", original.default), settings.pop("help", ""), **settings
            )
    raise LookupError(f"{cls.__name__} has no field {name!r}")


def collect_flags(args: type) -> list[CliParameter]:
    """Return every flag of an ``Args`` dataclass, positional ones first.

    Of flags with the same name the first one is used.
    """
    flags: dict[str, CliParameter] = {}
    for flag in _iter_flags(args, None, {}, ()):
        first = flags.setdefault(flag.name, flag)
        if first is not flag and not first.help:
            flags[flag.name] = replace(first, help=flag.help)
    return sorted(flags.values(), key=lambda flag: not flag.positional)


def _iter_flags(
    cls: type, panel: str | None, helps: Mapping[str, str], exclude: tuple[str, ...]
) -> Iterator[CliParameter]:
    hints = typing.get_type_hints(cls)
    for each in fields(cls):
        if each.name in exclude or each.metadata.get("python_only"):
            continue
        hint = hints[each.name]
        if is_dataclass(hint):
            below = each.metadata
            yield from _iter_flags(
                typing.cast(type, hint), below["panel"], below["helps"], below["exclude"]
            )
        else:
            yield _flag(each, hint, panel, helps.get(each.name, ""))


def _flag(each: Field[Any], hint: Any, panel: str | None, help: str) -> CliParameter:
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
        help=metadata.get("help") or help,
        positional=bool(metadata.get("positional")),
        required=default is MISSING or bool(metadata.get("required")),
        metavar=metadata.get("metavar"),
        hidden=bool(metadata.get("hidden")),
        panel=panel,
        negatable=value_type is bool and not long,
    )


def _analyze_type(hint: Any) -> tuple[str, type, type]:
    """Return (container, type of a value, type of a key) of a type hint."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        return _analyze_type(rest[0])
    if hint in SCALARS:
        return "one", hint, str
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and inner[-1] is Ellipsis:
        return ("ints", int, str) if inner[0] is int else ("many", inner[0], str)
    if origin is tuple and len(inner) == 2:
        return "two", str, str
    if origin is not None and issubclass(origin, Mapping):
        return "pairs", inner[1], inner[0]
    raise TypeError(f"the command line cannot offer a value of type {hint}")


def make_signature(flags: list[CliParameter]) -> inspect.Signature:
    """Make the signature for typer; every parameter defaults to None, which means "not set"."""
    return inspect.Signature(
        [
            inspect.Parameter(
                flag.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_parameter(flag),
                annotation=_annotation(flag),
            )
            for flag in flags
        ]
    )


def _annotation(flag: CliParameter) -> Any:
    if flag.container in ("many", "ints", "pairs"):
        return list[str] | None
    if flag.container == "two":
        return tuple[str, str] | None
    if flag.choices:
        # every version of typer supports an Enum
        return Enum(flag.name, {str(c): str(c) for c in flag.choices}, type=str) | None  # type: ignore[operator]
    return flag.value_type | None


def _parameter(flag: CliParameter) -> Any:
    import typer

    if flag.positional:
        return typer.Argument(
            ... if flag.required else None, help=flag.help, metavar=flag.metavar, show_default=False
        )
    long = f"--{flag.long}/--no-{flag.long}" if flag.negatable else f"--{flag.long}"
    return typer.Option(
        None,
        long,
        *flag.short,
        help=_help_with_default(flag),
        metavar=_metavar(flag),
        envvar=None if flag.repeatable else [flag_variable(name) for name in flag.names],
        show_envvar=False,
        show_default=False,
        rich_help_panel=flag.panel,
        hidden=flag.hidden,
    )


def flag_variable(name: str) -> str:
    """Return the environment variable of a flag's long name."""
    return "MODELMILL_" + name.replace("-", "_").upper()


def _metavar(flag: CliParameter) -> str | None:
    if flag.metavar or flag.value_type is bool:
        return flag.metavar
    return {"pairs": "KEY=VALUE", "ints": "N,N,…"}.get(flag.container)


def flag_help(flag: CliParameter) -> str:
    """Return a flag's help with its choices and its default."""
    text = _help_with_default(flag)
    return f"{text}; one of {', '.join(map(str, flag.choices))}" if flag.choices else text


def _help_with_default(flag: CliParameter) -> str:
    if flag.default in (None, (), {}, "") or (flag.value_type is bool and not flag.negatable):
        return flag.help
    shown = flag.default
    if flag.value_type is bool:
        shown = "on" if flag.default else "off"
    elif isinstance(flag.default, tuple):
        shown = ",".join(map(str, flag.default))
    return f"{flag.help} (default: {shown})"


def make_command(args: type[T], run: Callable[[T], int]) -> Callable[..., int]:
    """Make the function for typer: it collects the values into ``args`` and runs the verb."""

    def call(**command_line: Any) -> int:
        from modelmill.cli.help_page import short_usage
        from modelmill.cli.option_sources import gather_args

        chosen = gather_args(
            args,
            command_line,
            lambda: short_usage(run.__module__.rpartition(".")[2], sys.modules[run.__module__]),
        )
        try:
            return run(chosen)
        except BrokenPipeError as error:  # of a worker: typer would exit without a message
            raise RuntimeError("a pipe to another process broke") from error

    signature = make_signature(collect_flags(args))
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return call
