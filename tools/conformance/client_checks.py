"""A list of checks that a suite runs with a client of another maker's library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.conformance.suite import SuiteResult, make_result

Check = Callable[[Any, str], None]
MESSAGES: list[Any] = [{"role": "user", "content": "Name three fruits, please."}]
CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""The parameters of a tool, and an answer's format, that the suites share."""


def place_type() -> Any:
    """A pydantic class of ``CITY_SCHEMA``."""
    from typing import Literal

    from pydantic import BaseModel

    class Place(BaseModel):
        city: Literal["Paris", "Rome"]

    return Place


class ClientChecks:
    """Functions of (client, model) that raise where an answer is wrong."""

    def __init__(self) -> None:
        self._checks: list[tuple[str, Check]] = []

    def add(self, name: str) -> Callable[[Check], Check]:
        """Add the decorated function."""

        def decorate(function: Check) -> Check:
            self._checks.append((name, function))
            return function

        return decorate

    def run(self, client: Any, model: str) -> SuiteResult:
        """Run every check by itself; one that fails says what it saw."""
        return make_result([(name, _problem(check, client, model)) for name, check in self._checks])


def _problem(check: Check, client: Any, model: str) -> str | None:
    try:
        check(client, model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def assert_equal(actual: Any, expected: Any, what: str) -> None:
    """Raises AssertionError unless they are equal."""
    if actual != expected:
        raise AssertionError(f"{what}: {actual!r} is not {expected!r}"[:300])


def catch_error(error_type: type[Exception], call: Callable[[], Any]) -> Any:
    """The error of that kind that a call ends with."""
    try:
        call()
    except error_type as error:
        return error
    raise AssertionError(f"no {error_type.__name__} was raised")
