"""Step 3: an <invoke> with a <parameter> for each argument, between control tokens."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax

FORMAT = ChatSyntax(
    title="Step 3",
    detect=(("<｜tool_calls_begin｜>", "<steptml:invoke"),),
    tokens=("<｜tool_calls_begin｜>",),
    calls=CallSyntax(
        "parameters",
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        call=(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        name_end='">',
        parameter=ParameterSyntax('<steptml:parameter name="', '">', "</steptml:parameter>"),
        separator="<｜tool_sep｜>",
    ),
)
