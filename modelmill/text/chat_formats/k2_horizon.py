"""K2 Horizon: GLM's layout in tags of its own; where no variable names a form, all are read."""

from modelmill.text.chat_syntax import (
    CallSyntax,
    ChatFormatVariant,
    ChatSyntax,
    ParameterSyntax,
    ThinkingSyntax,
)

THINKING_SYNTAX = ThinkingSyntax("<ifm|think>\n", "\n</ifm|think>\n")
FORMAT = ChatSyntax(
    title="K2 Horizon",
    detect=(("<ifm|tool_calls>",),),
    tokens=("<ifm|tool_calls>",),
    thinking=THINKING_SYNTAX,
    calls=CallSyntax(
        "parameters",
        section=("<ifm|tool_calls>\n", "\n</ifm|tool_calls>"),
        call=("<ifm|tool_call>", "</ifm|tool_call>"),
        name_end="\n",
        parameter=ParameterSyntax(
            "<ifm|arg_key>",
            "</ifm|arg_key>\n<ifm|arg_value>",
            "</ifm|arg_value>\n",
            type_marks=("<ifm|arg_type>", "</ifm|arg_type>"),
            whole_key_end=True,
        ),
        json_too=True,
        declared_types=True,
        separator="\n",
        content_end="\n",
    ),
    variants=(
        ChatFormatVariant("tool_call_format", "xml", "k2_horizon_xml"),
        ChatFormatVariant("tool_call_format", "json", "k2_horizon_json"),
        ChatFormatVariant("tool_call_format", "xml_typed", "k2_horizon_typed"),
        ChatFormatVariant(
            "reasoning_effort",
            "medium",
            thinking=ThinkingSyntax("<ifm|think_fast>\n", "\n</ifm|think_fast>\n"),
        ),
        ChatFormatVariant(
            "reasoning_effort",
            "low",
            thinking=ThinkingSyntax("<ifm|think_faster>\n", "\n</ifm|think_faster>\n"),
        ),
    ),
)
