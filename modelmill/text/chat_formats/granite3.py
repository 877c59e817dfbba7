"""Granite 3: <|tool_call|> and a list of objects."""

from dataclasses import replace

from modelmill.text.chat_syntax import ChatSyntax, json_list_call_syntax

FORMAT = ChatSyntax(
    title="Granite 3.0 to 3.3",
    detect=(("<|tool_call|>",), ("<|start_of_role|>", "tools")),
    tokens=("<|tool_call|>", "<|start_of_role|>"),
    calls=replace(
        json_list_call_syntax("<|tool_call|>[", content_end=""),
        # 3.0 writes the mark without bars, or nothing before the list
        openers=("<tool_call>",),
        bare=True,
    ),
)
