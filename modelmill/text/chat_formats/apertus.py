"""Apertus: a list of objects, each with the name as its only key."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Apertus",
    tokens=("<|tools_prefix|>", "<|tools_suffix|>"),
    dropped=("<|tools_suffix|>",),
    thinking=ThinkingSyntax("<|inner_prefix|>", "<|inner_suffix|>"),
    calls=CallSyntax(
        "named",
        section=("<|tools_prefix|>[", "]<|tools_suffix|>"),
        call=('{"', "}"),
        separator=", ",
        name_end='": ',
        head_pattern=r"(?P<name>[^\"{}\[\]]+)",
    ),
)
