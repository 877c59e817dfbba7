"""Command R and R+: a list of objects in a Markdown block after "Action:"."""

from dataclasses import replace

from modelmill.text.chat_syntax import ChatSyntax, json_list_call_syntax

FORMAT = ChatSyntax(
    title="Command R, Command R+",
    detect=(("Action:", "```json", "tool_name"),),
    calls=replace(
        json_list_call_syntax("Action: ```json\n[", "]```"),
        name_key="tool_name",
        arguments_key="parameters",
    ),
)
