"""K2 Horizon with ``tool_call_format: json``: objects in its tags, and no other form."""

from dataclasses import replace

from modelmill.text.chat_formats import k2_horizon
from modelmill.text.chat_syntax import ChatSyntax

FORMAT = ChatSyntax(
    title="K2 Horizon with JSON",
    thinking=k2_horizon.THINKING_SYNTAX,
    calls=replace(
        k2_horizon.FORMAT.calls, style="json", name_end="", parameter=None, json_too=False
    ),
)
