"""For chat templates without tools: the system message describes Hermes' form of a call."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="models whose template has no tools",
    calls=CallSyntax(
        style="json",
        call_open="<tool_call>\n",
        call_close="\n</tool_call>",
        separator="\n",
        content_end="\n",
        # small models omit the marks even though the prompt describes them
        bare=True,
    ),
)
