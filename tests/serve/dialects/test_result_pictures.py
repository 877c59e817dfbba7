"""A picture in a tool's result does not end a conversation with a model that reads text only."""

from __future__ import annotations

from typing import Any

import pytest

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
    assert "messages[0].content[0]: the model has no vision encoder" in answer.body.decode()


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
