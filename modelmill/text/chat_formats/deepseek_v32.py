"""DeepSeek V3.2: each argument in a tag that says whether it is a string."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="DeepSeek V3.2",
    calls=CallSyntax(
        style="parameters",
        section_open="<｜DSML｜function_calls>\n",
        call_open='<｜DSML｜invoke name="',
        name_end='">\n',
        parameter=ParameterSyntax(
            '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>\n", type_attribute=True
        ),
        call_close="</｜DSML｜invoke>\n",
        section_close="</｜DSML｜function_calls>",
        content_end="\n\n",
    ),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    detect=(("DSML", "function_calls"),),
    control_tokens=("｜DSML｜",),
)
