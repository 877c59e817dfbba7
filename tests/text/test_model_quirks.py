"""What models write beside their format's own form, and what the parsers make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.chat_syntax import ThinkingSyntax
from tests.text.tool_schemas import object_schema

TOOLS: dict[str, Any] = {
    "f": object_schema(
        town="string", days="integer", exact="boolean", either=["string", "integer"], list="array"
    ),
    "g": None,
    "one": {"type": "object", "properties": {"a": {}}, "required": ["a"]},
}
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"
# format, text, content, calls
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # tags that are left out
    ("qwen3_coder", "<function=f>\n<parameter=town>\nUlm\n</parameter>\n</function>", "",
     [("f", {"town": "Ulm"})]),
    ("qwen3_coder", "Hi.\n<tool_call><function=g></function></tool_call>", "Hi.", [("g", {})]),
    ("qwen3_coder", "<function=f>\n<parameter=town>\nUlm\n<parameter=days>\n3\n</function>", "",
     [("f", {"town": "Ulm", "days": 3})]),
    # types from the tool's parameters
    ("qwen3_coder", "<function=f><parameter=town>5</parameter><parameter=days>5</parameter>"
     "<parameter=exact>True</parameter><parameter=either>x</parameter></function>", "",
     [("f", {"town": "5", "days": 5, "exact": True, "either": "x"})]),
    ("qwen3_coder", "<function=f><parameter=days>soon</parameter></function>", "",
     [("f", {"days": "soon"})]),
    ("qwen3_coder", '<function=f><parameter=list>["</parameter>"]</parameter></function>', "",
     [("f", {"list": ["</parameter>"]})]),
    ("qwen3_coder", "<function=h>\n</function>", "<function=h>\n</function>", []),
    ("glm45", "<tool_call>f<arg_key>town</arg_key><arg_value>Ulm</arg_value></tool_call>", "",
     [("f", {"town": "Ulm"})]),
    ("glm47", "<tool_call>f\n<arg_key>either</arg_key>\n<arg_value>7</arg_value>\n</tool_call>", "",
     [("f", {"either": 7})]),
    # an attribute against the tool's parameters
    ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
     '<｜DSML｜parameter name="days" string="true">4</｜DSML｜parameter>'
     '<｜DSML｜parameter name="more" string="false">[1]</｜DSML｜parameter>'
     "</｜DSML｜invoke></｜DSML｜function_calls>", "",
     [("f", {"days": 4, "more": [1]})]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n"
     "```json\n{}\n```<｜tool▁call▁end｜>\nDone.", "Done.", [("g", {})]),
    # a section without a call, an id without a number, no arguments
    ("kimi_k2", KIMI + "g<|tool_call_argument_begin|><|tool_call_end|>", "", [("g", {})]),
    ("kimi_k2", "A<|tool_calls_section_begin|> b", "A b", []),
    ("gemma4", '<|tool_call>:f{town:<|"|>a"b<|"|>,list:[1,<|"|>,<|"|>]}<tool_call|>', "",
     [("f", {"town": 'a"b', "list": [1, ","]})]),
    # no braces: a call where the tool requires no argument
    ("gemma4", "<|tool_call>call:g<tool_call|> so", "so", [("g", {})]),
    ("gemma4", "<|tool_call>:one<tool_call|>", "<|tool_call>:one<tool_call|>", []),
    ("dots", '<dots_function_call>[{"name": "g", "arguments": {"a": 1}}]</dots_function_call> so',
     "so", [("g", {"a": 1})]),
    ("dots", "<dots_function_call>so</dots_function_call>"
     '<dots_function_call><invoke name="g"></invoke></dots_function_call>', "so", [("g", {})]),
    ("function_gemma", "<start_function_call>call:f{days:<escape>2<escape>}<end_function_call>", "",
     [("f", {"days": "2"})]),
    ("llama_pythonic", "Well: [f(town='It\\'s', days=-1), g()] there.", "Well:  there.",
     [("f", {"town": "It's", "days": -1}), ("g", {})]),
    ("llama_pythonic", "<|python_start|>[g()]<|python_end|>", "", [("g", {})]),
    ("llama_pythonic", "[f(1)]", "[f(1)]", []),
    ("llama3_json", 'So: {"name": "g", "parameters": {}} it is.', "So: it is.", [("g", {})]),
    ("granite3", '<tool_call> [{"name": "g", "arguments": {}}]', "", [("g", {})]),
    ("xlam", '[{"name": "g", "arguments": {}}, {"name": "f", "arguments": {"days": 1}}]', "",
     [("g", {}), ("f", {"days": 1})]),
    ("xlam", 'Well:\n```json\n[{"name": "g", "arguments": {}}]\n```\nso', "Well: so", [("g", {})]),
    ("xlam", 'Well:[TOOL_CALLS][{"name": "g", "arguments": {}}]', "Well:", [("g", {})]),
    ("xlam", 'Well:<tool_call>[{"name": "g", "arguments": {}}]</tool_call>', "Well:", [("g", {})]),
    ("xlam", '```json\n[{"name": "h"}]\n```', '```json\n[{"name": "h"}]\n```', []),
    ("gpt_oss", "<|channel|>commentary to=functions.g<|message|>{}<|call|>", "", [("g", {})]),
    ("gpt_oss", "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>"
     '{"x": "<|end|>"}<|call|>', "", [("g", {"x": "<|end|>"})]),
    ("gpt_oss", "<|channel|>final<|message|>Hi.<|return|>", "Hi.", []),
    ("gpt_oss", "No channels.", "No channels.", []),
    # arguments that break: what came before is kept, the rest of the call is dropped
    ("hermes", '<tool_call>{"name": "g", "arguments": {"x": !}}</tool_call> Sorry.', "Sorry.",
     [("g", "{}")]),
    ("mistral_v13", '[TOOL_CALLS]g[ARGS]{"x": !}[TOOL_CALLS]g[ARGS]{}', "",
     [("g", "{}"), ("g", {})]),
    # a call after something that only began like one
    ("hermes", '<tool_call>{"na <tool_call>{"name": "g", "arguments": {}}</tool_call>',
     '<tool_call>{"na', [("g", {})]),
]  # fmt: skip


def parse(name: str, text: str, size: int, **options: Any) -> ParsedAnswer:
    parser = make_answer_parser(load_chat_syntax(name), TOOLS, **options)
    pieces = []
    for at in range(0, len(text), size):
        pieces += parser.push(text[at : at + size])
    return collect_answer([*pieces, *parser.flush()])


@pytest.mark.parametrize("place", range(len(CASES)))
@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_what_models_write(place: int, size: int) -> None:
    name, text, content, calls = CASES[place]
    answer = parse(name, text, size)
    assert [call.name for call in answer.calls] == [called for called, _ in calls]
    for call, (_, arguments) in zip(answer.calls, calls, strict=True):
        parsed = call.arguments if isinstance(arguments, str) else json.loads(call.arguments)
        assert parsed == arguments
    assert " ".join(answer.content.split()) == " ".join(content.split())


@pytest.mark.parametrize("size", [1, 10**6])
def test_a_control_token_of_a_call_ends_the_thinking(size: int) -> None:
    """Kimi K2 leaves </think> out; a mark of ordinary text may be quoted in a thought."""
    text = f"I call it.{KIMI}functions.g:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    thinking = load_chat_syntax("kimi_k2").thinking
    answer = parse("kimi_k2", text, size, thinking=thinking, thinks=True)
    assert (answer.reasoning, answer.content) == ("I call it.", "")
    assert [(call.name, call.id) for call in answer.calls] == [("g", "functions.g:0")]
    quoted = parse(
        "hermes", "A <tool_call> is a tag.</think>", size, thinking=ThinkingSyntax(), thinks=True
    )
    assert quoted.reasoning == "A <tool_call> is a tag."


@pytest.mark.parametrize("size", [1, 10**6])
def test_two_thoughts_of_harmony_are_one_thinking(size: int) -> None:
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    )
    answer = parse("gpt_oss", text, size)
    assert (answer.reasoning, answer.content) == ("One.Two.", "Hi.")
