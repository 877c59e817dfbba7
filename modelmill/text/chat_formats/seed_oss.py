"""Seed-OSS: as Qwen3-Coder with other tags, and thinking in <seed:think>."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Seed-OSS",
    calls=CallSyntax(
        style="parameters",
        call_open="<seed:tool_call>\n<function=",
        name_end=">\n",
        parameter=ParameterSyntax("<parameter=", ">", "</parameter>\n", undeclared="string"),
        call_close="</function>\n</seed:tool_call>",
        separator="\n",
        content_end="\n",
    ),
    thinking=ThinkingSyntax("<seed:think>", "</seed:think>"),
    detect=(("<seed:tool_call>", "<function=", "<parameter="),),
)
