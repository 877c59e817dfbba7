"""Mistral's tokenizers v13: [TOOL_CALLS]name[ARGS]object, and [THINK] for thinking."""

from dataclasses import replace

from modelmill.text.chat_formats import mistral_v11

FORMAT = replace(
    mistral_v11.FORMAT,
    title="Mistral tokenizer v13: Magistral, Devstral, Ministral 3",
    tokens=("[TOOL_CALLS]", "[ARGS]"),
    calls=replace(mistral_v11.FORMAT.calls, head="{name}"),
)
