"""Hunyuan A13B and Apriel: a list of objects in <tool_calls>."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Hunyuan A13B, Apriel 1.5",
    calls=CallSyntax(
        style="json",
        section_open="<tool_calls>[",
        section_close="]</tool_calls>",
        separator=", ",
        content_end="\n",
    ),
    detect=(("<tool_calls>[",),),
)
