"""dots: <invoke> with a <parameter> for each argument, or a JSON object, between marks."""

from dataclasses import replace

from modelmill.text.chat_formats import minimax_m2
from modelmill.text.chat_syntax import ChatSyntax

FORMAT = ChatSyntax(
    title="dots",
    tokens=("<dots_function_call>",),
    dropped=("</dots_function_call>",),
    calls=replace(
        minimax_m2.FORMAT.calls,
        section=("<dots_function_call>\n", "</dots_function_call>"),
        json_too=True,
    ),
)
