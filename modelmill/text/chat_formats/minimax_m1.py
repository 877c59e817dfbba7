"""MiniMax M1: objects, a line each, between <tool_calls> and </tool_calls>."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="MiniMax M1",
    detect=(("<tool_calls>",),),
    calls=CallSyntax(
        "json", section=("<tool_calls>\n", "\n</tool_calls>"), separator="\n", content_end="\n"
    ),
)
