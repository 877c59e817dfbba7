"""Gemma 4: bare keys and marked strings in a call, thinking on a channel."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Gemma 4",
    calls=CallSyntax(
        style="named",
        call_open="<|tool_call>",
        head="call:{name}",
        head_pattern=r"(?:call)?\s*:?\s*(?P<name>[^\s:\"'<>\[\]{}()]+)",
        string_mark='<|"|>',
        call_close="<tool_call|>",
    ),
    thinking=ThinkingSyntax("<|channel>thought\n", "\n<channel|>"),
    detect=(("<|tool_call>call:", "<tool_call|>"),),
    tokens=("<|tool_call>", "<tool_call|>"),
    control_tokens=("<|channel>",),
)
