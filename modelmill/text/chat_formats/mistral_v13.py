"""Mistral's tokenizers v13: [TOOL_CALLS]name[ARGS]object, and [THINK] for thinking."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Mistral tokenizer v13: Magistral, Devstral, Ministral 3",
    calls=CallSyntax(
        style="named",
        call_open="[TOOL_CALLS]",
        head_pattern=r"(?P<name>[a-zA-Z0-9_.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>[a-zA-Z0-9_-]+))?",
        name_end="[ARGS]",
        short_ids=True,
    ),
    thinking=ThinkingSyntax("[THINK]", "[/THINK]"),
    detect=(("[TOOL_CALLS]", "[ARGS]"),),
    tokens=("[TOOL_CALLS]", "[ARGS]"),
    control_tokens=("[CALL_ID]",),
)
