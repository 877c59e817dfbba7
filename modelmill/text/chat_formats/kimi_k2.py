"""Kimi K2: a section of calls between control tokens; the id has the name and a number."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
ARGUMENTS = "<|tool_call_argument_begin|>"

FORMAT = ChatSyntax(
    title="Kimi K2, K2 Thinking, K2.5",
    tokens=(SECTION[0], ARGUMENTS),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    dropped=(SECTION[1], CALL[1], ARGUMENTS),
    calls=CallSyntax(
        "named",
        section=SECTION,
        call=CALL,
        id_from_head=True,
        counter_alone=True,
        head="functions.{name}:{index}",
        head_pattern=r"(?:functions\.)?(?P<name>[^\s:<>{}]+?)(?::[0-9]+)?",
        name_end=ARGUMENTS,
    ),
)
