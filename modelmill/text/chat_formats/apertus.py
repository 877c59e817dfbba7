"""Apertus: a list of objects, each with the name as its only key."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

PREFIX, SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"

FORMAT = ChatSyntax(
    title="Apertus",
    tokens=(PREFIX, SUFFIX),
    dropped=(SUFFIX,),
    thinking=ThinkingSyntax("<|inner_prefix|>", "<|inner_suffix|>"),
    calls=CallSyntax(
        "named",
        section=(f"{PREFIX}[", f"]{SUFFIX}"),
        call=('{"', "}"),
        separator=", ",
        name_end='": ',
        head_pattern=r"(?P<name>[^\"{}\[\]]+)",
    ),
)
