"""Hunyuan 4: as GLM-4.7 with a section, and a suffix of the checkpoint in every tag."""

from dataclasses import replace

from modelmill.text.chat_formats import glm47
from modelmill.text.chat_syntax import ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Hunyuan 4",
    detect=(("<tool_calls>", "<tool_call>", "<arg_key>", "<arg_value>"),),
    suffixed_tags=("think", "tool_calls", "tool_call", "arg_key", "arg_value"),
    # models begin calls inside the thinking, with tags that no text quotes
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    calls=replace(glm47.FORMAT.calls, section=("<tool_calls>", "</tool_calls>")),
)
