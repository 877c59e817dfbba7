"""Hermes: JSON objects in <tool_call> tags, also of Qwen 2.5, Qwen3, Granite 4 and many others."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Hermes 2 and 3, Qwen 2.5, Qwen3, QwQ, Granite 4, SmolLM3",
    detect=(("<tool_call>",), ("<tool_call>", "</tool_call>", "<|start_of_role|>")),
    calls=CallSyntax(
        "json", call=("<tool_call>\n", "\n</tool_call>"), separator="\n", content_end="\n"
    ),
)
