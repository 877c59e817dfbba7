"""MiniMax M2: <invoke> with a <parameter> for each argument."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax

FORMAT = ChatSyntax(
    title="MiniMax M2, M2.1, M2.5",
    tokens=("<minimax:tool_call>",),
    calls=CallSyntax(
        "parameters",
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        call=('<invoke name="', "</invoke>\n"),
        name_end='">\n',
        parameter=ParameterSyntax('<parameter name="', '">', "</parameter>\n", undeclared="string"),
        content_end="\n",
    ),
)
