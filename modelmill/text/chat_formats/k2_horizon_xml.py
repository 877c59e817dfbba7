"""K2 Horizon with ``tool_call_format: xml``: a tag for each argument, and no other form."""

from dataclasses import replace

from modelmill.text.chat_formats import k2_horizon
from modelmill.text.chat_syntax import NO_MARKS, ChatSyntax

_BASE_CALL_SYNTAX = k2_horizon.FORMAT.calls
assert _BASE_CALL_SYNTAX.parameter is not None, "arguments have marks of their own"
FORMAT = ChatSyntax(
    title="K2 Horizon with tags",
    thinking=k2_horizon.THINKING_SYNTAX,
    calls=replace(
        _BASE_CALL_SYNTAX,
        parameter=replace(_BASE_CALL_SYNTAX.parameter, type_marks=NO_MARKS),
        json_too=False,
    ),
)
