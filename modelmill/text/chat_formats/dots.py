"""dots: <invoke> with a <parameter> for each argument, or a JSON object, between marks."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax

FORMAT = ChatSyntax(
    title="dots",
    tokens=("<dots_function_call>",),
    dropped=("</dots_function_call>",),
    calls=CallSyntax(
        "parameters",
        section=("<dots_function_call>\n", "</dots_function_call>"),
        call=('<invoke name="', "</invoke>\n"),
        name_end='">\n',
        parameter=ParameterSyntax('<parameter name="', '">', "</parameter>\n", undeclared="string"),
        content_end="\n",
        json_too=True,
    ),
)
