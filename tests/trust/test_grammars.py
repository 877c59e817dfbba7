"""What a stranger may ask an answer to be: refused or served, and nothing of it is kept."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.text.grammar import check_grammar
from tests.serve.service_thread import ServiceThread
from tests.trust.error_lines import check_one_line
from tests.trust.test_serving import CHAT, idle, refusal
from tests.wait import time_limit

MB = 1 << 20


def schema(number: int) -> dict[str, Any]:
    """One that no other number has."""
    names = {f"k{number}": {"type": "integer"}, "x": {"enum": [str(number), "b"]}}
    return {"type": "object", "properties": names, "required": [f"k{number}"]}


def test_ten_thousand_schemas_leave_nothing_behind() -> None:
    """Nothing is cached, so nothing has to be bounded."""
    process = psutil.Process()
    check_grammar(Grammar("json", json.dumps(schema(-1))))
    before = process.memory_info().rss
    for number in range(10**4):
        check_grammar(Grammar("json", json.dumps(schema(number))))
    assert process.memory_info().rss - before < 8 * MB


def test_hundreds_of_schemas_through_the_api_leave_nothing_behind(running: ServiceThread) -> None:
    """In the API's process and in the worker that makes the guides."""
    worker = psutil.Process(running.engine.pid)

    def ask(number: int) -> int:
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema(number)},
        }
        return running.post(
            "/v1/chat/completions", {**CHAT, "response_format": response_format, "max_tokens": 1}
        ).status

    assert {ask(number) for number in range(100)} == {200}
    before = worker.memory_info().rss
    assert {ask(number) for number in range(100, 400)} == {200}
    assert worker.memory_info().rss - before < 8 * MB
    idle(running)


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("grammar_type", "text"),
    [
        ("json", nested(10**4)), ("json", '{"anyOf":[' * 10**4 + "{}" + "]}" * 10**4),
        ("json", "[" * 10**5),
        ("json", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'),  # noqa: E501
        ("json", '{"$ref":"file:///etc/passwd"}'), ("json", '{"$ref":"http://127.0.0.1/"}'),
        ("regex", "(" * 10**4 + "a" + ")" * 10**4),
        ("regex", "(((a{1,500}){1,500}){1,500}){1,500}"),
        ("lark", "start: " + "(" * 10**4 + '"a"' + ")" * 10**4), ("lark", "start: start start"),
        ("choice", json.dumps(["x" * 10**5] * 3)),
    ],
    ids=range(11),
)  # fmt: skip
def test_grammars_without_end(grammar_type: str, text: str) -> None:
    """One line within seconds, or a grammar; never a crash of the process."""
    with time_limit():
        try:
            check_grammar(Grammar(grammar_type, text))
        except RequestError as error:
            check_one_line(error)


@pytest.mark.parametrize(
    "address", ["file:///etc/passwd", "http://127.0.0.1/", "//127.0.0.1/x", "other.json", "#/no"]
)
def test_a_schema_that_points_elsewhere_is_refused(address: str) -> None:
    """At its top or inside: nothing is fetched, and nothing stands in its place."""
    for text in (
        {"$ref": address},
        {"type": "object", "properties": {"a": {"items": {"$ref": address}}}},
    ):
        with pytest.raises(RequestError) as raised:
            check_grammar(Grammar("json", json.dumps(text)))
        check_one_line(raised.value)


def test_a_schema_that_is_too_deep_for_its_body(running: ServiceThread) -> None:
    body = json.dumps(
        {
            **CHAT,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": 0}},
        }
    )
    refusal(
        running,
        "/v1/chat/completions",
        body.replace('"schema": 0', '"schema": ' + nested(10**4)).encode(),
    )
    idle(running)
