"""langchain-openai against a served engine, as docs/langchain.md says: streaming, usage, tools,
structured output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.types import SamplingParams
from modelmill.llm import LLM
from tests.serve.server_process import ServerProcess
from tests.serve.test_examples import BRIEF

langchain_openai = pytest.importorskip(
    "langchain_openai",
    reason="needs langchain-openai; `make conformance` installs it: .venv-conformance/bin/python "
    "-m pytest this",
)
TOWN = {
    "title": "place",
    "type": "object",
    "properties": {"town": {"enum": ["Ulm", "Bonn"]}},
    "required": ["town"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(stories: Path) -> Iterator[str]:
    with ServerProcess(stories, template=BRIEF) as serving:
        yield serving.url + "/v1"


@pytest.fixture
def model(url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model="stories",
        base_url=url,
        api_key="none",
        temperature=0,
        max_tokens=250,
        max_retries=0,
        stream_usage=True,
    )


def weather(town: str) -> str:
    """Weather of a town."""
    return f"Sunny in {town}"


def test_streaming_and_usage(model: Any, stories: Path) -> None:
    llm = LLM(stories, device="cpu", threads=1, chat_template=BRIEF, kv_cache_bytes=8 << 20)
    options = SamplingParams(temperature=0, max_tokens=250)
    expected = llm.chat([{"role": "user", "content": "The dog"}], options, progress=False)[
        0
    ].outputs[0]
    assert model.invoke("The dog").content == expected.text
    chunks = list(model.stream("The dog"))
    assert len(chunks) > 10
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.content == expected.text
    assert joined.usage_metadata["output_tokens"] == len(expected.token_ids)

    async def several() -> list[Any]:
        return await asyncio.gather(
            *(model.ainvoke(text) for text in ("The dog", "The cat", "The dog"))
        )

    dog, cat, again = asyncio.run(several())
    assert dog.content == again.content == expected.text != cat.content


def test_tools(model: Any) -> None:
    """A call that is forced, whole and streamed; its result goes back."""
    bound = model.bind_tools([weather], tool_choice="any")
    made = bound.invoke("Weather?")
    (call,) = made.tool_calls
    assert call["name"] == "weather"
    assert list(call["args"]) == ["town"]
    pieces = list(bound.stream("Weather?"))
    assert sum(bool(piece.tool_call_chunks) for piece in pieces) > 3
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert [(each["name"], each["args"]) for each in joined.tool_calls] == [
        ("weather", call["args"])
    ]
    result = {"role": "tool", "tool_call_id": call["id"], "content": weather(call["args"]["town"])}
    assert model.bind_tools([weather]).invoke(["Weather?", made, result]).content


def test_structured_output(model: Any) -> None:
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(TOWN, method=method).invoke("Where?")["town"] in (
            "Ulm",
            "Bonn",
        )
