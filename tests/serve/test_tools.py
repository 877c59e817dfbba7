"""Function calling over the API."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from modelmill.outputs import CompletionOutput, OutputDelta, RequestOutput
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.routes.chat import ChatResponseBuilder
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.chat_format_registry import load_chat_syntax
from tests.serve.replaced_answers import replace_answers
from tests.serve.service_thread import ServiceThread

pytestmark = pytest.mark.usefixtures("brief_tools")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Ulm", "Bonn"]}, "days": {"enum": [1, 2]}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = {
    "model": "stories",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 280,
    "temperature": 0,
}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str
)
def test_a_forced_call(running: ServiceThread, choice: Any) -> None:
    body = {**ASK, "tools": [WEATHER], "tool_choice": choice}
    unstreamed = running.post("/v1/chat/completions", body).json["choices"][0]
    assert unstreamed["finish_reason"] == "tool_calls"
    assert unstreamed["message"]["content"] is None
    (call,) = unstreamed["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"town", "days"}
    events = running.post("/v1/chat/completions", {**body, "stream": True}).events
    assert events[-1] == "[DONE]"
    deltas = [event["choices"][0] for event in events[:-1]]
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", ())]
    assert len(calls) > 2
    assert calls[0]["id"]
    assert calls[0]["function"]["name"] == "weather"
    assert {piece["index"] for piece in calls} == {0}
    assert not any("id" in piece or "name" in piece["function"] for piece in calls[1:])
    assert (
        "".join(piece["function"]["arguments"] for piece in calls) == call["function"]["arguments"]
    )
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert not any(delta["delta"].get("content") for delta in deltas)


def test_one_of_two_tools(running: ServiceThread) -> None:
    body = {
        **ASK,
        "tools": [WEATHER, NOW],
        "tool_choice": "required",
        "temperature": 1.5,
        "n": 6,
        "seed": 1,
    }
    names = set()
    for choice in running.post("/v1/chat/completions", body).json["choices"]:
        if choice["finish_reason"] == "tool_calls":
            names.add(choice["message"]["tool_calls"][0]["function"]["name"])
    assert names
    assert names <= {"weather", "now"}


def test_a_call_that_the_model_writes_by_itself(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test model cannot generate a call, so its output is replaced by one."""
    answer = 'Wait. <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    replace_answers(monkeypatch, answer, 9)
    body = {**ASK, "tools": [NOW]}
    choice = running.post("/v1/chat/completions", body).json["choices"][0]
    assert choice["message"]["content"] == "Wait."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"
    events = running.post("/v1/chat/completions", {**body, "stream": True}).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Wait."
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [function["name"] for function in calls if "name" in function] == ["now"]
    monkeypatch.undo()
    none = running.post("/v1/chat/completions", {**body, "tool_choice": "none"}).json["choices"][0]
    assert "tool_calls" not in none["message"]


def test_a_conversation_with_calls_goes_on(running: ServiceThread) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"town": "Ulm", "days": 1}'},
    }
    messages = [*ASK["messages"], {"role": "assistant", "content": None,
        "tool_calls": [call]},  # type: ignore[misc]
            {"role": "tool", "tool_call_id": "c1", "content": "Sun"}]  # fmt: skip
    response = running.post(
        "/v1/chat/completions", {**ASK, "messages": messages, "tools": [WEATHER], "max_tokens": 3}
    )
    assert response.status == 200, response.body


def test_several_calls_at_once(running: ServiceThread) -> None:
    """Only if parallel calls are requested: a list of them."""
    body = {
        **ASK,
        "tools": [WEATHER, NOW],
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "max_tokens": 400,
    }
    counts = set()
    for seed in range(8):
        ask = {**body, "temperature": 1.5, "seed": seed}
        choice = running.post("/v1/chat/completions", ask).json["choices"][0]
        calls = choice["message"]["tool_calls"]
        counts.add(len(calls))
        pieces = [
            piece
            for event in running.post("/v1/chat/completions", {**ask, "stream": True}).events[:-1]
            for piece in event["choices"][0]["delta"].get("tool_calls", ())
        ]
        for place, call in enumerate(calls):
            call_deltas = [piece["function"] for piece in pieces if piece["index"] == place]
            assert call_deltas[0]["name"] == call["function"]["name"]
            assert (
                "".join(function["arguments"] for function in call_deltas)
                == call["function"]["arguments"]
            )
            if choice["finish_reason"] == "tool_calls":
                json.loads(call["function"]["arguments"])
        alone = running.post("/v1/chat/completions", {**ask, "parallel_tool_calls": False}).json[
            "choices"
        ][0]
        assert len(alone["message"]["tool_calls"]) == 1
    assert max(counts) > 1


ODD = {"type": "function", "function": {"name": "x", "parameters": {"type": "odd"}}}
BAD = [
    {"tools": [{}]}, {"tools": [{"type": "function"}]},
    {"tools": [{"type": "code", "function": {"name": "x"}}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tools": [NOW] * 2},
    {"tools": [NOW] * 1000},
    {"tool_choice": "required"}, {"tools": [NOW], "tool_choice": "sometimes"},
    {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {"tools": [ODD], "tool_choice": "required"},
    {"tools": [NOW], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
    {"tools": [{"type": "function", "function": {"name": "x" * 10**4}}]},
    {"functions": [{"name": "x"}]},
]  # fmt: skip


@pytest.mark.parametrize("more", BAD, ids=range(len(BAD)))
def test_tools_that_are_none(running: ServiceThread, more: Any) -> None:
    response = running.post("/v1/chat/completions", {**ASK, **more})
    assert response.status == 400, response.body
    assert response.json["error"]["type"] == "invalid_request_error"


def test_a_stop_string_in_the_middle_of_a_call_leaves_none_that_could_be_made(
    running: ServiceThread,
) -> None:
    body = {**ASK, "tools": [WEATHER], "tool_choice": "required"}
    for stop, reason in (("town", "stop"), ("no such text", "tool_calls")):
        (choice,) = running.post("/v1/chat/completions", {**body, "stop": [stop]}).json["choices"]
        events = running.post("/v1/chat/completions", {**body, "stop": stop, "stream": True}).events
        assert choice["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_forced_call_that_is_cut_before_it_is_one_is_no_content(
    running: ServiceThread, count: int
) -> None:
    body = {**ASK, "tools": [WEATHER], "tool_choice": "required", "max_tokens": count}
    (choice,) = running.post("/v1/chat/completions", body).json["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    assert not choice["message"].get("tool_calls")
    events = running.post("/v1/chat/completions", {**body, "stream": True}).events
    deltas = [event["choices"][0] for event in events[:-1]]
    assert not any(
        delta["delta"].get("content") or delta["delta"].get("tool_calls") for delta in deltas
    )
    assert deltas[-1]["finish_reason"] == "length"
    request_body = {
        "input": "x",
        "tools": [{"type": "function", **WEATHER["function"]}],
        "tool_choice": "required",
    }
    reply = running.post(
        "/v1/responses",
        {**request_body, "model": "stories", "max_output_tokens": count, "temperature": 0},
    ).json
    assert reply["status"] == "incomplete"
    assert not any(part["text"] for item in reply["output"] for part in item["content"])


def deep(container: str, depth: int) -> str:
    return (
        '{"a":' * depth + "{}" + "}" * depth
        if container == "object"
        else '{"a":' + "[" * depth + "]" * depth + "}"
    )


UNSAYABLE = ['{"minimum": NaN}', '{"maximum": 1e400}', '{"minimum": -Infinity}']
UNSAYABLE += [
    deep(nesting, depth)
    for nesting in ("object", "list")
    for depth in (100, 250, 350, 600, 900, 5000)
]


@pytest.mark.parametrize("schema", UNSAYABLE, ids=lambda text: f"{text[:12]}{len(text)}")
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_parameters_that_cannot_be_serialized_again_are_refused(
    running: ServiceThread, schema: str, choice: str
) -> None:
    """By their numbers and their depth, before anything else looks at them."""
    function = {"name": "f", "parameters": "@"}
    chat = {
        **ASK,
        "max_tokens": 2,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
    }
    flat = {
        "model": "stories",
        "input": "x",
        "max_output_tokens": 2,
        "tools": [{"type": "function", **function}],
    }
    some = {"type": "allowed_tools", "mode": choice, "tools": [{"type": "function", "name": "g"}]}
    other = {
        **flat,
        "tools": [*flat["tools"], {"type": "function", "name": "g"}],
        "tool_choice": some,
    }  # type: ignore[misc]
    messages = [
        ("chat/completions", chat),
        ("responses", {**flat, "tool_choice": choice}),
        ("responses", other),
    ]
    for path, body in messages:
        response = running.post(f"/v1/{path}", json.dumps(body).replace('"@"', schema).encode())
        assert response.status == 400, response.body
        assert len(response.json["error"]["message"]) < 300


@pytest.mark.parametrize("schema", UNSAYABLE, ids=lambda text: f"{text[:12]}{len(text)}")
def test_schemas_that_cannot_be_serialized_again_are_refused(
    running: ServiceThread, schema: str
) -> None:
    format = {"type": "json_schema", "name": "a", "schema": "@"}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": "@"}}
    for path, body in (
        ("responses", {"model": "stories", "input": "x", "text": {"format": format}}),
        ("chat/completions", {**ASK, "response_format": named}),
        ("chat/completions", {**ASK, "structured_outputs": {"json": "@"}}),
        ("completions", {"model": "stories", "prompt": "x", "structured_outputs": {"json": "@"}}),
    ):
        response = running.post(f"/v1/{path}", json.dumps(body).replace('"@"', schema).encode())
        assert response.status == 400, response.body
        assert len(response.json["error"]["message"]) < 300


def test_a_message_of_every_private_character_is_refused(running: ServiceThread) -> None:
    """None is left to keep control tokens apart with."""
    text = "".join(map(chr, range(0xE000, 0xF900)))
    for path, body in (
        ("chat/completions", {**ASK, "messages": [{"role": "user", "content": text}]}),
        ("responses", {"model": "stories", "input": text}),
    ):
        response = running.post(f"/v1/{path}", body)
        assert response.status == 400, response.body


@pytest.mark.parametrize(
    "schema",
    [{}, {"description": "x"}, {"properties": {"town": {"enum": ["Ulm", "Bonn"]}}}],
    ids=str,
)
def test_a_forced_call_is_a_call_whatever_the_parameters_leave_open(
    running: ServiceThread, schema: Any
) -> None:
    offered = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {
        **ASK,
        "max_tokens": 200,
        "tools": offered,
        "tool_choice": "required",
        "temperature": 1.3,
        "n": 8,
        "seed": 2,
    }
    choices = running.post("/v1/chat/completions", body).json["choices"]
    reasons = {choice["finish_reason"] for choice in choices}
    assert (
        reasons == {"tool_calls"} if "properties" in schema else reasons <= {"tool_calls", "length"}
    )
    for choice in choices:
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_a_forced_call_of_another_type_says_which_function(running: ServiceThread) -> None:
    offered = [
        WEATHER,
        {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}},
    ]
    error = running.post(
        "/v1/chat/completions", {**ASK, "tools": offered, "tool_choice": "required"}
    ).json["error"]
    assert error["message"] == ("tools: the parameters of f must have the type object")
    assert error["param"] == "tools"
    offered[1]["function"]["parameters"] = {
        "type": "object",
        "properties": {"a": {"$ref": "#/nowhere"}},
    }
    error = running.post(
        "/v1/chat/completions", {**ASK, "tools": offered, "tool_choice": "required"}
    ).json["error"]
    assert error["message"].startswith(
        "tools: the parameters of f: the JSON schema cannot be used: "
    )
    assert error["param"] == "tools"


REACT = SimpleNamespace(
    system_fingerprint="",
    tokenizer=None,
    chat_format=SimpleNamespace(format_name="qwen_react", thinking=None),
    remember_answer=lambda *_: None,
)


@pytest.mark.parametrize(
    ("generated", "ended", "stop", "reason", "arguments"),
    [
        ("Paris\n", "Observation:", None, "tool_calls", '"Paris"'),  # the format's own
        # after the call, also if the request has it
        ("Paris\n", "Observation:", "Observation:", "tool_calls", '"Paris"'),
        ("Paris\n", None, None, "tool_calls", '"Paris"'),
        ('{"town": "Par', "is", "is", "stop", '{"town": "Par'),
        ('{"town": "Par', "is", ["x", "is"], "stop", '{"town": "Par'),
        ('{"town": "Paris"}\n', "x", ["x", "is"], "tool_calls", '{"town": "Paris"}'),
        ('{"town": "Par', 7, None, "tool_calls", '{"town": "Par"}'),
    ],
)
def test_only_a_stop_string_of_the_request_cuts_a_call(
    generated: str, ended: Any, stop: Any, reason: str, arguments: str
) -> None:
    body = ChatRequest(**{**ASK, "tools": [WEATHER], "stop": stop})
    text = f"Thought: I need it.\nAction: weather\nAction Input: {generated}"
    output = CompletionOutput(0, text, [1], "stop", ended)
    answer = RequestOutput("r", None, [1], [output])
    builder = ChatResponseBuilder(
        body,
        SimpleNamespace(
            request_states=[SimpleNamespace(output=answer, prompt_thinking="free", begun="")]
        ),
        REACT,
    )  # type: ignore[arg-type]
    choice = builder._format_choice(output)
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, ended)
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        # what is no object is passed on as a JSON string
        "arguments": arguments,
    }
    piece = ChatResponseBuilder(
        body,
        SimpleNamespace(
            request_states=[SimpleNamespace(output=answer, prompt_thinking="free", begun="")]
        ),
        REACT,
    )._delta_event(  # type: ignore[arg-type]
        OutputDelta(0, text, (1,), "stop", answer)
    )
    assert json.loads(piece.removeprefix(b"data: "))["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(("text", "reason"), [('{"x": 1}', "tool_calls"), ('{"x":', "stop")])
def test_a_forced_call_whose_grammar_has_no_way_on_is_none(text: str, reason: str) -> None:
    """{"x": {"$ref": "#/properties/x"}}: no value is finite."""
    body = ChatRequest(**{**ASK, "tools": [WEATHER], "tool_choice": "required"})
    output = CompletionOutput(0, f'{{"name": "weather", "arguments": {text}', [1], "stop")
    result = RequestOutput("r", None, [1], [output])
    answer = SimpleNamespace(
        request_states=[SimpleNamespace(output=result, prompt_thinking="free", begun="")]
    )
    plain = SimpleNamespace(
        system_fingerprint="",
        tokenizer=None,
        chat_format=SimpleNamespace(format_name="json", thinking=None),
        remember_answer=lambda *_: None,
    )
    choice = ChatResponseBuilder(body, answer, plain)._format_choice(output)  # type: ignore[arg-type]
    assert choice["finish_reason"] == reason
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize("cut", [False, True])
def test_a_forced_answer_that_is_no_call_is_reported_unless_it_was_cut(cut: bool) -> None:
    """The grammar allows none; what the model wrote is not lost in silence where one came all the
    same.
    """
    for text in ('{"name": "f", "arguments": 10}', '{"name": "f", "ar', "10"):
        for size in (1, 100):
            parser = make_answer_parser(load_chat_syntax("llama3_json"), ["f"], forced=True)
            pieces = [
                piece
                for at in range(0, len(text), size)
                for piece in parser.push(text[at : at + size])
            ]
            assert pieces == []
            assert "".join(map(str, parser.flush(cut))) == ("" if cut else text)
