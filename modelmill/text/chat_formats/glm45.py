"""GLM-4.5 and GLM-4.6: <arg_key> and <arg_value> on lines of their own."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="GLM-4.5, GLM-4.6",
    calls=CallSyntax(
        style="parameters",
        call_open="<tool_call>",
        name_end="\n",
        parameter=ParameterSyntax(
            "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", undeclared="json"
        ),
        call_close="</tool_call>",
        separator="\n",
        content_end="\n",
    ),
    thinking=ThinkingSyntax("<think>", "</think>\n"),
    detect=(
        ("<tool_call>", "<arg_key>", "</arg_key>\n<arg_value>"),
        ("<tool_call>{function-name}\n<arg_key>",),
    ),
)
