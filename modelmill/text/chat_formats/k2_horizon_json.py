"""K2 Horizon with ``tool_call_format: json``: objects in its tags."""

from modelmill.text.chat_formats import k2_horizon
from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="K2 Horizon with JSON",
    thinking=k2_horizon.THINKING,
    calls=CallSyntax(
        "json",
        section=("<ifm|tool_calls>\n", "\n</ifm|tool_calls>"),
        call=("<ifm|tool_call>", "</ifm|tool_call>"),
        separator="\n",
        content_end="\n",
        declared_types=True,
    ),
)
