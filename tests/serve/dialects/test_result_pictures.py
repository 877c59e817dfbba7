"""A picture in a tool's result does not end a conversation with a model that reads text only."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.serve.responses_schema import ResponsesRequest
from modelmill.serve.tool_image_placeholders import (
    IMAGE_PLACEHOLDER_TEXT,
    replace_tool_images_with_text,
)
from tests.serve.service_thread import ServiceThread

pytestmark = pytest.mark.usefixtures("brief_tools")

DOT = "iVBORw0KGgo="  # how a PNG begins: nothing reads on
URL = f"data:image/png;base64,{DOT}"
PICTURE = {"type": "image_url", "image_url": {"url": URL}}
TEXT = {"type": "text", "text": "done"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USER = {"role": "user", "content": "Look."}
SOURCE = {"type": "base64", "media_type": "image/png", "data": DOT}
SHORT = {"model": "stories", "max_tokens": 2}
WARNING = "a picture in results of tools became a text: the model has no vision encoder"


def chat(content: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": content}
    return {**SHORT, "messages": [USER, answer, result]}


ANTHROPIC = {
    **SHORT,
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "image", "source": SOURCE}],
                }
            ],
        },
    ],
}
RESPONSES = {
    "model": "stories",
    "max_output_tokens": 2,
    "input": [
        USER,
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_image", "image_url": URL}],
        },
    ],
}
OLLAMA = {
    "model": "stories",
    "stream": False,
    "options": {"num_predict": 2},
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
        },
        {"role": "tool", "tool_name": "look", "content": "done", "images": [DOT]},
    ],
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat([PICTURE, TEXT]),
    "/v1/messages": ANTHROPIC,
    "/v1/responses": RESPONSES,
    "/api/chat": OLLAMA,
}


@pytest.mark.parametrize("path", BODIES)
def test_the_conversation_goes_on_and_says_so(running: ServiceThread, path: str) -> None:
    answer = running.post(path, BODIES[path])
    assert answer.status == 200, answer.body
    [line] = answer.json["warnings"]
    assert line.partition(": ")[2] == WARNING


@pytest.mark.parametrize("path", BODIES)
def test_a_picture_of_the_user_is_refused_by_name(running: ServiceThread, path: str) -> None:
    body: dict[str, Any] = {**BODIES[path]}
    field = "input" if "input" in body else "messages"
    pictures: dict[str, dict[str, Any]] = {
        "/v1/messages": {"content": [{"type": "image", "source": SOURCE}]},
        "/v1/responses": {"content": [{"type": "input_image", "image_url": URL}]},
        "/api/chat": {"content": "Look.", "images": [DOT]},
    }
    picture = pictures.get(path, {"content": [PICTURE]})
    body[field] = [{"role": "user", **picture}, *body[field][1:]]
    answer = running.post(path, body)
    assert answer.status == 400
    names = {"/v1/responses": "input[0].content[0]", "/api/chat": "messages[0].images[0]"}
    name = names.get(path, "messages[0].content[0]")
    assert f'"{name}: the model has no vision encoder; give text only"' in answer.body.decode()


WORDS = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "I do."}]
IMAGE_BLOCK = {"type": "image", "source": SOURCE}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE_BLOCK]}
PAGES = {"type": "document", "source": {"type": "content", "content": [IMAGE_BLOCK]}}
MORE_PICTURES: list[tuple[str, dict[str, Any], str]] = [
    # the system text is another message of the chat request
    ("/v1/messages",
     {"system": "Be kind.", "max_tokens": 2,
      "messages": [*WORDS, {"role": "user", "content": [TEXT, IMAGE_BLOCK]}]},
     "messages[2].content[1]"),
    # two turns of the user become one, and pictures of results are text
    ("/v1/messages",
     {"max_tokens": 2,
      "messages": [WORDS[0], {"role": "user", "content": [TOOL_RESULT, PAGES]}]},
     "messages[1].content[1].source.content[0]"),
    ("/v1/messages/count_tokens",
     {"system": "a", "messages": [WORDS[0], {"role": "user", "content": [IMAGE_BLOCK]}]},
     "messages[1].content[0]"),
    ("/v1/responses",
     {"instructions": "Be kind.", "input": [*WORDS, {"role": "user", "content": [INPUT_IMAGE]}]},
     "input[2].content[0]"),
    ("/v1/responses/input_tokens",
     {"instructions": "a", "input": [{"type": "function_call_output", "call_id": "c",
                                      "output": [INPUT_IMAGE]},
                                     {"role": "user", "content": [INPUT_IMAGE]}]},
     "input[1].content[0]"),
    ("/v1/responses/compact",
     {"instructions": "a", "input": [*WORDS, {"role": "user", "content": [INPUT_IMAGE]}]},
     "input[2].content[0]"),
    ("/api/generate", {"system": "a", "prompt": "What?", "images": [DOT]}, "images[0]"),
    ("/api/chat", {"messages": [*WORDS, {"role": "user", "content": "?", "images": [DOT, DOT]}]},
     "messages[2].images[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "name"), MORE_PICTURES)
def test_a_picture_has_the_clients_name(
    running: ServiceThread, path: str, body: dict[str, Any], name: str
) -> None:
    answer = running.post(path, {"model": "stories", **body})
    assert answer.status == 400
    assert f'"{name}: the model has no vision encoder' in answer.body.decode()


def test_a_picture_of_an_earlier_response() -> None:
    items = [{"role": "user", "content": [INPUT_IMAGE]}]
    body = ResponsesRequest.model_validate({"model": "m", "input": [*items, *items]})
    assert list(body.image_field_paths(1)) == [
        "previous_response_id: a picture of an earlier item",
        "input[0].content[0]",
    ]


def test_what_the_template_reads(running: ServiceThread) -> None:
    body = {"model": "stories", "messages": chat([PICTURE, TEXT])["messages"]}
    shown = running.post("/apply-template", body).json["prompt"]
    assert f"{IMAGE_PLACEHOLDER_TEXT}\ndone" in shown
    counted = running.post("/tokenize", body).json["count"]
    usage = running.post("/v1/chat/completions", chat([PICTURE, TEXT])).json["usage"]
    assert usage["prompt_tokens"] == counted


def test_what_is_replaced() -> None:
    messages = chat([PICTURE, TEXT, {"type": "image", "image": "x"}])["messages"]
    out, warnings = replace_tool_images_with_text(
        [*messages, {"role": "user", "content": [PICTURE]}]
    )
    placeholder = {"type": "text", "text": IMAGE_PLACEHOLDER_TEXT}
    assert out[2]["content"] == [placeholder, TEXT, placeholder]
    assert out[3]["content"] == [PICTURE]
    assert messages[2]["content"][0] == PICTURE
    assert warnings == [f"messages: {WARNING.replace('a picture', '2 pictures')}"]
    assert replace_tool_images_with_text(chat("done")["messages"]) == (chat("done")["messages"], [])
