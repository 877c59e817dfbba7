"""Gemma 3: a list of calls in Python's syntax, perhaps in a block tool_code."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Gemma 3 with pythonic calls",
    calls=CallSyntax(
        style="pythonic",
        section_open="[",
        section_close="]",
        separator=", ",
        optional_open="```tool_code",
        optional_close="```",
        bare=True,
    ),
    detect=(("<start_of_turn>", "func_name1("), ("<start_of_turn>", "tool_code")),
)
