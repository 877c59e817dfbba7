"""Olmo 3: calls in Python's syntax, a line each, in <function_calls>."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Olmo 3",
    detect=(("<function_calls>",),),
    calls=CallSyntax(
        "pythonic",
        section=("<function_calls>", "</function_calls>"),
        separator="\n",
        optional=("<function_calls>", "</function_calls>"),
        content_end="\n",
    ),
)
