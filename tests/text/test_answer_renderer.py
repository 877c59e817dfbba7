"""Answers as the models' own templates write them."""

from __future__ import annotations

import pytest

from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_registry import load_chat_syntax

CALL = ParsedToolCall("call00001", "f", '{"a": "x", "n": 2, "t": true}')
# the texts of the published templates and prompt descriptions
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "x", "n": 2, "t": true}}\n'
    "</tool_call>",
    "llama3_json": '{"name": "f", "parameters": {"a": "x", "n": 2, "t": true}}',
    "llama_pythonic": '[f(a="x", n=2, t=True)]',
    "mistral_v1": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x", "n": 2, "t": true}}]',
    "mistral_v11": '[TOOL_CALLS]f[CALL_ID]call00001[ARGS]{"a": "x", "n": 2, "t": true}',
    "mistral_v13": '[TOOL_CALLS]f[ARGS]{"a": "x", "n": 2, "t": true}',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n2\n"
    "</parameter>\n<parameter=t>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>2</arg_value>\n<arg_key>t</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "x", "n": 2, "t": true}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"a": "x", "n": 2, "t": true}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="t" string="false">true</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "gpt_oss": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{"a": "x", "n": 2, "t": true}',
    "gemma4": '<|tool_call>call:f{a:<|"|>x<|"|>,n:2,t:true}<tool_call|>',
    "function_gemma": "<start_function_call>call:f{a:<escape>x<escape>,n:2,t:true}"
    "<end_function_call>",
    "granite3": '<|tool_call|>[{"name": "f", "arguments": {"a": "x", "n": 2, "t": true}}]',
    "hy_v3": "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>x"
    "</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n<arg_key>t</arg_key>\n<arg_value>true"
    "</arg_value>\n</tool_call>\n</tool_calls>",
    "hy_v4": "<tool_calls><tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value><arg_key>n"
    "</arg_key><arg_value>2</arg_value><arg_key>t</arg_key><arg_value>true</arg_value></tool_call>"
    "</tool_calls>",
    "xlam": '[{"name": "f", "arguments": {"a": "x", "n": 2, "t": true}}]',
    "internlm2": '<|action_start|><|plugin|>\n{"name": "f", "parameters": '
    '{"a": "x", "n": 2, "t": true}}<|action_end|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"a": "x", "n": 2, "t": true}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "minimax_m1": '<tool_calls>\n{"name": "f", "arguments": {"a": "x", "n": 2, "t": true}}\n'
    "</tool_calls>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n'
    '<parameter name="n">2</parameter>\n<parameter name="t">true</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>x'
    "]<]minimax[>[</a>]<]minimax[>[<n>2]<]minimax[>[</n>]<]minimax[>[<t>true]<]minimax[>[</t>"
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "phi4_mini": 'functools[{"name": "f", "arguments": {"a": "x", "n": 2, "t": true}}]',
    "qwen_react": 'Action: f\nAction Input: {"a": "x", "n": 2, "t": true}',
    "json": '{"name": "f", "arguments": {"a": "x", "n": 2, "t": true}}',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_written_as_the_template_does(name: str) -> None:
    assert render_answer(load_chat_syntax(name), ParsedAnswer("", (CALL,))) == WRITTEN[name]


def test_thinking_comes_first_and_only_what_the_prompt_lacks() -> None:
    syntax = load_chat_syntax("hermes")
    answer = ParsedAnswer("Hi.", (), "Well.")
    closed = "Well.\n</think>\n\nHi."
    assert render_answer(syntax, answer, thinking=syntax.thinking) == f"<think>\n{closed}"
    assert render_answer(syntax, answer, thinking=syntax.thinking, thinks=True) == closed
    assert render_answer(syntax, answer) == "Hi."


def test_messages_of_harmony_follow_each_other() -> None:
    syntax = load_chat_syntax("gpt_oss")
    assert render_answer(syntax, ParsedAnswer("Hi.", (), "Well.")) == (
        "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    )
