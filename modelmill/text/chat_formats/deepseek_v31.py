"""DeepSeek V3.1: name and arguments between control tokens."""

from dataclasses import replace

from modelmill.text.chat_formats import deepseek_v3
from modelmill.text.chat_syntax import ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="DeepSeek V3.1",
    tokens=("<｜tool▁calls▁begin｜>",),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    calls=replace(
        deepseek_v3.FORMAT.calls,
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        name_end="<｜tool▁sep｜>",
        separator="",
    ),
)
