"""Apertus: a list of objects, each with the name as its only key."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

TOOL_CALLS_OPEN, TOOL_CALLS_CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"

FORMAT = ChatSyntax(
    title="Apertus",
    tokens=(TOOL_CALLS_OPEN, TOOL_CALLS_CLOSE),
    dropped=(TOOL_CALLS_CLOSE,),
    thinking=ThinkingSyntax("<|inner_prefix|>", "<|inner_suffix|>"),
    calls=CallSyntax(
        "named",
        section=(f"{TOOL_CALLS_OPEN}[", f"]{TOOL_CALLS_CLOSE}"),
        call=('{"', "}"),
        separator=", ",
        name_end='": ',
        head_pattern=r"(?P<name>[^\"{}\[\]]+)",
    ),
)
