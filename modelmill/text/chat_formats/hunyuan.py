"""Hunyuan A13B and Apriel: a list of objects in <tool_calls>."""

from modelmill.text.chat_syntax import ChatSyntax, json_list_call_syntax

FORMAT = ChatSyntax(
    title="Hunyuan A13B, Apriel 1.5",
    detect=(("<tool_calls>[",),),
    calls=json_list_call_syntax("<tool_calls>[", "]</tool_calls>"),
)
