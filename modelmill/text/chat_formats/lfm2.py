"""LFM2: a list of calls in Python's syntax between control tokens."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="LFM2, LFM2.5",
    detect=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    tokens=("<|tool_call_start|>",),
    calls=CallSyntax(
        "pythonic",
        section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        separator=", ",
        optional=("<|tool_call_start|>", "<|tool_call_end|>"),
        repeats=True,
    ),
)
