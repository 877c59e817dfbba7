"""Hunyuan A13B and Apriel: a list of objects in <tool_calls>."""

from modelmill.text.chat_syntax import ChatSyntax, json_list

FORMAT = ChatSyntax(
    title="Hunyuan A13B, Apriel 1.5",
    detect=(("<tool_calls>[",),),
    calls=json_list("<tool_calls>[", "]</tool_calls>"),
)
