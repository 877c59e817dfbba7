"""The load generator against servers whose every byte is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.errors import ModelmillError, RequestError, UsageError
from modelmill.eval.openai_client import OpenAIClient, RequestTiming, time_request
from modelmill.eval.report import MeasurementStats, plot
from modelmill.eval.serving_load import (
    ServingLoad,
    goodput,
    percentiles_ms,
    run_serving_load,
    summarize_load,
)
from modelmill.eval.serving_plots import GRID_SHAPE, draw_subplots


def sse(*events: Any) -> bytes:
    return b"".join(
        b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
        for event in events
    )


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
WHOLE = sse(chunk("a"), chunk("b"), chunk("c"), USAGE, b"[DONE]")
OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def against(
    answer: bytes | Callable[[], bytes],
    work: Callable[[OpenAIClient], Any],
    sent_requests: list[bytes] | None = None,
) -> Any:
    """Run ``work`` with a server that answers so to everything."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(size)
        if sent_requests is not None:
            sent_requests.append(head + body)
        writer.write(answer if isinstance(answer, bytes) else answer())
        await writer.drain()
        writer.close()

    async def main() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await work(OpenAIClient.from_url(f"http://127.0.0.1:{port}/v1", "key"))
        finally:
            server.close()

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 3, 50, 10**6])
def test_a_stream_in_any_pieces(size: int) -> None:
    sent_requests: list[bytes] = []
    body = {"model": "m", "prompt": "x"}
    visit = against(
        OK + chunked(WHOLE, size) + b"0\r\n\r\n",
        lambda remote: time_request(remote, body),
        sent_requests,
    )
    assert (visit.error, visit.prompt_tokens, visit.output_tokens, len(visit.chunk_times)) == (
        None,
        7,
        3,
        3,
    )
    assert visit.start < visit.chunk_times[0] <= visit.chunk_times[-1]
    head, sent = sent_requests[0].split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"authorization: Bearer key" in head
    assert json.loads(sent)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (OK + chunked(sse(chunk("a"), {"error": {"message": "gone"}}), 20) + b"0\r\n\r\n", "gone"),
        (OK + chunked(WHOLE, 10)[:60], "middle"),
        (OK + b"0\r\n\r\n", "empty"),
        (b"", "without a response"),
        (
            b'HTTP/1.1 429 Busy\r\ncontent-length: 2\r\n\r\n{"error": {"message": "too many"}}',
            "429: too many",
        ),
        (b"HTTP/1.1 500 Oh\r\n\r\nnonsense", "500: (no message)"),
        (b"HTTP/1.1 \r\n\r\n", "does not speak HTTP"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
        (
            OK + chunked(sse(chunk("a"), b'{"choices": ['), 20) + b"0\r\n\r\n",
            "not of OpenAI's API: {",
        ),
        (OK + chunked(sse(b"\xff\xfe"), 20) + b"0\r\n\r\n", "not of OpenAI's API"),
        (OK + chunked(sse([1, 2]), 20) + b"0\r\n\r\n", "not of OpenAI's API"),
        (OK + chunked(sse({"choices": [7]}), 20) + b"0\r\n\r\n", "not of OpenAI's API"),
        (
            OK + chunked(sse({"choices": [{"delta": "a"}]}), 20) + b"0\r\n\r\n",
            "not of OpenAI's API",
        ),
        (
            OK + chunked(sse({"usage": {"prompt_tokens": "7"}}), 20) + b"0\r\n\r\n",
            "not of OpenAI's API",
        ),
    ],
)
def test_what_goes_wrong_is_noted(answer: bytes, message: str) -> None:
    visit = against(answer, lambda remote: time_request(remote, {}))
    assert message in visit.error


def test_one_malformed_event_costs_one_visit() -> None:
    """The others keep what they saw."""
    sent_requests: list[bytes] = []
    bad = OK + chunked(sse(b"{"), 20) + b"0\r\n\r\n"
    good = OK + chunked(WHOLE, 20) + b"0\r\n\r\n"
    load = ServingLoad([(3, 3)] * 4, concurrency=1)
    work = lambda remote: run_serving_load(remote, "m", load, lambda *_: None)  # noqa: E731
    visits, _ = against(lambda: bad if len(sent_requests) == 2 else good, work, sent_requests)
    assert [each.error is None for each in visits] == [True, False, True, True]


@pytest.mark.parametrize(
    "page", [b"<html>", b"\xff", b"", b"[]", b'{"data": []}', b'{"data": [{}]}', b"7"]
)
def test_a_page_that_lists_no_model(page: bytes) -> None:
    with pytest.raises(ModelmillError, match=r"not return JSON|lists no text generation model"):
        against(b"HTTP/1.1 200 OK\r\n\r\n" + page, lambda remote: remote.first_text_model_id())


def test_the_first_model() -> None:
    page = b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "m"}, {"id": "n"}]}'
    assert against(page, lambda remote: remote.first_text_model_id()) == "m"


def test_a_refused_request_is_the_askers_fault() -> None:
    async def ask(remote: OpenAIClient) -> None:
        async for _ in remote.stream("/v1/completions", {}):
            pass

    with pytest.raises(RequestError, match="400: no"):
        against(b'HTTP/1.1 400 Bad\r\n\r\n{"error": {"message": "no"}}', ask)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://a:b", "http://a:99999"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UsageError):
        OpenAIClient.from_url(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8000", ("localhost", 8000, "", False)),
        ("http://h/v1/", ("h", 80, "", False)),
        ("https://h/api/v1", ("h", 443, "/api", True)),
    ],
)
def test_addresses(url: str, expected: Any) -> None:
    client = OpenAIClient.from_url(url)
    assert (client.host, client.port, client.path, client.secure) == expected


def test_all_requests_are_made_and_counted() -> None:
    updates: list[tuple[str, int, int]] = []
    load = ServingLoad([(3, 4)] * 9, rate=500.0, concurrency=2, first_ms=60000, token_ms=1e-9)
    answer = OK + chunked(WHOLE, 7) + b"0\r\n\r\n"
    visits, seconds = against(
        answer,
        lambda remote: run_serving_load(remote, "m", load, lambda *ended: updates.append(ended)),
    )
    assert updates == [("requests", place, 9) for place in range(1, 10)]
    summary = summarize_load(visits, seconds, load)
    assert (
        summary["requests"],
        summary["failed"],
        summary["output_tokens"],
        summary["prompt_tokens"],
    ) == (
        9,
        0,
        27,
        63,
    )
    assert summary["requests_per_s"] == pytest.approx(9 / seconds)


def test_figures() -> None:
    fast = RequestTiming(10.0, [10.1, 10.2, 10.4], 5, 3)
    slow = RequestTiming(10.0, [11.0, 12.0], 5, 2)
    failed = RequestTiming(10.0, error="no")
    summary = summarize_load([fast, slow, failed], 2.0, ServingLoad([], first_ms=200, token_ms=200))
    assert summary["first_token_ms"]["mean"] == pytest.approx(550)
    assert summary["per_token_ms"]["median"] == pytest.approx((150 + 1000) / 2)
    assert summary["between_pieces_ms"]["mean"] == pytest.approx((100 + 200 + 1000) / 3)
    assert summary["whole_ms"]["p99"] == pytest.approx(400 + 0.99 * 1600)
    assert (summary["failed"], summary["errors"], summary["good_requests_per_s"]) == (
        1,
        ["no"],
        0.5,
    )
    assert percentiles_ms([]) is None
    with pytest.raises(ModelmillError, match="all 1 requests failed"):
        summarize_load([failed], 1.0, ServingLoad([]))


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_quantiles_are_those_of_every_other_figure(count: int) -> None:
    values = [float(each) for each in range(1, count + 1)]
    quantiles, expected = (
        percentiles_ms([each / 1000 for each in values]),
        MeasurementStats.from_values(values),
    )
    assert quantiles is not None
    assert (quantiles["median"], quantiles["p99"]) == pytest.approx((expected.median, expected.p99))


def test_the_median_of_two_is_between_them() -> None:
    quantiles = percentiles_ms([0.001, 0.009])
    assert quantiles is not None
    assert quantiles["median"] == pytest.approx(5)


def test_pieces_without_text_are_no_tokens() -> None:
    """A conversation begins with whose turn it is and ends with why: the first token is the first
    text.
    """
    events = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}}]},
        {"choices": [{"index": 0, "delta": {"content": "b"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    sent_requests: list[bytes] = []
    load = ServingLoad([(3, 2)], chat=True, ignore_eos=False)
    answer = OK + chunked(sse(*events, b"[DONE]"), 31) + b"0\r\n\r\n"
    (visit,), _ = against(
        answer, lambda remote: run_serving_load(remote, "m", load, lambda *_: None), sent_requests
    )
    assert (visit.error, len(visit.chunk_times), visit.output_tokens) == (None, 2, 2)
    assert sent_requests[0].startswith(b"POST /v1/chat/completions ")
    body = json.loads(sent_requests[0].split(b"\r\n\r\n", 1)[1])
    assert "ignore_eos" not in body
    assert len(body["messages"][0]["content"].split()) == 3


def make_timing(first: float, gaps: list[float], begin: float = 0.0) -> RequestTiming:
    """A visit that saw this."""
    chunks = [begin + first]
    for gap in gaps:
        chunks.append(chunks[-1] + gap)
    return RequestTiming(begin, chunks, 5, len(chunks))


def test_goodput_under_limits() -> None:
    visits = [
        make_timing(0.1, [0.01] * 4),
        make_timing(0.3, [0.01] * 4),
        make_timing(0.1, [0.05] * 4),
        RequestTiming(0.0, error="gone"),
    ]
    assert goodput(visits, 2.0, None, None) == 1.5
    assert goodput(visits, 2.0, 200, None) == 1.0
    assert goodput(visits, 2.0, 200, 20) == 0.5
    assert goodput(visits, 2.0, 1, None) == 0.0


@pytest.mark.parametrize(
    "load",
    [ServingLoad([(1, 1)]), ServingLoad([(1, 1)], first_ms=150, token_ms=30)],
    ids=["plain", "limits"],
)
def test_what_is_drawn(load: ServingLoad, tmp_path: Path) -> None:
    """Steps that end at all requests, lines where the median and the limits are."""
    visits = [
        make_timing(0.1, [0.01] * 4),
        make_timing(0.3, [0.02], 0.2),
        make_timing(0.2, [], 0.1),
        RequestTiming(0.0, error="gone"),
    ]
    drawn_axes: list[Any] = []

    def keep_axes(axes: Any) -> None:
        draw_subplots(axes, visits, 2.0, load)
        drawn_axes.extend(axes)

    plot(tmp_path / "x.png", keep_axes, "t", GRID_SHAPE)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    first = drawn_axes[0].get_lines()
    assert list(first[0].get_xdata()) == pytest.approx([100, 100, 200, 300])
    assert first[0].get_ydata()[-1] == 1.0
    assert first[1].get_xdata()[0] == pytest.approx(200)
    assert len(first) == (3 if load.first_ms is None else 4)
    assert len(drawn_axes[1].get_lines()) == (3 if load.first_ms is None else 4)
    goods = drawn_axes[4].get_lines()[0].get_ydata()
    assert goods[-1] == pytest.approx(1.5)
    assert max(drawn_axes[5].get_lines()[0].get_ydata()) == 2
