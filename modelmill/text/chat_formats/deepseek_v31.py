"""DeepSeek V3.1: name and arguments between control tokens."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="DeepSeek V3.1",
    calls=CallSyntax(
        style="named",
        section_open="<｜tool▁calls▁begin｜>",
        call_open="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        call_close="<｜tool▁call▁end｜>",
        section_close="<｜tool▁calls▁end｜>",
    ),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    detect=(("<｜tool▁calls▁begin｜>",),),
    tokens=("<｜tool▁calls▁begin｜>",),
)
