"""The constraint on a whole answer: thinking, then the answer or calls, in one automaton.

So thinking cannot end in an answer that does not match: the grammar allows nothing but the answer
after the mark that ends the thinking.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from modelmill.core.errors import RequestError
from modelmill.core.types import TOKEN_IDS_GRAMMAR, Grammar
from modelmill.text import harmony
from modelmill.text.argument_grammar import ArgumentGrammar
from modelmill.text.call_starts import JSON_CONTENT_FIRST_CHARS
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.chat_syntax import NO_MARKS, CallSyntax, ChatSyntax, ThinkingSyntax
from modelmill.text.lark_builder import NON_EMPTY_TEXT, LarkBuilder
from modelmill.text.nested_tag_grammar import NestedTagGrammar
from modelmill.text.tool_call_reader import split_mark_parts

PromptThinking = Literal["open", "closed", "free"]
"""What the prompt says of the thinking: begun, ended or excluded, or left to the model."""
MAX_CALL_INDEX_DIGITS = 3
TEXT_NOT_STARTING_AS_JSON = rf"~/(?s:\s*[{re.escape(JSON_CONTENT_FIRST_CHARS)}].*)/"
"""Texts that do not begin as JSON does."""


def whole_answer_grammar(
    grammar: Grammar | None,
    format_name: str,
    thinking: ThinkingSyntax | None,
    prompt_thinking: PromptThinking,
    budget: int | None = None,
    begun_tokens: int = 0,
) -> Grammar | None:
    """Return the grammar of a whole answer of a chat format.

    Args:
        grammar: of the answer after the thinking; None: any text.
        format_name: of the chat format.
        thinking: marks of the thinking; None if the model does not think.
        prompt_thinking: what the prompt says of it.
        budget: maximum tokens of the thinking.
        begun_tokens: tokens of the thinking that are in the prompt.

    Returns:
        None if nothing is constrained, the same grammar if the format adds nothing, or if it
        lists the allowed tokens of the whole answer.

    Raises:
        RequestError: for such a list with a budget.
    """
    if grammar is not None and grammar.grammar_type == TOKEN_IDS_GRAMMAR:
        if budget is not None:
            raise RequestError("allowed_token_ids cannot be combined with a budget of thinking")
        return grammar
    thinks = thinking is not None and prompt_thinking != "closed"
    if not thinks:
        budget = None
    syntax = load_chat_syntax(format_name)
    in_format = syntax.calls.style == "harmony" or bool(syntax.begun)
    calls = grammar is not None and grammar.grammar_type == "calls"
    if grammar is None and budget is None:
        return None
    if grammar is not None and not (thinks or calls or in_format):
        return grammar
    marks = [thinking.open, thinking.close] if thinking is not None and thinks else None
    inner = None if grammar is None else {"type": grammar.grammar_type, "text": grammar.text}
    value = {
        "format": format_name,
        "marks": marks,
        "thinking": prompt_thinking,
        "budget": budget,
        "begun_tokens": begun_tokens,
        "answer": inner,
    }
    return Grammar("answer", json.dumps(value))


def build_answer_lark(
    value: Mapping[str, Any], builder: LarkBuilder, documents: Mapping[str, Any] | None
) -> str:
    """Return the grammar in llguidance's format.

    Args:
        value: text of a grammar of the type answer.
        builder: an empty one.
        documents: grammar of the answer, if it is no calls.

    Raises:
        RequestError: if the format cannot express the arguments of a function.
    """
    syntax = load_chat_syntax(value["format"])
    answer = value["answer"]
    if answer["type"] == "calls":
        calls = json.loads(answer["text"])
        if "content" in calls:
            body = _calls_or_content_expr(builder, syntax, calls)
            return builder.build(f"{_thinking_expr(builder, value, blank=False)} {body}")
        body = _tool_calls_expr(builder, syntax, calls)
    else:
        assert documents is not None, "the answer has a grammar"
        body = _content_expr(builder, syntax, builder.add_subgrammar(dict(documents)))
    mark = (
        "" if syntax.begun and answer["type"] == "calls" else _content_start_expr(builder, syntax)
    )
    return builder.build(f"{_thinking_expr(builder, value)} {mark} {body}")


def _content_expr(builder: LarkBuilder, syntax: ChatSyntax, content: str) -> str:
    """Content with the marks around it that the prompt never writes."""
    if syntax.calls.style == "harmony":
        header = builder.literal(f"{harmony.CHANNEL_TOKEN}final{harmony.MESSAGE_TOKEN}")
        content = f"{header} {content}"
    return f"{content} {builder.literal(syntax.content[1])}"


def _content_start_expr(builder: LarkBuilder, syntax: ChatSyntax) -> str:
    """The mark before the content, which the prompt may have written already."""
    opening = builder.literal(syntax.content[0].removeprefix(syntax.begun))
    return f"({opening})?" if opening else ""


def _thinking_expr(builder: LarkBuilder, value: Mapping[str, Any], *, blank: bool = True) -> str:
    """The thinking with its marks, as far as the prompt has not written them.

    blank: also what may stand between it and the answer.
    """
    if value["marks"] is None:
        return ""
    opening, closing = (mark.strip() for mark in value["marks"])
    between = _blank_before_answer_expr(builder, value) if blank else ""
    if load_chat_syntax(value["format"]).calls.style == "harmony":
        closing += f"{harmony.START_TOKEN}assistant"
        between = ""
    body = f"{builder.text_and_end_mark(closing)} {between}"
    if value["thinking"] == "open":
        return f"{body}"
    return f"({builder.literal(opening)} {body})?"


def _blank_before_answer_expr(builder: LarkBuilder, value: Mapping[str, Any]) -> str:
    """What may stand between the thinking and the answer.

    Before JSON and calls any blanks; elsewhere they would be a part of the answer, except for the
    closing mark's own.
    """
    if value["answer"]["type"] in ("json", "calls"):
        return _blanks_expr(builder)
    closing: str = value["marks"][1]
    own = closing[len(closing.rstrip()) :]
    return f"{json.dumps(own)}?" if own else ""


def _blanks_expr(builder: LarkBuilder) -> str:
    """Blanks that may stand before JSON and calls."""
    return builder.add_terminal(r"/[ \n]{1,4}/") + "?"


def _calls_or_content_expr(
    builder: LarkBuilder, syntax: ChatSyntax, value: Mapping[str, Any]
) -> str:
    """Calls or content that a schema holds; which of them, the model's first tokens decide."""
    schema = builder.add_json_schema(value["content"])
    if syntax.calls.style == "react":
        _, call = _calls_opening_and_expr(builder, syntax.calls, value, several=False)
        action = _react_thought_rule(
            builder, "Action: ", "Final Answer:", TEXT_NOT_STARTING_AS_JSON
        )
        final = _react_thought_rule(builder, "Final Answer:", "Action", TEXT_NOT_STARTING_AS_JSON)
        return f'({schema} | {action} {call} | {final} " "? {schema})'
    content = _content_expr(builder, syntax, schema)
    calls = _first_calls_expr(builder, syntax, value)
    mark = _content_start_expr(builder, syntax)
    if syntax.begun:
        return f"({calls} | {mark} {content})"
    blanks = "" if syntax.calls.style == "harmony" else _blanks_expr(builder)
    return f"{blanks} {mark} ({calls} | {content})"


def _first_calls_expr(builder: LarkBuilder, syntax: ChatSyntax, value: Mapping[str, Any]) -> str:
    """Calls with which an answer begins, with any mark that models write before them."""
    calls = syntax.calls
    several = _allows_several_calls(calls, value)
    forms = []
    for each in (True, False) if several and calls.section_if_several else (several,):
        prefix, rest = _calls_opening_and_expr(builder, calls, value, several=each)
        first = syntax.content[1] + prefix.removeprefix(syntax.begun)
        openings = [first, *_other_openings(builder, calls, prefix)]
        opening = " | ".join(builder.literal(text) for text in openings if text)
        opening = f"({opening}){'' if all(openings) else '?'}" if opening else ""
        forms.append(f"{opening} {rest}")
        if calls.style == "pythonic" and calls.optional[0] not in prefix:
            before, after = map(builder.literal, calls.optional)
            forms.append(f'{before} "\\n"? {opening} {rest} "\\n"? {after}')
    return f"({' | '.join(forms)})"


def _other_openings(builder: LarkBuilder, calls: CallSyntax, prefix: str) -> list[str]:
    """What models write in the place of the mark before the first call, where no text is."""
    bracket = "[" if prefix.endswith("[") else ""
    openings = []
    for opener in calls.openers:
        if opener in prefix:
            openings.append(prefix[prefix.index(opener) :])
        elif builder.is_control_token(opener):
            openings.append(opener + bracket)
    if calls.style == "json" and builder.is_control_token(calls.code_mark):
        openings.append(calls.code_mark + prefix)
    return openings


def _allows_several_calls(calls: CallSyntax, value: Mapping[str, Any]) -> bool:
    """Whether an answer may have several calls."""
    return value["most"] is not None and calls.max_calls is None and calls.style != "harmony"


def _calls_opening_and_expr(
    builder: LarkBuilder, calls: CallSyntax, value: Mapping[str, Any], *, several: bool
) -> tuple[str, str]:
    """The mark before one call, or several, and the expression of what follows it."""
    bodies = [_single_call_expr(builder, calls, function) for function in value["functions"]]
    body = f"({' | '.join(bodies)})"
    section = several or not calls.section_if_several
    opening, closing = calls.section if section else NO_MARKS
    call_opening = calls.call[0]
    more = ""
    if several:
        separator = calls.separator + call_opening
        mark = 's "," s' if separator == ", " else builder.literal(separator)
        more = f"({mark} {body}){{0,{value['most'] - 1}}}"
    end = builder.literal(closing) if closing else ""
    return opening + call_opening, f"{body} {more} {end}"


def _tool_calls_expr(builder: LarkBuilder, syntax: ChatSyntax, value: Mapping[str, Any]) -> str:
    """One call, or up to ``most`` calls, perhaps after text (``optional``)."""
    calls, optional = syntax.calls, bool(value.get("optional"))
    prefix, body = _calls_opening_and_expr(
        builder, calls, value, several=_allows_several_calls(calls, value)
    )
    if calls.style == "react":
        thought = f"{_react_thought_rule(builder, 'Action: ', 'Final Answer:')} {body}"
        text = builder.text_without(("Action:",)) if optional else ""
        return f"({text} | {thought})" if text else thought
    if syntax.begun:
        return _calls_begun_in_prompt_expr(builder, syntax, body, optional)
    content_end = syntax.content[1]
    if not optional:
        return f"{builder.literal(content_end + prefix)} {body}"
    if content_end:
        text = builder.text_without((content_end, prefix))
        call = f"{builder.literal(prefix)} {body}"
        return f"{text}? {builder.literal(content_end)} ({call})?"
    names = [function["name"] for function in value["functions"]]
    return _optional_calls_expr(builder, calls, prefix, body, names)


def _calls_begun_in_prompt_expr(
    builder: LarkBuilder, syntax: ChatSyntax, body: str, optional: bool
) -> str:
    """Calls whose first mark the prompt has begun; perhaps text, or text and then calls."""
    opening = syntax.calls.call[0]
    first = f"{builder.literal(opening.removeprefix(syntax.begun))} {body}"
    if not optional:
        return first
    mark = builder.literal(syntax.content[0].removeprefix(syntax.begun))
    text = builder.text_without((opening,))
    return f"({first} | {mark} ({builder.text_and_end_mark(opening)} {body} | {text})?)"


def _react_thought_rule(builder: LarkBuilder, label: str, other: str, start: str = "") -> str:
    """ReAct's thought up to a label.

    Args:
        builder: of the grammar.
        label: ends the thought, on a line of its own.
        other: does not occur in it.
        start: expression of what the thought matches.
    """
    word = label.split(":", maxsplit=1)[0]
    terms = [
        rf"/((?s:.*)\n)?{label}/",
        f"~/(?s:.*){other}(?s:.*)/",
        f"~/(?s:.*){word}(?s:.*){label}/",
        start,
    ]
    return builder.add_rule(builder.add_terminal(" & ".join(filter(None, terms))), "[lazy]")


def _optional_calls_expr(
    builder: LarkBuilder, calls: CallSyntax, prefix: str, body: str, names: Sequence[str]
) -> str:
    """Text, or text and calls; the text has nothing that the parser reads as a call."""
    if calls.style == "harmony":
        final = builder.literal(f"{harmony.CHANNEL_TOKEN}final{harmony.MESSAGE_TOKEN}")
        return f"({final} {builder.text_without(())} | {body})"
    parts = split_mark_parts(prefix)
    if calls.whole_marks:
        parts = tuple(filter(None, (calls.section[0].strip(), calls.call[0].strip())))
    opener = parts[0] if parts and len(parts[0]) > 1 else ""
    marks = [
        opener,
        *(parts if calls.whole_marks else ()),
        *calls.openers,
        *calls.inline,
        calls.code_mark,
        calls.optional[0],
    ]
    if calls.style == "pythonic":
        marks += [f"[{name}(" for name in names]
    excluded = tuple(filter(None, marks))
    start = r"/[^{\[\s](?s:.*)/" if calls.bare else NON_EMPTY_TEXT
    text = builder.text_without(excluded, start)
    if not opener:
        return f"({text} | {builder.literal(prefix)} {body})"
    rest = prefix[prefix.index(opener) + len(opener) :]
    call = f"{builder.literal(rest)} {body}"
    if builder.is_control_token(opener):
        return f"{text}? ({builder.literal(opener)} {call})?"
    terms = (r"~/(?s:\s*[{\[].*)/",) if calls.bare else ()
    return f"({builder.text_and_end_mark(opener, terms=terms)} {call} | {text})"


def _single_call_expr(builder: LarkBuilder, calls: CallSyntax, function: Mapping[str, Any]) -> str:
    """One call without the mark before it."""
    name, schema = function["name"], function["arguments"]
    close = builder.literal(calls.call[1])
    if calls.style == "json":
        key, text, arguments = (
            json.dumps(json.dumps(each)) for each in (calls.name_key, name, calls.arguments_key)
        )
        value = builder.add_json_schema(schema)
        number = ""
        if calls.number_key:
            digits = builder.add_terminal(f'/"[0-9]{{1,{MAX_CALL_INDEX_DIGITS}}}"/')
            number = f'{json.dumps(json.dumps(calls.number_key))} s ":" s {digits} s "," s '
        body = f'"{{" s {number}{key} s ":" s {text} s "," s {arguments} s ":" s {value} s "}}"'
        return f"{body} {close}"
    if calls.style == "react":
        return f"{json.dumps(name + calls.name_end)} {builder.add_json_schema(schema)}"
    if calls.style == "harmony":
        header = (
            f"{harmony.CHANNEL_TOKEN}commentary to=functions.{name} {harmony.CONSTRAIN_TOKEN}json"
            f"{harmony.MESSAGE_TOKEN}"
        )
        return f"{builder.literal(header)} {builder.add_json_schema(schema)}"
    if calls.style == "tags":
        head = f"{_call_head_expr(builder, calls, name)} {builder.literal(calls.name_end)}"
        return f"{head} {NestedTagGrammar(builder, calls, name, schema).nested_tags_expr()} {close}"
    parts = (
        ArgumentGrammar(builder, calls, name, schema)
        if not calls.writes_arguments_as_json
        else None
    )
    if calls.style == "pythonic":
        assert parts is not None, "this style has a syntax of its own"
        return f'{json.dumps(name + "(")} {parts.keyword_arguments_expr()} ")"'
    head = f"{_call_head_expr(builder, calls, name)} {builder.literal(calls.name_end)}"
    if parts is None:
        return f"{head} {builder.add_json_schema(schema)} {close}"
    body = (
        parts.delimited_arguments_expr()
        if calls.style == "parameters"
        else parts.bare_key_object_expr()
    )
    return f"{head} {body} {close}"


def _call_head_expr(builder: LarkBuilder, calls: CallSyntax, name: str) -> str:
    parts, rest = [], calls.head.replace("{name}", name)
    for field, pattern in (
        ("{index}", f"/[0-9]{{1,{MAX_CALL_INDEX_DIGITS}}}/"),
        ("{number}", f"/[0-9]{{1,{MAX_CALL_INDEX_DIGITS}}}/"),
        ("{id}", "/[a-zA-Z0-9]{9}/"),
    ):
        before, found, after = rest.partition(field)
        if found:
            parts += [builder.literal(before), builder.add_terminal(pattern)]
            rest = after
    return " ".join(filter(None, [*parts, builder.literal(rest)]))
