"""Command A and R7B: a list of objects with a number each, between control tokens."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Command A, Command R7B, Command A Reasoning",
    detect=(("<|START_ACTION|>",), ("<|START_ACTION|>", "tool_call_id", "tool_name")),
    tokens=("<|START_ACTION|>",),
    thinking=ThinkingSyntax("<|START_THINKING|>", "<|END_THINKING|>", ends_at_calls=True),
    calls=CallSyntax(
        "json",
        section=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
        separator=",\n    ",
        name_key="tool_name",
        number_key="tool_call_id",
        arguments_key="parameters",
    ),
)
