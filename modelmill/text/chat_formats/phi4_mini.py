"""Phi-4 mini: functools and a list of objects."""

from modelmill.text.chat_syntax import ChatSyntax, json_list_call_syntax

FORMAT = ChatSyntax(
    title="Phi-4 mini",
    detect=(("functools",), ("<|tool_call|>", "<|/tool_call|>")),
    tokens=("<|tool_call|>", "<|/tool_call|>"),
    calls=json_list_call_syntax("functools["),
)
