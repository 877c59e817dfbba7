"""GLM-4.7 and GLM-5: as GLM-4.5, without line breaks."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="GLM-4.7, GLM-5, Laguna, Ling 3",
    detect=(
        ("<tool_call>", "</arg_key><arg_value>", "{function-name}<arg_key>"),
        ("<tool_call>", "<arg_key>"),
    ),
    thinking=ThinkingSyntax("<think>", "</think>"),
    calls=CallSyntax(
        "parameters",
        call=("<tool_call>", "</tool_call>"),
        parameter=ParameterSyntax("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
)
