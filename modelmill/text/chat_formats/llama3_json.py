"""Llama 3.1 to 3.3: the answer is {"name", "parameters"}, or follows <|python_tag|>."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Llama 3.1, 3.2, 3.3 and 4 with JSON",
    detect=(("ipython", '"parameters": '), ("ipython", '\\"parameters\\": '), ("<|python_tag|>",)),
    tokens=("<|python_tag|>",),
    calls=CallSyntax(
        "json",
        separator="; ",
        arguments_key="parameters",
        content_end="<|python_tag|>",
        bare=True,
        inline=('{"name"', '{"type": "function"'),
        one_per_message=True,
        code_mark="<|python_tag|>",
    ),
)
