"""Constraints on nested tags: what they take, and what they cannot express."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.text.answer_grammar import whole_answer_grammar
from modelmill.text.grammar import GuideFactory, check_grammar
from modelmill.text.nested_tag_grammar import is_tag_name
from modelmill.text.tool_grammar import forced_call_grammar, optional_strict_call_grammar
from tests.text.answer_sampler import END, MarkTokenizer

PREFIX = "]<]minimax[>["
TOKENIZER = MarkTokenizer([PREFIX, "<tool_call>", "</tool_call>"], control=True)
GUIDES = GuideFactory(TOKENIZER, TOKENIZER.vocab_size, (END,))
NODE = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["id"],
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "x": {"type": "string"},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        "node": {"$ref": "#/$defs/node"},
        "unit": {"enum": ["C", None, 5]},
        "free": {"type": "object"},
    },
    "required": ["x"],
    "$defs": {"node": NODE},
}


def offered(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"function": {"name": "f", "parameters": parameters, "strict": True}}


def whole(inner: Grammar | None) -> Grammar:
    grammar = whole_answer_grammar(inner, "minimax_m3", None, "closed")
    assert grammar is not None
    check_grammar(grammar)
    return grammar


FORCED = whole(forced_call_grammar([offered(PARAMETERS)], None))
STRICT = whole(optional_strict_call_grammar([offered(PARAMETERS)], True, as_json=False))


def takes(grammar: Grammar, text: str) -> bool:
    """Whether a constraint allows a whole answer; short tags get the token before them."""
    guide = GUIDES.make_guide(grammar, (END,))
    pieces = TOKENIZER.split_control_tokens(text.replace("<", f"{PREFIX}<"))
    for id in (*TOKENIZER.encode_pieces(pieces), END):
        if not guide.mask()[id >> 3] >> (id & 7) & 1:
            return False
        guide.accept(id)
    return True


def call(arguments: str) -> str:
    return f'<tool_call>\n<invoke name="f">{arguments}</invoke>\n</tool_call>'


GOOD = [
    "<x></x>",
    "<x>any text</x><list><item>true</item><item>false</item></list>",
    "<x>a</x><node><id>1</id><next><id>2</id><next><id>3</id></next></next></node>",
    "<x>a</x><unit>C</unit>",
    "<x>a</x><unit>null</unit>",
    '<x>a</x><free>{"a": [1]}</free>',
]
BAD = [
    "",
    "<list><item>true</item></list>",
    "<x>a</x><list></list>",
    "<x>a</x><list><item>1</item></list>",
    "<x>a</x><list><item>true</item><item>true</item><item>true</item></list>",
    "<x>a</x><node><next><id>2</id></next></node>",
    "<x>a</x><unit>F</unit>",
    "<x>a<b>c</b></x>",
    "<x>a</x><other>1</other>",
]


@pytest.mark.parametrize("arguments", GOOD)
def test_arguments_that_fit_are_allowed(arguments: str) -> None:
    assert takes(FORCED, call(arguments))
    assert takes(STRICT, call(arguments))
    assert takes(STRICT, f"So: {call(arguments)}")


@pytest.mark.parametrize("arguments", BAD)
def test_arguments_that_do_not_fit_are_not(arguments: str) -> None:
    assert not takes(FORCED, call(arguments))
    assert not takes(STRICT, call(arguments))


def test_text_is_free_unless_it_is_read_as_a_call() -> None:
    assert takes(STRICT, "no call")
    assert not takes(FORCED, "no call")
    assert not takes(STRICT, 'so <invoke name="f"></invoke>')
    assert not takes(STRICT, call("<x>a</x>") + " and more")


@pytest.mark.parametrize(
    ("name", "is_name"), [("a b", True), ("é/~", True), ("/a", False), ("a<b", False), ("", False)]
)
def test_names_that_can_be_tags(name: str, is_name: bool) -> None:
    assert is_tag_name(name) == is_name


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a>": {}}, "required": ["a>"]}, "f needs the property 'a>', which this"),
        ({"anyOf": [{"required": ["a"]}]}, "the parameters of f have anyOf at the top"),
    ],
)
def test_parameters_that_tags_cannot_express_are_refused(
    parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        whole(forced_call_grammar([offered({"type": "object", **parameters})], None))


def test_an_optional_argument_that_cannot_be_a_tag_is_left_out() -> None:
    parameters = {"type": "object", "properties": {"a>": {}, "b": {"type": "null"}}}
    grammar = whole(forced_call_grammar([offered(parameters)], None))
    assert takes(grammar, call("<b>null</b>"))
    assert takes(grammar, call(""))
