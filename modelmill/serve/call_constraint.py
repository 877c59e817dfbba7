"""The constraint on an answer that may have calls: of strict functions, and beside a schema.

The schema of a request binds the content of an answer. Calls stay possible beside it, and the
model decides which of both it writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.core.types import TOKEN_IDS_GRAMMAR, Grammar
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.schema_relaxation import relax_grammar_if_needed
from modelmill.text.calls_or_schema import calls_or_schema_grammar, find_ambiguous_calls
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.tool_grammar import optional_strict_call_grammar

MAX_WARNING_FUNCTION_NAMES = 8
"""Of a warning."""


def constrain_optional_tool_calls(
    body: ChatRequest, grammar: Grammar | None, format_name: str
) -> Grammar | None:
    """Return the constraint on an answer whose request may offer tools.

    Args:
        body: the HTTP request; what its schema holds is recorded in it.
        grammar: its own constraint on the output, validated.
        format_name: of the chat format.

    Raises:
        RequestError: the parameters of a strict function cannot be used.
    """
    offered = body.offered_tools
    if not offered or body.forces_tool_call:
        return grammar
    if grammar is None:
        return _strict_tool_grammar(body, offered, format_name)
    if grammar.grammar_type == TOKEN_IDS_GRAMMAR:
        return grammar
    if grammar.grammar_type != "json":
        body.add_warnings(
            [
                f"{body.grammar_field}: it holds the whole answer, so that a tool can be called "
                "only where it allows the text of a call"
            ]
        )
        return grammar
    schema = json.loads(grammar.text)
    both = _optional_calls_or_schema_grammar(body, offered, schema, format_name)
    body.set_schema_scope("answer" if both is None else "content")
    return grammar if both is None else both


def _strict_tool_grammar(
    body: ChatRequest, offered: Sequence[dict[str, Any]], format_name: str
) -> Grammar | None:
    """The constraint on calls of strict functions that the model may leave out.

    Raises:
        RequestError: the parameters of a function cannot be used.
    """
    grammar = optional_strict_call_grammar(
        offered,
        body.parallel_tool_calls is not False,
        as_json=load_chat_syntax(format_name).calls.writes_arguments_as_json,
    )
    if grammar is None:
        return None
    if body.ignore_eos:
        raise RequestError("ignore_eos has no meaning with a strict function; leave it out")
    usable, reasons = relax_grammar_if_needed(grammar, "tools")
    body.add_warnings(reasons)
    return usable


def _optional_calls_or_schema_grammar(
    body: ChatRequest, offered: Sequence[dict[str, Any]], schema: Any, format_name: str
) -> Grammar | None:
    """The constraint on calls or content of a schema; None if content may look like a call.

    Raises:
        RequestError: the parameters of a strict function cannot be used.
    """
    field = body.grammar_field
    functions = {tool["function"]["name"]: tool["function"] for tool in offered}
    ambiguous = find_ambiguous_calls(schema, list(functions), format_name)
    more = len(ambiguous) - MAX_WARNING_FUNCTION_NAMES
    listed = ", ".join(ambiguous[:MAX_WARNING_FUNCTION_NAMES]) + (
        f" and {more} more" if more > 0 else ""
    )
    if any(functions[name].get("strict") for name in ambiguous):
        body.add_warnings(
            [
                f"{field}: no tool can be called beside it: this model writes a call of {listed} "
                "as JSON that it allows, too, and their arguments are strict"
            ]
        )
        return None
    if ambiguous:
        body.add_warnings(
            [f"{field}: content that begins as this model's calls of {listed} do is such a call"]
        )
    try:
        grammar, reasons = calls_or_schema_grammar(
            offered, body.parallel_tool_calls is not False, schema, format_name
        )
        body.add_warnings([f"tools: {reason}" for reason in reasons])
        if grammar is None:
            return None
        usable, reasons = relax_grammar_if_needed(grammar, "tools")
    except RequestError as error:
        if any(function.get("strict") for function in functions.values()):
            raise
        # each for itself is usable, both together are too much
        body.add_warnings([f"{field}: no tool can be called beside it: {error}"])
        return None
    body.add_warnings(reasons)
    return usable
