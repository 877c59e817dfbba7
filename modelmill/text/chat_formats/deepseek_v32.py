"""DeepSeek V3.2: each argument in a tag that says whether it is a string."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

MARK = "｜DSML｜"


def dsml_call_syntax(section: str) -> CallSyntax:
    """Return the syntax of calls in a tag of this name."""
    return CallSyntax(
        "parameters",
        section=(f"<{MARK}{section}>\n", f"</{MARK}{section}>"),
        call=(f'<{MARK}invoke name="', f"</{MARK}invoke>\n"),
        name_end='">\n',
        empty_end='"/>',
        parameter=ParameterSyntax(
            f'<{MARK}parameter name="', '">', f"</{MARK}parameter>\n", type_attribute="string"
        ),
        content_end="\n\n",
    )


FORMAT = ChatSyntax(
    title="DeepSeek V3.2",
    detect=(("DSML", "function_calls"),),
    control_tokens=(MARK,),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    calls=dsml_call_syntax("function_calls"),
)
