"""Values without quotes, and with them, of arguments whose type a tool declares."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax

CALLS = {
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{}</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<x>{}'
    "]<]minimax[>[</x>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
}
# type or schema, text, value
VALUES: list[tuple[Any, str, Any]] = [
    # quotes around a value that is no string
    ("number", '"4.5"', 4.5),
    ("integer", "'12'", 12),
    ("integer", '\\"12\\"', 12),
    ("integer", ' "12" ', 12),
    ("boolean", '"true"', True),
    ("boolean", '"False"', False),
    ({"enum": [10, 20]}, '"20"', 20),
    ("object", '"{\\"a\\": [1]}"', {"a": [1]}),
    (["integer", "null"], '"null"', None),
    ("integer", '"twelve"', '"twelve"'),
    ("integer", '"1e999x"', '"1e999x"'),
    ("integer", '"', '"'),
    ("integer", '""', '""'),
    ("number", '"NaN"', '"NaN"'),
    # quotes that tell a string from another value
    (["string", "null"], '"null"', "null"),
    (["string", "null"], "null", None),
    (["string", "integer"], '"12"', "12"),
    (["string", "integer"], "12", 12),
    (["string", "null"], '"quoted"', '"quoted"'),
    ("string", '"null"', '"null"'),
    ({}, '"12"', '"12"'),
    # words in other letters
    ("boolean", "TRUE", True),
    ("boolean", "fAlse", False),
    ("boolean", "1", "1"),
    ("boolean", "yes", "yes"),
    (["integer", "null"], "NULL", None),
    (["object", "null"], "none", None),
    (["boolean", "null"], "nil", None),
    (["boolean", "string"], "TRUE", "TRUE"),
    (["string", "null"], "NULL", "NULL"),
    ("integer", "none", "none"),
    ({}, "TRUE", "TRUE"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
@pytest.mark.parametrize("name", CALLS)
def test_a_text_has_its_declared_type(name: str, schema: Any, text: str, value: Any) -> None:
    declared = schema if isinstance(schema, dict) else {"type": schema}
    tools = {"f": {"type": "object", "properties": {"x": declared}}}
    for size in (1, 1000):
        parser = make_answer_parser(load_chat_syntax(name), tools)
        written = CALLS[name].format(text)
        pieces = [written[at : at + size] for at in range(0, len(written), size)]
        parsed = [each for piece in pieces for each in parser.push(piece)]
        (call,) = collect_answer([*parsed, *parser.flush()]).calls
        result = json.loads(call.arguments)["x"]
        assert (type(result), result) == (type(value), value)
