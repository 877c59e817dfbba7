"""MiniMax M2: <invoke> with a <parameter> for each argument."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax

FORMAT = ChatSyntax(
    title="MiniMax M2, M2.1, M2.5",
    calls=CallSyntax(
        style="parameters",
        section_open="<minimax:tool_call>\n",
        call_open='<invoke name="',
        name_end='">\n',
        parameter=ParameterSyntax('<parameter name="', '">', "</parameter>\n", undeclared="string"),
        call_close="</invoke>\n",
        section_close="</minimax:tool_call>",
        content_end="\n",
    ),
    detect=(("<minimax:tool_call>",),),
    tokens=("<minimax:tool_call>",),
)
