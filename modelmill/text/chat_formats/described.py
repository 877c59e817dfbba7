"""For chat templates without tools: the system message describes Hermes' form of a call."""

from dataclasses import replace

from modelmill.text.chat_formats import hermes
from modelmill.text.chat_syntax import ChatSyntax

FORMAT = ChatSyntax(
    title="models whose template has no tools",
    # small models omit the marks even though the prompt describes them
    calls=replace(hermes.FORMAT.calls, bare=True),
)
