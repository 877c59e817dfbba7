"""GLM-4.5 and GLM-4.6: <arg_key> and <arg_value> on lines of their own."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="GLM-4.5, GLM-4.6",
    detect=(
        ("<tool_call>", "<arg_key>", "</arg_key>\n<arg_value>"),
        ("<tool_call>{function-name}\n<arg_key>",),
    ),
    thinking=ThinkingSyntax("<think>", "</think>\n"),
    calls=CallSyntax(
        "parameters",
        call=("<tool_call>", "</tool_call>"),
        name_end="\n",
        parameter=ParameterSyntax("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        separator="\n",
        content_end="\n",
    ),
)
