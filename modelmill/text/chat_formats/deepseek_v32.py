"""DeepSeek V3.2: each argument in a tag that says whether it is a string."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

DSML_MARK = "｜DSML｜"


def dsml_call_syntax(section: str) -> CallSyntax:
    """Return the syntax of calls in a tag of this name."""
    return CallSyntax(
        "parameters",
        section=(f"<{DSML_MARK}{section}>\n", f"</{DSML_MARK}{section}>"),
        call=(f'<{DSML_MARK}invoke name="', f"</{DSML_MARK}invoke>\n"),
        name_end='">\n',
        empty_end='"/>',
        parameter=ParameterSyntax(
            f'<{DSML_MARK}parameter name="',
            '">',
            f"</{DSML_MARK}parameter>\n",
            type_attribute="string",
        ),
        content_end="\n\n",
    )


FORMAT = ChatSyntax(
    title="DeepSeek V3.2",
    detect=(("DSML", "function_calls"),),
    control_tokens=(DSML_MARK,),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    calls=dsml_call_syntax("function_calls"),
)
