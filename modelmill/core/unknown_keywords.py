"""Keyword arguments that a class or function of the Python API does not have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from modelmill.core.errors import UnknownOption
from modelmill.core.module_lookup import most_similar_name

P = ParamSpec("P")
R = TypeVar("R")
Class = TypeVar("Class", bound=type)


def check_option_names(names: Iterable[str], known: Iterable[str], source: str) -> None:
    """Check option names.

    Raises:
        UnknownOption: if a name is unknown; the message suggests the most similar one.
    """
    listed = sorted(known)
    unknown = sorted(set(names) - set(listed))
    if not unknown:
        return
    hints = [
        f"{name}; did you mean {hint}?" if (hint := most_similar_name(name, listed)) else name
        for name in unknown
    ]
    tail = "" if any(hint.endswith("?") for hint in hints) else f"; known are {', '.join(listed)}"
    raise UnknownOption(f"{source}: unknown option {', '.join(hints)}{tail}")


def refuse_unknown_fields(cls: Class) -> Class:
    """Decorate a dataclass: an unknown keyword raises UnknownOption with the nearest field."""
    checked = refuse_unknown_keywords(cls.__name__)(cls.__init__)  # type: ignore[misc]
    cls.__init__ = checked  # type: ignore[misc]
    return cls


def refuse_unknown_keywords(
    source: str, check_first: Callable[[Iterable[str]], None] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: an unknown keyword raises UnknownOption with the nearest one.

    Args:
        source: the function, for the message.
        check_first: called with all keywords; may raise a better error.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        known = frozenset(list(inspect.signature(call).parameters)[1:])  # without self

        @functools.wraps(call)
        def checked(*args: P.args, **keywords: P.kwargs) -> R:
            if not known.issuperset(keywords):
                if check_first is not None:
                    check_first(keywords)
                check_option_names(keywords, known, source)
            return call(*args, **keywords)

        return checked

    return decorate
