"""The constraint on an answer that is calls or content of a schema, for one chat format.

A tool that is not strict may be called with any arguments, so that its parameters must not make
the request fail: what its format cannot express of them is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.text.answer_grammar import whole_answer_grammar
from modelmill.text.call_starts import is_unmarked_json, unmarked_json_starts
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.grammar import check_grammar, filter_allowed_prefixes
from modelmill.text.tool_grammar import call_or_schema_grammar

Tool = Mapping[str, Any]


def calls_or_schema_grammar(
    tools: Sequence[Tool], several: bool, schema: Any, format_name: str
) -> tuple[Grammar | None, list[str]]:
    """Return the grammar of an answer that is calls of these tools, or content.

    Args:
        tools: definitions of the tools.
        several: whether there may be several calls.
        schema: JSON schema of the content, which is known to compile.
        format_name: of the chat format.

    Returns:
        The grammar, None if no tool can be called, and which tools cannot.

    Raises:
        RequestError: if the parameters of a strict function are not an object.
    """
    as_json = load_chat_syntax(format_name).calls.writes_arguments_as_json

    def make(some: Sequence[Tool]) -> Grammar:
        return call_or_schema_grammar(some, several, schema, as_json=as_json)

    def problem(some: Sequence[Tool]) -> str:
        try:
            whole = whole_answer_grammar(make(some), format_name, None, "closed")
            assert whole is not None, "calls have a grammar"
            check_grammar(whole)
        except RequestError as error:
            return str(error)
        return ""

    if not problem(tools):
        return make(tools), []
    usable, reasons = list[Tool](), list[str]()
    for tool in tools:
        loose = allow_any_argument_values(tool)
        if tool["function"].get("strict") or not problem([tool]):
            usable.append(tool)  # a strict one that cannot be expressed is an error
        elif not (reason := problem([loose])):
            usable.append(loose)
        else:
            cause = reason.rpartition("tools: ")[2]
            reasons.append(f"{tool['function']['name']} cannot be called beside a schema: {cause}")
    return (make(usable) if usable else None), reasons


def allow_any_argument_values(tool: Tool) -> dict[str, Any]:
    """Return a tool that takes the same arguments with any values."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    names = parameters.get("properties")
    required = parameters.get("required")
    loose = {
        "type": "object",
        "properties": {name: {} for name in names} if isinstance(names, Mapping) else {},
        "required": required if isinstance(required, list) else [],
    }
    return {**tool, "function": {**function, "parameters": loose}}


def find_ambiguous_calls(schema: Any, names: Sequence[str], format_name: str) -> list[str]:
    """Return the functions of which a call begins as content of the schema may."""
    calls = load_chat_syntax(format_name).calls
    if not is_unmarked_json(calls):
        return []
    starts = {"".join(start): name for name in names for start in unmarked_json_starts(calls, name)}
    allowed = filter_allowed_prefixes(Grammar("json", json.dumps(schema)), starts)
    return list(dict.fromkeys(starts[text] for text in allowed))
