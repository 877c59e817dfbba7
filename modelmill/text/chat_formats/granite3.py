"""Granite 3: <|tool_call|> and a list of objects."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Granite 3.0 to 3.3",
    calls=CallSyntax(
        style="json",
        section_open="<|tool_call|>[",
        section_close="]",
        separator=", ",
        # 3.0 writes the mark without bars, or nothing before the list
        openers=("<tool_call>",),
        bare=True,
    ),
    detect=(
        ("<|tool_call|>",),
        ("<|start_of_role|>", "tools"),
    ),
    tokens=("<|tool_call|>", "<|start_of_role|>"),
)
