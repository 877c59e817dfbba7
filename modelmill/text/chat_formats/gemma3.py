"""Gemma 3: a list of calls in Python's syntax, perhaps in a block tool_code."""

from modelmill.text.chat_syntax import ChatSyntax, python_list_call_syntax

FORMAT = ChatSyntax(
    title="Gemma 3 with pythonic calls",
    detect=(("<start_of_turn>", "func_name1("), ("<start_of_turn>", "tool_code")),
    calls=python_list_call_syntax(("```tool_code", "```")),
)
