"""MiniCPM5: a <function> with a <param> for each argument."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax

FORMAT = ChatSyntax(
    title="MiniCPM5",
    detect=(('<function name="', '<param name="'),),
    calls=CallSyntax(
        "parameters",
        call=('<function name="', "</function>"),
        name_end='">',
        parameter=ParameterSyntax('<param name="', '">', "</param>", verbatim=("<![CDATA[", "]]>")),
        separator="\n",
        content_end="\n",
        checked=True,
    ),
)
