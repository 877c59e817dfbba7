from __future__ import annotations

import pytest

from modelmill.core.errors import RequestError
from modelmill.text.message_validation import validate_and_normalize_messages


def test_parts_become_one_text_and_arguments_objects():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    assert validate_and_normalize_messages(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
            ],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]


def deep() -> dict:
    value: dict = {}
    for _ in range(5000):
        value = {"a": value}
    return value


WRONG = [
    [],
    "hi",
    None,
    {},
    ["hi"],
    [{"role": "user"}],
    [{"content": "a"}],
    [{"role": "root", "content": "a"}],
    [{"role": ["user"], "content": "a"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": ["a"]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": "a", "extra": 1}],
    [{"role": "user", "content": "a", "name": 5}],
    [{"role": "user", "content": "a", "tool_calls": [{}]}],
    [{"role": "assistant", "content": "a", "tool_calls": [{}]}],
    [{"role": "assistant", "content": "a", "tool_calls": "f"}],
    [
        {
            "role": "assistant",
            "content": "a",
            "tool_calls": [{"function": {"name": "f", "arguments": 5}}],
        }
    ],
    [{"role": "user", "content": b"a"}],
    [{"role": "user", "content": "a", "name": float("nan")}],
    [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1e400}}}],
        }
    ],
    [{"role": "user", "content": "a", 5: "x"}],
    [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": deep()}}],
        }
    ],
]


@pytest.mark.parametrize("messages", WRONG, ids=range(len(WRONG)))
def test_wrong_messages_are_requests_errors(messages):
    with pytest.raises(RequestError) as caught:
        validate_and_normalize_messages(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"x": NaN}', '{"x": 1e400}', '{"x": ' + "[" * 300 + "]" * 300 + "}", "{", "3"]
)
def test_arguments_that_no_template_could_write_stay_the_text_that_the_model_wrote(text):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    (message,) = validate_and_normalize_messages(
        [{"role": "assistant", "content": None, "tool_calls": [call]}]
    )
    assert message["tool_calls"][0]["function"]["arguments"] == text
