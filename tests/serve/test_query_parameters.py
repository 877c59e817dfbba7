"""Query parameters: what paths without a body read, refuse and ignore."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.serve.app import make_app
from modelmill.serve.query_parameters import IGNORED_QUERY_PARAMETERS
from modelmill.serve.service import Service, ServiceLimits
from tests.serve.asgi_client import Client, Response
from tests.serve.dialect_calls import post
from tests.serve.service_thread import ServiceThread

ANTHROPIC = {"anthropic-version": "2023-06-01"}
NAMES = [f"m{index:02}" for index in range(23)]


@pytest.fixture(scope="module")
def many(running: ServiceThread) -> Client:
    """A client of Anthropic's of a service with 23 models."""
    service = Service(
        dict.fromkeys(NAMES, running.engine), ServiceLimits(), running.service.metrics
    )
    return Client(make_app(service))


def page(running: ServiceThread, many: Client, query: str) -> Response:
    return running.run(many.get(f"/v1/models{query}", headers=ANTHROPIC))


@pytest.mark.parametrize(
    ("query", "first", "last", "has_more"),
    [
        ("", 0, 19, True),
        ("?limit=1", 0, 0, True),
        ("?limit=1000", 0, 22, False),
        ("?limit=2&after_id=m04", 5, 6, True),
        ("?after_id=m04", 5, 22, False),
        ("?limit=2&before_id=m04", 2, 3, True),
        ("?limit=9&before_id=m04", 0, 3, False),
    ],
)
def test_pages_of_models_as_anthropic_has_them(
    running: ServiceThread, many: Client, query: str, first: int, last: int, has_more: bool
) -> None:
    shown = page(running, many, query).json
    assert [card["id"] for card in shown["data"]] == NAMES[first : last + 1]
    assert (shown["first_id"], shown["last_id"]) == (NAMES[first], NAMES[last])
    assert shown["has_more"] is has_more


def test_the_last_page_is_empty(running: ServiceThread, many: Client) -> None:
    shown = page(running, many, "?after_id=m22").json
    assert shown == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?after_id=none", "after_id: there is no model 'none'"),
        ("?after_id=m01&before_id=m02", "after_id and before_id exclude each other"),
        ("?limit=0", "limit: must be at least 1"),
        ("?limit=x", "limit: "),
        (
            "?offset=1",
            "offset: unknown query parameter; this path takes limit (with the header "
            "anthropic-version), after_id (with",
        ),
    ],
)
def test_wrong_pages(running: ServiceThread, many: Client, query: str, message: str) -> None:
    response = page(running, many, query)
    assert response.status == 400
    assert response.json["error"]["message"].startswith(message)


def test_openais_list_has_no_pages(running: ServiceThread) -> None:
    error = running.get("/v1/models?limit=1").json["error"]
    assert error["param"] == "limit"
    assert error["message"].startswith(
        "limit: models come in pages only with the header anthropic-"
    )


def test_a_stored_response_is_not_streamed_again(running: ServiceThread) -> None:
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 2, "temperature": 0}
    made = post(running, "/v1/responses", body).json
    path = f"/v1/responses/{made['id']}"
    assert running.get(path).json == made
    assert running.get(f"{path}?stream=false&include[]=x&include_obfuscation=true").json == made
    for query, name in (("stream=true&starting_after=2", "stream"), ("starting_after=2",) * 2):
        response = running.get(f"{path}?{query}")
        error = response.json["error"]
        assert (response.status, error["param"]) == (400, name.partition("=")[0])
        assert "the events of a response are not kept" in error["message"]
    assert running.get("/v1/responses/none?stream=true").status == 404


PATHS = ("/v1/models", "/v1/models/stories", "/props", "/v1/responses/x", "/v1/sessions")


@pytest.mark.parametrize("path", PATHS)
def test_unknown_ones_are_refused_and_others_ignored(running: ServiceThread, path: str) -> None:
    plain = running.get(path)
    query = "&".join(f"{name}=1" for name in IGNORED_QUERY_PARAMETERS)
    assert running.get(f"{path}?{query}").status == plain.status
    refused = running.get(f"{path}?{query}&odd=1")
    assert (refused.status, refused.json["error"]["param"]) == (400, "odd")
    assert refused.json["error"]["message"].startswith("odd: unknown query parameter; this path ")


def test_a_request_with_a_body_has_its_fields_there(running: ServiceThread) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert post(running, "/v1/messages?beta=true", body).json["usage"]["output_tokens"] == 1
