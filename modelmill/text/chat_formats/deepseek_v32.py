"""DeepSeek V3.2: each argument in a tag that says whether it is a string."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="DeepSeek V3.2",
    detect=(("DSML", "function_calls"),),
    control_tokens=("｜DSML｜",),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    calls=CallSyntax(
        "parameters",
        section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>\n"),
        name_end='">\n',
        empty_end='"/>',
        parameter=ParameterSyntax(
            '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>\n", type_attribute="string"
        ),
        content_end="\n\n",
    ),
)
