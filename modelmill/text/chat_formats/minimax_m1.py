"""MiniMax M1: objects, a line each, between <tool_calls> and </tool_calls>."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="MiniMax M1",
    calls=CallSyntax(
        style="json",
        section_open="<tool_calls>\n",
        section_close="\n</tool_calls>",
        separator="\n",
        content_end="\n",
    ),
    detect=(("<tool_calls>",),),
)
