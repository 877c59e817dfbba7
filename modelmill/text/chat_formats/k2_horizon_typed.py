"""K2 Horizon with ``tool_call_format: xml_typed``: a tag with the type of each argument."""

from dataclasses import replace

from modelmill.text.chat_formats import k2_horizon
from modelmill.text.chat_syntax import ChatSyntax, ParameterSyntax

FORMAT = ChatSyntax(
    title="K2 Horizon with types",
    thinking=k2_horizon.THINKING_SYNTAX,
    calls=replace(
        k2_horizon.FORMAT.calls,
        parameter=ParameterSyntax(
            "<ifm|arg_key>",
            "</ifm|arg_type>\n<ifm|arg_value>",
            "</ifm|arg_value>\n",
            type_open="</ifm|arg_key>\n<ifm|arg_type>",
            whole_key_end=True,
        ),
        json_too=False,
    ),
)
