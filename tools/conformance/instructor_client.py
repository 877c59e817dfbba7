"""instructor: pydantic classes through tools, JSON schemas and Anthropic's tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.conformance.client_checks import ClientChecks, assert_equal
from tools.conformance.suite import SuiteResult

TITLE = "instructor: pydantic classes through tools, JSON schemas and Anthropic's tools; partials"
PACKAGE = "instructor"
MESSAGES: list[Any] = [{"role": "user", "content": "Which city, and how warm is it?"}]
CHECKS = ClientChecks()


def run(base_url: str, model: str, out: Path) -> SuiteResult:  # noqa: ARG001  the suite leaves no logs
    """Every check by itself."""
    return CHECKS.run(base_url, model)


def weather_type() -> Any:
    """A class with an enumeration, a bounded number and a nested list."""
    from typing import Literal

    from pydantic import BaseModel, Field

    class Hour(BaseModel):
        sun: bool

    class Weather(BaseModel):
        city: Literal["Paris", "Rome"]
        degrees: int = Field(ge=0, le=40)
        hours: list[Hour] = Field(min_length=1, max_length=2)

    return Weather


def openai_client(base_url: str, mode: str) -> Any:
    """OpenAI's client, patched for a mode."""
    import instructor
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


def _create(client: Any, model: str, **more: Any) -> Any:
    greedy = {"extra_body": {"temperature": 0}}  # Anthropic's client knows no such argument
    options = {**greedy, "max_tokens": 128, "max_retries": 0, "messages": MESSAGES}
    return client.create(model=model, response_model=weather_type(), **{**options, **more})


@CHECKS.add("a class through a forced tool, strict tools and a JSON schema")
def _modes(base_url: str, model: str) -> None:
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        weather = _create(openai_client(base_url, mode), model)
        assert_equal(weather.city in ("Paris", "Rome"), True, f"{mode}: city")
        assert_equal(0 <= weather.degrees <= 40, True, f"{mode}: degrees")
        assert_equal(1 <= len(weather.hours) <= 2, True, f"{mode}: hours")


@CHECKS.add("a class through Anthropic's tools")
def _anthropic(base_url: str, model: str) -> None:
    import instructor
    from anthropic import Anthropic

    plain = Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)
    client = instructor.from_anthropic(plain, mode=instructor.Mode.ANTHROPIC_TOOLS)
    weather = _create(client, model)
    assert_equal(weather.city in ("Paris", "Rome"), True, "city")
    assert_equal(0 <= weather.degrees <= 40, True, "degrees")


@CHECKS.add("partial objects while the answer streams")
def _partials(base_url: str, model: str) -> None:
    client = openai_client(base_url, "JSON_SCHEMA")
    partials = list(
        client.create_partial(
            model=model,
            response_model=weather_type(),
            messages=MESSAGES,
            temperature=0,
            max_tokens=128,
        )
    )
    assert_equal(len(partials) > 1, True, "several partial objects")
    assert_equal(partials[-1].city in ("Paris", "Rome"), True, "city")
