"""Mistral's tokenizers v11: [TOOL_CALLS]name[CALL_ID]id[ARGS]object."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Mistral tokenizer v11: Mistral Small 3.2",
    tokens=("[TOOL_CALLS]", "[CALL_ID]"),
    control_tokens=("[CALL_ID]",),
    thinking=ThinkingSyntax("[THINK]", "[/THINK]"),
    calls=CallSyntax(
        "named",
        call=("[TOOL_CALLS]", ""),
        short_ids=True,
        json_too=True,
        head="{name}[CALL_ID]{id}",
        head_pattern=r"(?P<name>[a-zA-Z0-9_.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>[a-zA-Z0-9_-]+))?",
        name_end="[ARGS]",
    ),
)
