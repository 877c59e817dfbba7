"""Mistral's tokenizers v1 to v3 (and Tekken v3): [TOOL_CALLS] and a list of objects."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Mistral tokenizers v1 to v3: Mistral 7B v0.3, Mixtral, Nemo, Large 2407",
    calls=CallSyntax(
        style="json",
        section_open="[TOOL_CALLS] [",
        section_close="]",
        separator=", ",
        short_ids=True,
    ),
    thinking=ThinkingSyntax("[THINK]", "[/THINK]"),
    detect=(("[TOOL_CALLS]",),),
    tokens=("[TOOL_CALLS]",),
)
