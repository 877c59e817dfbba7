"""DeepSeek V4: as V3.2 with another name of the outer tag."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="DeepSeek V4",
    calls=CallSyntax(
        style="parameters",
        section_open="<｜DSML｜tool_calls>\n",
        call_open='<｜DSML｜invoke name="',
        name_end='">\n',
        parameter=ParameterSyntax(
            '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>\n", type_attribute=True
        ),
        call_close="</｜DSML｜invoke>\n",
        section_close="</｜DSML｜tool_calls>",
        content_end="\n\n",
    ),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    detect=(("DSML", "tool_calls>", "_calls"),),
    control_tokens=("｜DSML｜",),
)
