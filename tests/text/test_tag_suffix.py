"""Tags may have a suffix of the checkpoint (Hunyuan): the template shows it, every part uses it."""

from __future__ import annotations

import random

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall, collect_answer
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_loader import (
    TemplateChatFormat,
    load_chat_format,
    make_chat_answer_parser,
)
from modelmill.text.chat_format_registry import load_chat_syntax, parser_marks_with_calls
from modelmill.text.tag_suffix import expand_format_calls, find_tag_suffix, remove_tag_suffixes
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.text.conftest import hf_files, small_hf
from tests.text.test_answer_grammar import check_forced_calls, check_strict_calls
from tests.text.tool_schemas import object_schema
from tools.chat_formats.check_answers import check_answer

TAGS = ("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
NAMES = ("hy_v3:open", "hy_v4:6124c78e")
TOOLS = {"f": object_schema(town="string", days="integer")}


def template_of(constant: str, tags: tuple[str, ...] = TAGS) -> str:
    """A template that writes tags by ``format``, as Hunyuan's do."""
    sets = [f"{{%- set SUFFIX = {constant} -%}}"]
    for tag in tags:
        sets.append(f"{{%- set {tag}_begin = '<{tag}{{}}>'.format(SUFFIX) -%}}")
        sets.append(f"{{%- set {tag}_end = '</{tag}{{}}>'.format( SUFFIX ) -%}}")
    return "".join(sets) + (
        "{{ messages[0].content }}{% if tools %}{{ tool_calls_begin }}{% endif %}"
        "{% if add_generation_prompt %}{{ think_begin }}{% endif %}"
    )


def load_chat(template: str) -> TemplateChatFormat:
    """The chat format of a template whose tags are no control tokens."""
    files = hf_files(small_hf(), chat_template=template)
    chat = load_chat_format(files, load_tokenizer(hf_files()))
    assert isinstance(chat, TemplateChatFormat)
    return chat


def without(tag: str) -> tuple[str, ...]:
    """All tags but one."""
    return tuple(each for each in TAGS if each != tag)


@pytest.mark.parametrize(
    ("template", "name", "closing"),
    [
        (template_of("':open'"), "hy_v3:open", "</think:open>"),
        (template_of("':6124c78e'", without("tool_sep")), "hy_v4:6124c78e", "</think:6124c78e>"),
        (template_of('"" ', without("tool_sep")), "hy_v4", "</think>"),
        (template_of("''"), "hy_v3", "</think>"),
    ],
)
def test_a_template_shows_the_suffix(template: str, name: str, closing: str) -> None:
    chat = load_chat(template)
    assert chat.format_name == name
    assert chat.thinking is not None
    assert chat.thinking.marks[1] == closing
    assert chat.render([{"role": "user", "content": "Hi."}]) == f"Hi.{chat.thinking.marks[0]}"
    chat.close()


def test_a_suffix_in_the_text_of_a_template_counts_too() -> None:
    written = "".join(f"<{tag}:a1>x</{tag}:a1>" for tag in without("tool_sep"))
    assert load_chat("{% if tools %}'</think>' " + written).format_name == "hy_v4:a1"


def test_only_constants_are_filled_in() -> None:
    template = "{% set A = ':x' %}{% set B = a.b %}'<t{}>'.format(A) '<u{}>'.format(B) \"{}\""
    expanded = expand_format_calls(template)
    assert expanded.endswith("'<t:x>' '<u{}>'.format(B) \"{}\"")
    assert find_tag_suffix(("t", "u"), expanded) == ":x"
    assert find_tag_suffix((), expanded) == ""
    assert remove_tag_suffixes(("t",), "<t:x></t:x><u:x><t:x y>") == "<t></t><u:x><t:x y>"
    assert remove_tag_suffixes((), "<t:x>") == "<t:x>"


@pytest.mark.parametrize("name", NAMES)
def test_every_part_uses_the_suffix(name: str) -> None:
    for seed in range(30):
        check_answer(load_chat_syntax(name), random.Random(f"{name} {seed}"))
    assert check_forced_calls(name, range(12)) >= 1
    assert sum(check_strict_calls(name, range(6))) >= 1
    syntax, suffix = load_chat_syntax(name), name[name.index(":") :]
    marks = set(parser_marks_with_calls(syntax, syntax.thinking))
    assert {f"<tool_calls{suffix}>", f"</arg_value{suffix}>", f"</think{suffix}>"} <= marks
    assert not any("<" in mark and suffix not in mark for mark in marks)


def test_a_call_is_written_with_the_suffix() -> None:
    answer = ParsedAnswer("", (ParsedToolCall("i", "f", '{"town": "Ulm", "days": 2}'),))
    assert render_answer(load_chat_syntax("hy_v4:a1"), answer) == (
        "<tool_calls:a1><tool_call:a1>f<arg_key:a1>town</arg_key:a1><arg_value:a1>Ulm"
        "</arg_value:a1><arg_key:a1>days</arg_key:a1><arg_value:a1>2</arg_value:a1>"
        "</tool_call:a1></tool_calls:a1>"
    )


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_inside_the_thinking_is_one(size: int) -> None:
    chat = load_chat(template_of("':a1'", without("tool_sep")))
    parser = make_chat_answer_parser(chat, TOOLS, thinks=True, continues=False)
    assert parser is not None
    text = (
        "The <tool_calls> of it.<tool_calls:a1><tool_call:a1>f<arg_key:a1>town</arg_key:a1>"
        "<arg_value:a1></arg_value></arg_value:a1></tool_call:a1></tool_calls:a1>"
    )
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    answer = collect_answer([*(p for piece in pieces for p in parser.push(piece)), *parser.flush()])
    assert (answer.reasoning, answer.content) == ("The <tool_calls> of it.", "")
    assert [(call.name, call.arguments) for call in answer.calls] == [
        ("f", '{"town": "</arg_value>"}')
    ]


@pytest.mark.parametrize("suffix", ["", ":b2"])
def test_tags_with_another_suffix_are_text(suffix: str) -> None:
    text = f"<tool_calls{suffix}><tool_call{suffix}>f</tool_call{suffix}></tool_calls{suffix}>"
    parser = make_answer_parser(load_chat_syntax("hy_v4:a1"), TOOLS)
    answer = collect_answer([*parser.push(text), *parser.flush()])
    assert (answer.content, answer.calls) == (text, ())


def test_a_format_without_such_tags_has_no_suffix() -> None:
    with pytest.raises(ValueError, match="the tags of the chat format hermes have no suffix"):
        load_chat_syntax("hermes:a1")
