"""Hunyuan 3: <tool_sep> after the name, <arg_key> and <arg_value> on lines of their own."""

from dataclasses import replace

from modelmill.text.chat_formats import glm45
from modelmill.text.chat_syntax import ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Hunyuan 3",
    detect=(("<tool_calls>", "<tool_call>", "<tool_sep>", "<arg_key>", "<arg_value>"),),
    # a suffix in the release, none in the preview
    suffixed_tags=("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value"),
    thinking=ThinkingSyntax("<think>", "</think>"),
    calls=replace(
        glm45.FORMAT.calls,
        section=("<tool_calls>\n", "\n</tool_calls>"),
        name_end="<tool_sep>\n",
        content_end="",
    ),
)
