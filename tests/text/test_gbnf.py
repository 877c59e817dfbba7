"""Grammars in llama.cpp's notation become Lark that llguidance takes."""

from __future__ import annotations

import pytest

from modelmill.core.errors import RequestError
from modelmill.text.gbnf import MAX_GRAMMAR_CHARS, gbnf_to_lark_grammar
from modelmill.text.grammar import check_grammar


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "yes" | "no"',
        'root ::= [0-9]+ (" " [a-z]{2,3})*',
        'root ::= item+\nitem ::= "- " [^\\n]+ "\\n"',
        'start: "x"',
    ],
)
def test_a_grammar_can_be_used(text: str) -> None:
    grammar = gbnf_to_lark_grammar(text)
    assert grammar.grammar_type == "lark"
    check_grammar(grammar)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("root ::= (", "it is no grammar in GBNF or Lark"),
        ("root ::= other", "it is no grammar in GBNF or Lark: Rule 'other' not found"),
        ('x ::= "a"', "it is no grammar in GBNF or Lark: No 'root' rule found"),
        ('root ::= "a', "it is no grammar in GBNF or Lark"),
        ("x" * (MAX_GRAMMAR_CHARS + 1), "characters, at most"),
    ],
)
def test_what_is_no_grammar(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"^grammar: .*{message}"):
        gbnf_to_lark_grammar(text)
    with pytest.raises(RequestError, match=f"^x: .*{message}"):
        gbnf_to_lark_grammar(text, "x")
