"""Forms of calls that models write instead of the declared one, in formats that allow them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax
from tests.text.tool_schemas import object_schema

TOOLS: dict[str, dict[str, Any]] = {
    "f": object_schema(x="string", n="integer"),
    "a&b": object_schema(**{'"q"': "string"}),
}
DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f"{}\n</｜DSML｜function_calls>'
CALL = '<｜DSML｜parameter name="{}" string="false">{}</｜DSML｜parameter>\n</｜DSML｜invoke>'
MINI = '<function name="f"><param name="x">{}</param></function>'
K3 = "<|open|>tools<|sep|><|open|>call tool={}<|close|>call<|sep|><|close|>tools<|sep|>"
# format, text, content, names, arguments
CASES = [
    ("deepseek_v32", DSML.format("/>"), "", [("f", "{}")]),
    # all arguments in one: only where the tool has no such argument
    ("deepseek_v32", DSML.format(">\n" + CALL.format("arguments", '{"x": "1"}')), "",
     [("f", '{"x": "1"}')]),
    ("deepseek_v32", DSML.format(">\n" + CALL.format("arguments", "7")), "",
     [("f", '{"arguments": 7}')]),
    # values of such an object have their declared type, as those of single arguments
    ("minicpm5", MINI.replace('"x"', '"input"').format('{"x": 1.10, "n": 2}'), "",
     [("f", '{"x": "1.10", "n": 2}')]),
    ("deepseek_v32", DSML.format(">\n" + CALL.format("arguments", '{"x": 7, "n": null}')), "",
     [("f", '{"x": "7", "n": null}')]),
    ("minicpm5", MINI.format("<![CDATA[ a\n<b> ]]>"), "", [("f", '{"x": " a\\n<b> "}')]),
    # a key without a value
    ("glm45", "<tool_call>f\n<arg_key>n</arg_key><arg_key>x</arg_key><arg_value>1</arg_value>"
     "</tool_call>", "", [("f", '{"x": "1"}')]),
    ("glm45", "<tool_call>f\n<arg_key>n</arg_key>\n</tool_call>", "", [("f", "{}")]),
    # escaped line breaks between the marks, and one that belongs to a value
    ("glm45", r"so <tool_call>f\n<arg_key>x</arg_key>\n<arg_value>a\nb</arg_value>\n"
     r"<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "so",
     [("f", r'{"x": "a\\nb", "n": 1}')]),
    ("glm47", r"<tool_call>g\n<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
     r"<tool_call>g\n<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", []),
    ("minicpm5", MINI.format("<![CDATA"), "", [("f", '{"x": "<![CDATA"}')]),
    ("mistral_v13", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}] .', ".",
     [("f", '{"n": 1}')]),
    ("mistral_v13", "[TOOL_CALLS] [not json]", "[TOOL_CALLS] [not json]", []),
    ("kimi_k2", "a<|tool_call_end|>b<|tool_calls_section_end|>", "ab", []),
    ("kimi_k3", "<|open|>response<|sep|>hi<|close|>response<|sep|><|close|>message<|sep|>", "hi",
     []),
    ("kimi_k3", K3.format(
        '"a&amp;b" index="1"<|sep|><|open|>argument key="&quot;q&quot;" type="string"<|sep|>'
        "&quot;<|close|>argument<|sep|>"), "", [("a&b", '{"\\"q\\"": "&quot;"}')]),
    # all arguments as one object between marks of their own
    ("kimi_k3", K3.format('"f"<|sep|><|open|>json type="object"<|sep|>{"x": "<|close|>", "n": [1]}'
                          "<|close|>json<|sep|>"), "",
     [("f", '{"x": "<|close|>", "n": [1]}')]),
    ("kimi_k3", K3.format('"f" index="1"<|sep|><|open|>json<|sep|> {}\n<|close|>json<|sep|>'), "",
     [("f", "{}")]),
    ("kimi_k3", K3.format('"f"<|sep|><|open|>json<|sep|>[1]<|close|>json<|sep|>') + "so", "so",
     [("f", "{}")]),
    ("kimi_k3", "<|open|>tools<|sep|>" + "".join(
        f'<|open|>call tool="f"<|sep|>{each}<|close|>call<|sep|>' for each in (
            '<|open|>json<|sep|>{"n": 1}<|close|>json<|sep|>',
            '<|open|>argument key="n" type="number"<|sep|>2<|close|>argument<|sep|>',
        )), "", [("f", '{"n": 1}'), ("f", '{"n": 2}')]),
    # a line that is no call, between two that are; nothing of a section is content
    ("minimax_m1", '<tool_calls>\n{"name": "f", "arguments": {"n": 1}}\n{broken}\n'
     '{"name": "f", "arguments": {}}\n{broken</tool_calls>\n.', ".",
     [("f", '{"n": 1}'), ("f", "{}")]),
    ("apertus", 'so <|tools_prefix|>[{"f": {"n": 1}}, {"f": {}}]<|tools_suffix|>', "so",
     [("f", '{"n": 1}'), ("f", "{}")]),
    ("gigachat3", '<|function_call|>{"name": "f", "arguments": {"n": 1}}', "",
     [("f", '{"n": 1}')]),
]  # fmt: skip


def parse(name: str, text: str, size: int) -> ParsedAnswer:
    """Parse a text in pieces of a size."""
    parser = make_answer_parser(load_chat_syntax(name), TOOLS)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return collect_answer([*(p for piece in pieces for p in parser.push(piece)), *parser.flush()])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_other_forms_of_a_call_are_read(
    name: str, text: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    answer = parse(name, text, size)
    assert [(call.name, call.arguments) for call in answer.calls] == calls
    assert answer.content == content


@pytest.mark.parametrize("declared", [" x ", "\tx\n", " "])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm47", "<tool_call>f<arg_key>{}</arg_key><arg_value>1</arg_value></tool_call>"),
        ("glm47", "<tool_call>f\n<arg_key>{}</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("qwen3_coder", "<function=f>\n<parameter={}>\n1\n</parameter>\n</function>"),
        ("minicpm5", '<function name="f"><param name="{}">1</param></function>'),
        ("deepseek_v32", DSML.format(">\n" + CALL.format("{}", "1"))),
    ],
)
def test_blanks_around_a_key_stay_where_they_are_declared(
    name: str, text: str, declared: str
) -> None:
    """A tool may have an argument without and one with blanks."""
    for tools in ({"f": object_schema(**{declared: "integer", "x": "string"})}, {"f": None}):
        for key in (declared, "x"):
            parser = make_answer_parser(load_chat_syntax(name), tools)
            pieces = [piece for char in text.format(key) for piece in parser.push(char)]
            (call,) = collect_answer([*pieces, *parser.flush()]).calls
            exact = tools["f"] is not None
            assert list(json.loads(call.arguments)) == [key if exact else key.strip()]
            if exact:
                assert json.loads(call.arguments) == {key: "1" if key == "x" else 1}


def test_half_a_surrogate_pair_is_replaced() -> None:
    """Also in a list that is written as the inside of a JSON string."""
    tools = {"f": {"properties": {"x": {"type": "array"}}}}
    parser = make_answer_parser(load_chat_syntax("minicpm5"), tools)
    text = MINI.format('[\\"\\ud800\\"]')
    answer = collect_answer([*parser.push(text), *parser.flush()])
    assert [call.arguments for call in answer.calls] == ['{"x": ["\\ufffd"]}']


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("blank", ["", "\n"])
def test_a_key_at_the_end_of_an_answer_has_no_value(blank: str, cut: bool) -> None:
    """GLM's line break between key and value is none of the value."""
    pair = "<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n"
    text = f"<tool_call>f\n{pair}<arg_key>x</arg_key>{blank}"
    for size in (1, len(text)):
        parser = make_answer_parser(load_chat_syntax("glm45"), TOOLS)
        texts = [text[at : at + size] for at in range(0, len(text), size)]
        pieces = [*(piece for each in texts for piece in parser.push(each)), *parser.flush(cut)]
        (call,) = collect_answer(pieces).calls
        assert call.arguments == ('{"n": 1' if cut else '{"n": 1}')


QWEN = "<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>so"
QWEN_X = "<parameter=x>\nrye\n</parameter>"
BOTH = '{"n": 1, "x": "rye"}'
# format, text, arguments
BEHIND_OBJECTS = [
    ("qwen3_coder", QWEN.format(f'{{"n": 1}}\n{QWEN_X}'), BOTH),
    ("qwen3_coder", QWEN.format(f"{{}}{QWEN_X}"), '{"x": "rye"}'),
    *(
        ("qwen3_coder", QWEN.format(f"<parameter=arguments>\n{each}{QWEN_X}"), arguments)
        for each, arguments in (
            ('{"n": 1}\n</parameter>\n', BOTH),
            ('{"n": 1}\n', BOTH),
            ("{ }\n</parameter>\n", '{ "x": "rye"}'),
        )
    ),
    # what cannot go on is no content
    ("qwen3_coder", QWEN.format('{"n": 1}}\n' + QWEN_X), '{"n": 1}'),
    ("qwen3_coder", QWEN.format('<parameter=input>{"n": 1} and\n</parameter>'), '{"n": 1}'),
    # a value whose closing mark is missing, with the line break before it
    ("qwen3_coder", QWEN.format(f"<parameter=n>\n1{QWEN_X}"), BOTH),
    ("qwen3_coder", QWEN.format(f'<parameter=o>\n["</parameter>"]{QWEN_X}'),
     '{"o": ["</parameter>"], "x": "rye"}'),
    ("qwen3_coder", QWEN.format("<parameter=n>\n1").replace("1\n", "1"), '{"n": 1}'),
    ("glm47", '<tool_call>f<arg_key>arguments</arg_key><arg_value>{"n": 1}</arg_value>'
     "<arg_key>x</arg_key><arg_value>rye</arg_value></tool_call>so", BOTH),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="arguments">{"n": 1}'
     '</parameter>\n<parameter name="x">rye</parameter>\n</invoke>\n</minimax:tool_call>so', BOTH),
    ("deepseek_v32", DSML.format(">\n" + CALL.format("arguments", '{"n": 1}').replace(
        "</｜DSML｜invoke>", CALL.format("x", "rye"))) + "so", BOTH),
    ("kimi_k3", K3.format('"f"<|sep|><|open|>json<|sep|>{"n": 1}<|close|>json<|sep|>'
     '<|open|>argument key="x" type="string"<|sep|>rye<|close|>argument<|sep|>') + "so", BOTH),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "arguments"), BEHIND_OBJECTS)
def test_arguments_behind_json_belong_to_the_call(name: str, text: str, arguments: str) -> None:
    tools = {"f": object_schema(x="string", n="integer", o="array")}
    for size in (1, 3, len(text)):
        parser = make_answer_parser(load_chat_syntax(name), tools)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        parsed = [each for piece in pieces for each in parser.push(piece)]
        answer = collect_answer([*parsed, *parser.flush()])
        assert ([call.arguments for call in answer.calls], answer.content) == ([arguments], "so")
    for end in range(3, len(text)):
        parser = make_answer_parser(load_chat_syntax(name), tools)
        answer = collect_answer([*parser.push(text[:end]), *parser.flush(cut=True)])
        assert all(arguments.startswith(call.arguments) for call in answer.calls)
        assert "so".startswith(answer.content.strip())


def test_a_tag_behind_a_number_is_text_where_the_tool_takes_strings() -> None:
    tools = {"f": object_schema(x=["string", "integer"])}
    parser = make_answer_parser(load_chat_syntax("qwen3_coder"), tools)
    text = QWEN.format("<parameter=x>\n1<parameter=n> is a tag\n</parameter>")
    (call,) = collect_answer([*parser.push(text), *parser.flush()]).calls
    assert json.loads(call.arguments) == {"x": "1<parameter=n> is a tag"}
