"""Seed-OSS: as Qwen3-Coder with other tags, and thinking in <seed:think>."""

from dataclasses import replace

from modelmill.text.chat_formats import qwen3_coder
from modelmill.text.chat_syntax import ChatSyntax, ParameterSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Seed-OSS",
    detect=(("<seed:tool_call>", "<function=", "<parameter="),),
    thinking=ThinkingSyntax("<seed:think>", "</seed:think>"),
    calls=replace(
        qwen3_coder.FORMAT.calls,
        call=("<seed:tool_call>\n<function=", "</function>\n</seed:tool_call>"),
        parameter=ParameterSyntax("<parameter=", ">", "</parameter>\n", undeclared="string"),
        content_end="\n",
        openers=(),
    ),
)
