"""Llama 3.2 and 4 in Python's syntax: the answer is a list of calls."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Llama 3.2 and 4 with pythonic calls, ToolACE",
    calls=CallSyntax(
        style="pythonic",
        section_open="[",
        section_close="]",
        optional_open="<|python_start|>",
        optional_close="<|python_end|>",
        separator=", ",
        bare=True,
    ),
    detect=(
        ("[func_name1(",),
        ("tool_call.name + '('", "[", ")"),
    ),
)
