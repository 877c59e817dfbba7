"""One line for what is wrong with a request's body."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.dialects.llama_cpp_schema import LlamaCppCompletionRequest
from modelmill.serve.embeddings_schema import EmbeddingRequest
from modelmill.serve.responses_schema import ResponsesRequest
from modelmill.serve.segmentation_schema import SegmentRequest
from modelmill.serve.strict_models import StrictModel
from modelmill.serve.validation_errors import summarize_errors
from tests.serve.service_thread import ServiceThread

TALK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
PROMPT = "prompt: must be a string, a list of strings, token ids, or lists of them"
CASES: list[tuple[type[StrictModel], dict[str, Any], str]] = [
    *(
        (CompletionRequest, {"model": "m", "prompt": bad}, PROMPT)
        for bad in (5, None, {"a": 1}, [1.5], ["a", 1], [True])
    ),
    (CompletionRequest, {**TEXT, "stop": 5}, "stop: must be a string, or a list of strings"),
    (
        CompletionRequest,
        {**TEXT, "stop": [""]},
        "stop: must have up to 64 strings that are not empty",
    ),
    (CompletionRequest, {**TEXT, "stop": ["a", 3]}, "stop[1]: must be a string"),
    (CompletionRequest, {**TEXT, "temperature": 3}, "temperature: must be at most 2.0"),
    (CompletionRequest, {**TEXT, "temperature": float("nan")},
    "temperature: must be a finite " "number"),
    (CompletionRequest, {**TEXT, "top_p": "1"}, "top_p: must be a number"),
    (CompletionRequest, {**TEXT, "zzzz": 1}, "zzzz: unknown field"),
    (CompletionRequest, {**TEXT, "guided_regex": "a"},
     "guided_regex: unknown field; did you mean structured_outputs.regex?"),
    (CompletionRequest, {**TEXT, "temprature": 1},
    "temprature: unknown field; did you mean " "temperature?"),
    (ChatRequest, {**TALK, "enable_thinking": False},
     "enable_thinking: unknown field; did you mean chat_template_kwargs.enable_thinking?"),
    (ChatRequest, {**TALK, "thinking": {"type": "disabled"}},
     "thinking: unknown field; did you mean chat_template_kwargs.enable_thinking?"),
    (ChatRequest, {**TALK, "functions": []}, "functions: unknown field; did you mean tools?"),
    (ResponsesRequest, {"model": "m", "input": "x", "max_tokens": 3},
     "max_tokens: unknown field; did you mean max_output_tokens?"),
    (CompletionRequest, {**TEXT, "logit_bias": {"5": "x"}}, "logit_bias.5: must be a number"),
    (LlamaCppCompletionRequest, {"prompt": "x", "logit_bias": [["a", 1]]},
     "logit_bias: number 0 must begin with a token id, not 'a'"),
    (CompletionRequest, {**TEXT, "logit_bias": [[5, 1], [77, "x"]]},
     "logit_bias: the bias of token 77 must be a number, or false for never, not 'x'"),
    (ChatRequest, {**TALK, "logit_bias": [[5, 1], 7]},
     "logit_bias: number 1, 7, must be a pair of a token id and its bias"),
    (ChatRequest, {**TALK, "logit_bias": [15, 16]},
     "logit_bias: number 0, 15, must be a pair of a token id and its bias"),
    (ChatRequest, {**TALK, "logit_bias": {"5": True}}, "logit_bias.5: must be a number"),
    (ChatRequest, {**TALK, "logit_bias": 5}, "logit_bias: must be an object"),
    (CompletionRequest, {**TEXT, "grammar_string": "x"},
     "grammar_string: unknown field; did you mean grammar?"),
    (CompletionRequest, {**TEXT, "grammar_": "x"},
     "grammar_: unknown field; did you mean grammar?"),
    (LlamaCppCompletionRequest, {"prompt": "x", "samplers": 5},
     "samplers: must be a list or a string"),
    (CompletionRequest, {**TEXT, "structured_outputs": {"json": 5}},
     "structured_outputs.json: must be an object or a string"),
    (CompletionRequest, {**TEXT, "user": "a\ud800"},
    "user: has an unpaired surrogate"),
    (CompletionRequest, {**TEXT, "structured_outputs": {"\ud800": 1}},
     "structured_outputs: has an unpaired surrogate"),
    (CompletionRequest, {}, "prompt: field required"),
    (ChatRequest, {**TALK, "messages": []}, "messages: must have at least 1 items"),
    (ChatRequest, {**TALK, "response_format": {"type": "xml"}},
     "response_format.type: must be 'text', 'json_object', 'json_schema' or 'grammar'"),
    (ChatRequest, {**TALK, "tools": [{"type": "function", "function": {"name": "a b"}}]},
     "tools[0].function.name: must match ^[a-zA-Z0-9_-]{1,128}$"),
    (ChatRequest, {**TALK, "tool_choice": "yes"},
     'tool_choice: must be "none", "auto", "required", {"type": "function", "function": '
     '{"name": …}} or {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'),
    (ChatRequest, {**TALK, "tool_choice": {"type": "function", "name": "f"}},
    "tool_choice.function: field required"),
    (ResponsesRequest, {"model": "m", "input": 5},
     "input: must be a string, or items: messages, calls and their outputs"),
    (ResponsesRequest, {"model": "m", "input": "x", "tools": [{"type": "magic"}]},
     "tools[0]: 'type' must be one of 'function', 'custom', 'namespace', 'web_search', "
     "'web_search_2025_08_26', 'web_search_preview', 'web_search_preview_2025_03_11', "
     "'file_search', 'code_interpreter', 'image_generation', 'computer', 'computer_use_preview', "
     "'local_shell', 'shell', 'apply_patch', 'mcp', 'tool_search', 'programmatic_tool_calling'"),
    (ResponsesRequest, {"model": "m", "input": "x", "tools": [{"name": "f"}]},
     "tools[0]: 'type' is missing"),
    (ResponsesRequest, {"model": "m", "input": "x",
    "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
     "tool_choice.tools: field required"),
    (EmbeddingRequest, {"model": "m", "input": 5},
     "input: must be a string, a list of strings, token ids, or lists of them; up to 2048"),
    (SegmentRequest, {"everything": {"points_per_side": 0}},
    "everything.points_per_side: must be " "at least 1"),
    (SegmentRequest, {"everything": "yes"},
    "everything: must be true or false, or an object of " "settings"),
    (SegmentRequest, {"points": [[5]]}, "points[0]: must have at least 2 items"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "body", "line"), CASES, ids=lambda value: getattr(value, "__name__", str(value))[:60]
)
def test_one_line_names_the_field_and_what_it_takes(
    shape: type[StrictModel], body: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        shape.model_validate(body)
    param, actual = summarize_errors(caught.value.errors(), shape)
    assert actual == line
    assert param == actual.split(":")[0].split(".")[0].split("[")[0]


@pytest.mark.parametrize(
    ("path", "body", "line", "param"),
    [
        ("chat/completions", b"", "the request's body is empty; send an object", None),
        ("chat/completions", [], "the request's body must be an object", None),
        ("completions", {**TEXT, "\ud800": 1},
         "the request's body has an unpaired surrogate", None),
        ("completions", {**TEXT, "structured_outputs": {"regex": "a\ud800"}},
         "structured_outputs: the regex has an unpaired surrogate",
         "structured_outputs"),
        ("chat/completions", {**TALK, "response_format": {"type": "json_schema"}},
         "response_format of type json_schema needs json_schema", "response_format"),
        ("chat/completions",
         {**TALK, "response_format": {"type": "json_schema",
         "json_schema": {"name": "x", "schema": {"type": "no"}}}},
         "response_format: the JSON schema cannot be used: Invalid type: no", "response_format"),
        ("chat/completions", {**TALK, "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}]},
         "tools: the parameters of f must have the type object",
         "tools"),
        ("chat/completions", {**TALK, "tool_choice": "required", "ignore_eos": True, "stream": True,
        "tools": [
            {"type": "function", "function": {"name": "f"}}]},
         "ignore_eos has no meaning with structured output or a forced call; leave it out",
         "ignore_eos"),
        ("chat/completions", {**TALK, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]},
         "messages[0].content[0]: the model has no vision encoder; give text only",
         "messages"),
        ("chat/completions", {**TALK, "messages": [{"role": "user", "content": "x" * 3000}]}, None,
        "messages"),
        ("chat/completions", {**TALK, "chat_template_kwargs": {"messages": []}},
         "the template option 'messages' is set by the engine; leave it out",
         "chat_template_kwargs"),
        ("responses", {"model": "m", "input": "x", "chat_template_kwargs": {"tools": []}},
         "the template option 'tools' is set by the engine; leave it out", "chat_template_kwargs"),
        ("completions", {**TEXT, "structured_outputs": {"regex": "("}}, None, "structured_outputs"),
        ("completions", {**TEXT, "prompt": [5] * 3000}, None, "prompt"),
        ("chat/completions", {**TALK, "messages": [{"role": "user", "content": "x" * 30000}]}, None,
        "messages"),
        ("embeddings", {"model": "m", "input": [5] * 3000}, None, "input"),
        ("responses", {"model": "m", "input": "x" * 3000}, None, "input"),
        ("responses", {"model": "m", "input": "x",
        "text": {"format": {"type": "json_schema", "name": "x",
                                                                       "schema": {"type": "no"}}}},
         "text.format: the JSON schema cannot be used: Invalid type: no", "text"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_refusals_name_the_field_that_was_sent(
    running: ServiceThread, path: str, body: Any, line: str | None, param: str | None
) -> None:
    if isinstance(body, dict):
        body = {**body, "model": "stories"}
    response = running.post(f"/v1/{path}", body)
    assert response.status == 400
    error = response.json["error"]
    assert (error["param"], error["message"]) == (param, line or error["message"])
