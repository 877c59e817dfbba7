"""One conversation says the same in every dialect, streamed or whole."""

from __future__ import annotations

import pytest

from tests.serve.dialect_calls import DIALECTS, post
from tests.serve.replaced_answers import replace_answers
from tests.serve.service_thread import ServiceThread

pytestmark = pytest.mark.usefixtures("brief_tools")

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"town": {"enum": ["Ulm", "Bonn"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("system", [None, "Be kind."])
@pytest.mark.parametrize("limit", [7, 40])
def test_the_same_text_and_usage(running: ServiceThread, system: str | None, limit: int) -> None:
    user = "Tell me about Tom 😀"
    answers = [
        (name, answer)
        for name, call in DIALECTS.items()
        for answer in call(running, system, user, [], limit, "")
    ]
    expected = answers[0][1]
    assert expected.text
    assert (expected.reason, expected.output_tokens) == ("length", limit)
    assert not [each for each in answers if each[1] != expected]


def test_the_same_forced_call(running: ServiceThread) -> None:
    answers = [
        (name, answer)
        for name, call in DIALECTS.items()
        if name != "ollama"
        for answer in call(running, None, "x", [WEATHER], 280, "weather")
    ]
    expected = answers[0][1]
    assert expected.reason == "tool_calls"
    assert [name for name, _ in expected.calls] == ["weather"]
    assert not [each for each in answers if each[1] != expected]


WRITTEN = (
    'Wait. <tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"town": "Bonn"}}\n</tool_call>'
)


def test_the_same_calls_that_the_model_writes_by_itself(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test model cannot generate a call, so its output is replaced by two."""
    replace_answers(monkeypatch, WRITTEN, 5)
    answers = [
        (name, answer)
        for name, call in DIALECTS.items()
        for answer in call(running, None, "x", [WEATHER], 280, "")
    ]
    expected = answers[0][1]
    assert expected.text == "Wait."
    assert expected.calls == [("weather", {"town": "Ulm"}), ("weather", {"town": "Bonn"})]
    assert expected.reason == "tool_calls"
    assert not [each for each in answers if each[1] != expected]


def test_completions_continue_the_rendered_prompt(running: ServiceThread) -> None:
    """A client that writes the template itself gets the text of the chat."""
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": "Hi"}]
    assert post(running, "/apply-template", {"messages": messages}).json == {"prompt": prompt}
    body = {"temperature": 0, "max_tokens": 12}
    chat = post(running, "/v1/chat/completions", {**body, "messages": messages}).json
    body = {**body, "prompt": prompt, "parse_special": True}
    text = post(running, "/v1/completions", {**body, "add_special_tokens": False}).json
    assert text["choices"][0]["text"].strip() == chat["choices"][0]["message"]["content"].strip()
    assert text["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
    with_bos = post(running, "/v1/completions", body).json
    assert with_bos["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"] + 1
    options = {"temperature": 0, "num_predict": 12}
    ask = {"prompt": prompt, "raw": True, "stream": False, "options": options}
    raw = post(running, "/api/generate", ask).json
    assert raw["response"] == with_bos["choices"][0]["text"]
    assert raw["prompt_eval_count"] == with_bos["usage"]["prompt_tokens"]
