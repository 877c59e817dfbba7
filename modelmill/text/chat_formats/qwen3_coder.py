"""Qwen3-Coder: each argument in a <parameter=…> tag; also Qwen3.5 and later."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax

FORMAT = ChatSyntax(
    title="Qwen3-Coder, Qwen3-Next-Coder, Qwen3.5, Nemotron 3, Granite 4.2, Step 3.5",
    detect=(
        ("<tool_call>", "<function=", "<parameter="),
        ("<tool_call>", "<function=", "<parameter=", "<|start_of_role|>"),
    ),
    calls=CallSyntax(
        "parameters",
        call=("<tool_call>\n<function=", "</function>\n</tool_call>"),
        name_end=">\n",
        parameter=ParameterSyntax("<parameter=", ">\n", "\n</parameter>\n", undeclared="string"),
        separator="\n",
        content_end="\n\n",
        # the outer tag is sometimes left out
        openers=("<function=",),
    ),
)
