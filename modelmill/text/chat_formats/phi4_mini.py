"""Phi-4 mini: functools and a list of objects."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Phi-4 mini",
    calls=CallSyntax(
        style="json",
        section_open="functools[",
        section_close="]",
        separator=", ",
        content_end="\n",
        one_per_message=False,
    ),
    detect=(("functools",), ("<|tool_call|>", "<|/tool_call|>")),
    tokens=("<|tool_call|>", "<|/tool_call|>"),
)
