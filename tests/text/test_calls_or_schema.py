"""Tools beside a schema: an answer is calls, or content of the schema, in every format."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.text.answer_grammar import PromptThinking, whole_answer_grammar
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall, collect_answer
from modelmill.text.answer_renderer import render_answer
from modelmill.text.call_starts import list_call_starts, match_call_start
from modelmill.text.calls_or_schema import calls_or_schema_grammar, find_ambiguous_calls
from modelmill.text.chat_format_registry import list_chat_formats, load_chat_syntax
from modelmill.text.chat_syntax import ChatSyntax
from modelmill.text.grammar import check_grammar
from tests.hypothesis_examples import examples
from tests.text.answer_sampler import AnswerSampler
from tests.text.random_schemas import is_valid
from tests.text.test_answer_grammar import STATES, WEATHER, sampler, tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "string", "maxLength": 60},
        "name": {"type": "string", "maxLength": 9},
        "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["x"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = {"f": WEATHER, "now": NOW}
FORMATS = list_chat_formats()
CODE = "qwen3_coder"
"""Its marks are text that may stand in an argument, which is a known limit of its parser."""


def constraint(
    name: str,
    state: PromptThinking = "closed",
    *,
    several: bool = True,
    strict: bool = False,
    schema: Any = None,
) -> Grammar:
    """The grammar of a whole answer."""
    offered = [tool(each, parameters) for each, parameters in TOOLS.items()]
    offered[0]["function"]["strict"] = strict
    inner, reasons = calls_or_schema_grammar(offered, several, schema or SCHEMA, name)
    assert inner is not None
    assert reasons == []
    grammar = whole_answer_grammar(inner, name, load_chat_syntax(name).thinking, state)
    assert grammar is not None
    check_grammar(grammar)
    return grammar


def parse(syntax: ChatSyntax, pieces: Any, *, thinks: bool = False, cut: bool = False) -> Any:
    parser = make_answer_parser(syntax, TOOLS, thinking=syntax.thinking, thinks=thinks, schema=True)
    out = [*(piece for text in pieces for piece in parser.push(text)), *parser.flush(cut)]
    return collect_answer(out)


def meaning(answer: ParsedAnswer) -> Any:
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


def check_sampled(name: str, seed: int) -> str:
    """Sample one answer and check it; returns what it is, "" where it takes too long."""
    syntax, rng = load_chat_syntax(name), random.Random(f"{name} {seed}")
    state: PromptThinking = rng.choice(STATES) if name != "gpt_oss" else "free"
    quoted = name in (CODE, "gpt_oss") or (syntax.thinking and syntax.thinking.ends_at_calls)
    control = bool(quoted) or rng.random() < 0.5
    several, strict = rng.random() < 0.5, rng.random() < 0.5
    grammar = constraint(name, state, several=several, strict=strict)
    text = sampler(name, control).sample(grammar, rng)
    if text is None:
        return ""
    answer = parse(syntax, text, thinks=state == "open")
    assert meaning(answer) == meaning(parse(syntax, [text], thinks=state == "open")), text
    for call in answer.calls:
        declared = TOOLS[call.name] if strict or not syntax.calls.writes_arguments_as_json else NOW
        assert is_valid(json.loads(call.arguments), declared, declared), text
    if answer.calls:
        assert not answer.content or name == "qwen_react", text
        assert len(answer.calls) == 1 or several, text
        return "calls"
    assert answer.content.startswith("{"), text
    assert is_valid(json.loads(answer.content), SCHEMA, SCHEMA), text
    return "content"


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_is_sampled_is_calls_or_content(name: str) -> None:
    results = [check_sampled(name, seed) for seed in range(examples(full=24, quick=4))]
    assert "calls" in results or "content" in results


def written(name: str, content: str = "", *calls: tuple[str, str]) -> str:
    """An answer as a model of the format writes it."""
    made = tuple(ParsedToolCall("abcdefghi", each, arguments) for each, arguments in calls)
    text = render_answer(load_chat_syntax(name), ParsedAnswer(content, made))
    if name == "k2_horizon_typed":
        text = text.replace(">integer<", ">number<")  # the name that the constraint writes
    return text.removesuffix("<|call|>").removesuffix("<|return|>")


def accepts(name: str, text: str, control: bool, **options: Any) -> bool:
    source: Any = sampler(name, (control or name == "gpt_oss") and name != "qwen_react")
    assert isinstance(source, AnswerSampler)
    return source.accepts(constraint(name, **options), text)


TOWN = '{"town": "Ulm", "days": 3}'
CALL = ("f", TOWN)
VALUE = '{"x": "a", "name": "f"}'


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_and_content_are_allowed_and_nothing_else(name: str, control: bool) -> None:
    free = "Hello. "
    for strict in (False, True):
        call = written(name, "", CALL)
        assert accepts(name, call, control, strict=strict), call
        content = written(name, VALUE)
        assert accepts(name, content, control, strict=strict), content
    thought = name == "qwen_react"  # text before a call is its thinking
    for text in (
        written(name, free),
        "" if thought else written(name, free, CALL),
        written(name, VALUE, CALL),
        written(name, '{"y": "a"}'),
        written(name, '{"x": 1}'),
        written(name, "", ("other", TOWN)),
        written(name, "", CALL) + free,
        "",
    ):
        assert not accepts(name, text, control), text


@pytest.mark.parametrize("name", FORMATS)
def test_strict_arguments_and_one_call_alone(name: str) -> None:
    bad = written(name, "", ("f", '{"town": "Ulm", "days": 99}'))
    assert not accepts(name, bad, False, strict=True)
    calls = load_chat_syntax(name).calls
    assert accepts(name, bad, False) == calls.writes_arguments_as_json
    if calls.max_calls is None and calls.style != "harmony":
        two = written(name, "", CALL, CALL)
        assert accepts(name, two, False), two
        assert not accepts(name, two, False, several=False)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_allowed_is_read_as_it_is(name: str) -> None:
    syntax = load_chat_syntax(name)
    for content, calls in ((VALUE, []), ("", [CALL]), ('{"x": "[f(<tool_call>\\n"}', [])):
        text = written(name, content, *calls)
        for size in (1, 3, len(text)):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            answer = parse(syntax, pieces)
            assert answer.content == content
            read = [(call.name, json.loads(call.arguments)) for call in answer.calls]
            assert read == [(called, json.loads(arguments)) for called, arguments in calls]
            if name == "qwen_react" or syntax.content[1]:
                continue  # a thought, or one or two letters of the mark behind the content
            for end in range(len(pieces)):
                part = parse(syntax, pieces[:end], cut=True)
                assert content.startswith(part.content)


OTHER_OPENINGS = [
    ("gigachat3", 'function call<|role_sep|>\n{"name": "now", "arguments": {}}<|message_sep|>\n\n'),
    ("gigachat3", '<|function_call|>{"name": "now", "arguments": {}}<|message_sep|>\n\n'),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}'),
    ("llama_pythonic", "<|python_start|>[now()]<|python_end|>"),
    ("gemma3", "```tool_code\n[now()]\n```"),
    ("json", '{"name": "now", "arguments": {}}'),
    ("json", '[{"name": "now", "arguments": {}}]'),
    ("xlam", '<tool_call>[{"name": "now", "arguments": {}}]'),
    ("hermes", '\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ("qwen_react", "Thought: I need it.\nAction: now\nAction Input: {}"),
    ("qwen_react", " I need it.\nAction: now\nAction Input: {}"),
]


@pytest.mark.parametrize(("name", "text"), OTHER_OPENINGS)
def test_other_openings_that_models_write(name: str, text: str) -> None:
    assert accepts(name, text, name != "hermes"), text
    for pieces in (text, [text]):
        (call,) = parse(load_chat_syntax(name), pieces).calls
        assert (call.name, call.arguments) == ("now", "{}")


@pytest.mark.parametrize("text", [
    f"Thought: I know.\nFinal Answer: {VALUE}", f" I know.\nFinal Answer: {VALUE}",
    f"Final Answer:{VALUE}", VALUE,
])  # fmt: skip
def test_a_thought_of_react_may_end_in_content(text: str) -> None:
    assert accepts("qwen_react", text, False)
    for pieces in (text, [text]):
        assert parse(load_chat_syntax("qwen_react"), pieces).content == VALUE


@pytest.mark.parametrize("name", ["llama3_json", "json"])
def test_json_that_is_no_call_is_content(name: str) -> None:
    key = load_chat_syntax(name).calls.arguments_key
    call = f'{{"name": "f", "{key}": {TOWN}}}'
    for text in (
        f'{{"name": "g", "{key}": {{}}}}', f'{{"name": "f", "{key}": 1}}', '{"name": "f"}',
        f'{{"{key}": {{}}, "name": "f"}}', f'{{"x": {call}}}', f"[[{call}]]", "[]", '"[f("', "-1",
        f'{{"na me": "f", "{key}": {{}}}}',
    ):  # fmt: skip
        for pieces in (text, [text]):
            answer = parse(load_chat_syntax(name), pieces)
            assert (answer.content, answer.calls) == (text, ())
    for text in (call, call.replace(": ", " : ").replace("{", "{\n ")):
        assert [each.name for each in parse(load_chat_syntax(name), text).calls] == ["f"]


def test_which_calls_content_could_be() -> None:
    open_object = {"type": "object"}
    for name in FORMATS:
        expected = ["f", "now"] if name in ("json", "llama3_json", "xlam") else []
        assert find_ambiguous_calls(open_object, list(TOOLS), name) == expected
        assert find_ambiguous_calls(SCHEMA, list(TOOLS), name) == []
    named = {
        "type": "object",
        "properties": {"name": {"enum": ["f"]}, "parameters": {"type": "object"}},
        "additionalProperties": False,
    }
    assert find_ambiguous_calls(named, list(TOOLS), "llama3_json") == ["f"]
    assert find_ambiguous_calls(named, list(TOOLS), "json") == []
    assert find_ambiguous_calls({"type": "array"}, list(TOOLS), "json") == ["f", "now"]
    assert find_ambiguous_calls({"type": "array"}, list(TOOLS), "llama3_json") == []


@pytest.mark.parametrize("name", ["json", "llama3_json"])
def test_ambiguous_content_is_a_call(name: str) -> None:
    key = load_chat_syntax(name).calls.arguments_key
    more = f'{{"name": "f", "{key}": {{}}, "more": [1]}}'
    assert accepts(name, more, False, schema={"type": "object"})
    answer = parse(load_chat_syntax(name), more)
    assert meaning(answer) == ("", "", [("f", "{}")])


@pytest.mark.parametrize("name", FORMATS)
def test_no_json_begins_as_a_call_with_a_mark(name: str) -> None:
    syntax = load_chat_syntax(name)
    for start in list_call_starts(syntax, TOOLS):
        for text in ('{"x": 1}', "[1]", '"x"', "-1", "12", "true", "false", "null", "[[", "{}"):
            assert match_call_start(text, start) is False or text == "[["


ODD_PARAMETERS = [
    {"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {"type": "string"}}},
    {"type": "string"}, {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
    {"type": "object", "properties": {"a": {"type": "odd"}}}, None,
    {"type": "object", "properties": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}},
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_that_a_format_cannot_express_hinder_only_strict_tools(name: str) -> None:
    for parameters in ODD_PARAMETERS:
        odd = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
        grammar, reasons = calls_or_schema_grammar([odd, tool("now", NOW)], True, SCHEMA, name)
        assert grammar is not None
        assert reasons == []
        assert [each["name"] for each in json.loads(grammar.text)["functions"]] == ["odd", "now"]
    odd = {"type": "function", "function": {"name": "odd", "strict": True,
                                            "parameters": {"type": "string"}}}  # fmt: skip
    with pytest.raises(RequestError, match="must have the type object"):
        calls_or_schema_grammar([odd], True, SCHEMA, name)


def test_a_tool_that_cannot_be_written_is_left_out() -> None:
    odd = tool("odd", {"type": "object", "properties": {"a-b": {}}, "required": ["a-b"]})
    grammar, reasons = calls_or_schema_grammar([odd, tool("now", NOW)], True, SCHEMA, "lfm2")
    assert grammar is not None
    assert [each["name"] for each in json.loads(grammar.text)["functions"]] == ["now"]
    assert len(reasons) == 1
    assert reasons[0].startswith("odd cannot be called beside a schema: odd needs")
    assert calls_or_schema_grammar([odd], True, SCHEMA, "lfm2")[0] is None
