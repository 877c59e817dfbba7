"""Gemma 4: bare keys and marked strings in a call, thinking on a channel."""

from dataclasses import replace

from modelmill.text.chat_formats import function_gemma
from modelmill.text.chat_syntax import ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Gemma 4",
    detect=(("<|tool_call>call:", "<tool_call|>"),),
    tokens=("<|tool_call>", "<tool_call|>"),
    control_tokens=("<|channel>",),
    thinking=ThinkingSyntax("<|channel>thought\n", "\n<channel|>"),
    calls=replace(
        function_gemma.FORMAT.calls,
        call=("<|tool_call>", "<tool_call|>"),
        string_mark='<|"|>',
    ),
)
