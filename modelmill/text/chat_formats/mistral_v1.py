"""Mistral's tokenizers v1 to v3 (and Tekken v3): [TOOL_CALLS] and a list of objects."""

from dataclasses import replace

from modelmill.text.chat_syntax import ChatSyntax, ThinkingSyntax, json_list_call_syntax

FORMAT = ChatSyntax(
    title="Mistral tokenizers v1 to v3: Mistral 7B v0.3, Mixtral, Nemo, Large 2407",
    tokens=("[TOOL_CALLS]",),
    thinking=ThinkingSyntax("[THINK]", "[/THINK]"),
    # a list whose mark the model leaves out, or with other text between
    calls=replace(
        json_list_call_syntax("[TOOL_CALLS] [", content_end=""),
        inline=('[{"name"',),
        short_ids=True,
    ),
)
