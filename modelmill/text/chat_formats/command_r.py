"""Command R and R+: a list of objects in a Markdown block after "Action:"."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Command R, Command R+",
    detect=(("Action:", "```json", "tool_name"),),
    calls=CallSyntax(
        "json",
        section=("Action: ```json\n[", "]```"),
        separator=", ",
        name_key="tool_name",
        arguments_key="parameters",
        content_end="\n",
    ),
)
