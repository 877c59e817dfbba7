"""LongCat: JSON objects in <longcat_tool_call> tags."""

from dataclasses import replace

from modelmill.text.chat_formats import hermes
from modelmill.text.chat_syntax import ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="LongCat Flash",
    detect=(("<longcat_tool_call>",),),
    thinking=ThinkingSyntax("<longcat_think>\n", "\n</longcat_think>\n"),
    calls=replace(hermes.FORMAT.calls, call=("<longcat_tool_call>\n", "\n</longcat_tool_call>")),
)
