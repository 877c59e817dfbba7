"""Functionary 2.5: a control token and the name, then the arguments on the next line."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Functionary 2.5",
    detect=(("<|reserved_special_token_249|>",),),
    calls=CallSyntax("named", call=("<|reserved_special_token_249|>", ""), name_end="\n"),
)
